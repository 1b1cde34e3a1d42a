"""What a process needs that uses the pool."""

import subprocess
import sys

ABSENT = ("torch", "openvino", "safetensors", "tokenizers", "llguidance", "huggingface_hub", "kopf")
MODULES = ("dialer", "pool", "rounds")


def test_the_pool_runs_without_an_engine_and_a_tokenizer() -> None:
    absent = "; ".join(f"sys.modules[{each!r}] = None" for each in ABSENT)
    needed = ", ".join(f"ssd.pool.{each}" for each in MODULES)
    program = f"import sys; {absent}; import {needed}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
