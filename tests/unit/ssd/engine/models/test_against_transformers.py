"""Logits of both families equal those of transformers on random small models, in float32."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import load, on, paged, store

from ssd.engine.config import EngineConfig
from ssd.engine.target_runner import TargetRunner

P = 7
VOCAB = 300
LENGTHS = (1, 17, 300)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """A config of one family; GQA is the number of query heads of a key/value head."""

    family: str
    gqa: int
    is_tied: bool
    rope: dict[str, object] | None = None
    shard_size: str = "1GB"

    def build(self) -> Any:
        """A model of transformers, which is imported here: it takes seconds."""
        transformers = import_module("transformers")
        shape: dict[str, Any] = SHAPE | {
            "num_key_value_heads": 4 // self.gqa,
            "tie_word_embeddings": self.is_tied,
            "rope_parameters": self.rope or {"rope_type": "default", "rope_theta": 5e4},
        }
        if self.family == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        else:
            config = transformers.Qwen3Config(**shape, head_dim=24)
            model = transformers.Qwen3ForCausalLM(config)
        generator = torch.Generator().manual_seed(self.gqa)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
                else:
                    parameter.copy_(1 + 0.2 * drawn)
        return model


CASES = {
    "llama": Case("llama", 1, is_tied=False),
    "llama-gqa2-tied-scaled": Case("llama", 2, is_tied=True, rope=LLAMA3),
    "llama-gqa4-split": Case("llama", 4, is_tied=False, shard_size="100KB"),
    "qwen3": Case("qwen3", 1, is_tied=True),
    "qwen3-gqa2": Case("qwen3", 2, is_tied=False),
    "qwen3-gqa4-tied-split": Case("qwen3", 4, is_tied=True, shard_size="100KB"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def reference(case: Case) -> Any:
    return case.build()


@pytest.fixture(scope="module")
def folder(case: Case, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    reference.save_pretrained(folder, max_shard_size=case.shard_size)
    has_index = (folder / "model.safetensors.index.json").is_file()
    assert has_index == (case.shard_size != "1GB")
    return folder


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_logits_equal_those_of_the_reference_library(
    folder: Path, reference: Any, engine: str
) -> None:
    shape = EngineConfig(max_model_len=400, max_num_seqs=1, num_columns=P, dtype="float32")
    runner = load(TargetRunner, folder, on(engine, shape))
    assert runner.num_parameters == sum(p.numel() for p in reference.parameters())
    generator = torch.Generator().manual_seed(5)
    blocks_J = torch.arange(1, 26)
    for length in LENGTHS:
        tokens_R = torch.randint(0, VOCAB, (length,), generator=generator)
        with torch.inference_mode():
            expected_RV = reference(tokens_R[None]).logits[0]
        first = max(0, length - P)
        store(runner, tokens_R[:first].tolist(), blocks_J)
        columns = tokens_R[first:].tolist()
        logits_BPV = runner.forward(paged([(columns, first, blocks_J)], P))
        found_RV = logits_BPV[0, : length - first]
        assert expected_RV.abs().max() > 1
        torch.testing.assert_close(found_RV, expected_RV[first:], atol=1e-4, rtol=0)
