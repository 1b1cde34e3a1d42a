"""Models of a few hundred weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.sampling.model import load_model
from ssd_distill.models import new_model

NUM_STEPS = 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session", autouse=True)
def _imports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the first model, transformers imports much of itself, which takes seconds."""
    load_model(write_tiny_folder(tmp_path_factory.mktemp("first")))


@pytest.fixture(scope="session")
def fresh_model() -> Callable[[int], Any]:
    """Makes the model of a seed."""
    return lambda seed: new_model(CONFIG, torch.Generator().manual_seed(seed))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "target", attention_gain=8)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "draft", seed=1)


@pytest.fixture
def flags(tmp_path: Path, target: Path) -> list[str]:
    """Flags of all runs, with text of 2,400 tokens."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number.\n" for number in range(120)))
    sizes = ("--steps", NUM_STEPS, "--batch", 2, "--length", 16, "--windows", 3, "--rounds", 3)
    return [str(each) for each in ("--target", target, "--data", text, *sizes)]


@pytest.fixture
def flags_of_pair(flags: list[str], draft: Path) -> list[str]:
    return [*flags, "--draft", str(draft)]
