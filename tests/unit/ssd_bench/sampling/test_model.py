"""Models of transformers."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd.engine.models.weights import Checkpoint
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.sampling.model import load_model


# The import of transformers takes seconds.
@pytest.mark.timeout(60)
def test_the_weights_of_the_check_are_freed_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, load = Checkpoint.read, AutoModelForCausalLM.from_pretrained
    tensors: list[weakref.ref[torch.Tensor]] = []

    def read_and_note(*arguments: Any) -> torch.Tensor:
        tensor = read(*arguments)
        tensors.append(weakref.ref(tensor))
        return tensor

    def load_alone(*arguments: Any, **more: Any) -> Any:
        assert tensors
        assert all(tensor() is None for tensor in tensors)
        return load(*arguments, **more)

    monkeypatch.setattr(Checkpoint, "read", read_and_note)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_alone)
    assert load_model(write_tiny_folder(tmp_path / "model")).num_parameters() > 0
