"""OpenVINO GenAI: its continuous batching pipeline, plain or with a draft model."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import openvino as ov
import openvino_genai as genai

if TYPE_CHECKING:
    from ssd_bench.peers.workers.wire import Batch, Complete, Completion, Config

FORMATS = {"float32": "fp16", "bfloat16": "fp16", "int8": "int8", "int4": "int4"}
"""How the exported weights are stored: 16 bits, its default, also with arithmetic in float32."""
OPTIONS = {"int4": ("--sym", "--group-size", "64", "--group-size-fallback", "adjust")}
"""As this product stores int4: 64 weights of a row share a scale."""
HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int4": "f32"}
CACHE_GIB = 1


def exported(folder: str, dtype: str, scratch: str) -> Path:
    """Return the folder of a converted model; converts it if no earlier run did."""
    source = Path(folder)
    digest = hashlib.sha256()
    for file in sorted(source.glob("*.safetensors")):
        digest.update(file.read_bytes())
    model = Path(scratch) / f"openvino-{digest.hexdigest()[:12]}-{FORMATS[dtype]}"
    if not (model / "done").exists():
        program = Path(sys.executable).with_name("optimum-cli")
        subprocess.run(
            [
                *(program, "export", "openvino", "--model", source),
                *("--task", "text-generation-with-past", "--weight-format", FORMATS[dtype]),
                *(*OPTIONS.get(dtype, ()), model),
            ],
            check=True,
            stdout=sys.stderr,
        )
        (model / "done").touch()
    return model


def load(config: Config) -> tuple[str, Complete]:
    """Load the models."""
    properties = {
        "INFERENCE_NUM_THREADS": config["threads"],
        "INFERENCE_PRECISION_HINT": HINTS[config["dtype"]],
    }
    drafting = {}
    if "draft" in config:
        folder = exported(config["draft"], config["dtype"], config["scratch"])
        drafting["draft_model"] = genai.draft_model(folder, "CPU", **properties)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = config["batch"]
    folder = exported(config["target"], config["dtype"], config["scratch"])
    pipeline = genai.LLMPipeline(
        folder, "CPU", scheduler_config=scheduler, **drafting, **properties
    )

    def complete(batch: Batch) -> Completion:
        options = genai.GenerationConfig()
        options.max_new_tokens = batch["max_tokens"]
        options.ignore_eos = True
        options.do_sample = batch["temperature"] > 0
        options.rng_seed = batch["seed"]
        if options.do_sample:
            options.temperature = batch["temperature"]
            options.top_k = 0
        if "lookahead" in config:
            options.num_assistant_tokens = config["lookahead"]
        ids = ov.Tensor([*batch["prompts"]])
        mask = ov.Tensor([[1] * len(prompt) for prompt in batch["prompts"]])
        outputs = pipeline.generate(genai.TokenizedInputs(ids, mask), options)
        return {"tokens": outputs.tokens}

    return genai.__version__, complete
