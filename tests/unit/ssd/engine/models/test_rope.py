"""Rotary tables compared with their formula, and rotations with complex numbers.

The same tables inside a whole model: ``models/test_against_transformers.py``.
"""

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.engine.config import ModelConfig, RopeScaling
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.models.rope import RotaryTable, inverse_frequencies, rotate

E = 64
MAX_LEN = 4096
# Llama 3.1's own numbers: with 64 dimensions there are fast, blended and slow pairs.
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048
)
POSITIONS_R = torch.tensor([0, 1, 2, 77, 2047, 2048, MAX_LEN - 1])
CASES = [
    pytest.param(1e4, None, id="plain"),
    pytest.param(5e5, None, id="plain, slow"),
    pytest.param(5e5, SCALING, id="llama3"),
]


def config(theta: float, scaling: RopeScaling | None) -> ModelConfig:
    return replace(
        KNOWN_SHAPES["llama-3.1-8b"],
        head_size=E,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=MAX_LEN,
    )


def heads(count: int) -> Tensor:
    return torch.randn((len(POSITIONS_R), count, E), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("theta", "scaling"), CASES)
def test_the_angular_speeds_are_those_of_the_formula(
    theta: float, scaling: RopeScaling | None
) -> None:
    expected = [speed(theta ** (-pair / E), scaling) for pair in range(0, E, 2)]
    found_E = inverse_frequencies(config(theta, scaling))
    torch.testing.assert_close(found_E, torch.tensor(expected), atol=0, rtol=1e-5)


def speed(plain: float, scaling: RopeScaling | None) -> float:
    """Radians a position: Llama 3.1 divides slow pairs by the factor and blends the middle."""
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / span))
    return kept * plain + (1 - kept) * plain / scaling.factor


TRAINED = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("inside", "beside"),
    [
        ({TRAINED: 128}, {}),
        ({}, {TRAINED: 256}),
        ({TRAINED: 128}, {TRAINED: 256}),
        ({}, {}),
        ({}, {"max_position_embeddings": 512}),
    ],
)
def test_the_length_of_the_training_is_read_where_transformers_reads_it(
    tmp_path: Path, family: str, place: str, inside: dict[str, int], beside: dict[str, int]
) -> None:
    shape = {"vocab_size": 8, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {
        "hidden_size": 4 * E,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": E,
    }
    rope = {"rope_theta": 5e5, place: LLAMA3 | inside}
    text = json.dumps({"model_type": family} | shape | heads | rope | beside)
    (tmp_path / "config.json").write_text(text)
    transformers: Any = import_module("transformers")
    expected_E, _ = import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS["llama3"](
        transformers.AutoConfig.from_pretrained(tmp_path), "cpu"
    )
    found_E = inverse_frequencies(ModelConfig.from_folder(tmp_path))
    torch.testing.assert_close(found_E, expected_E, atol=0, rtol=1e-6)


def test_pairs_of_dimensions_rotate_like_complex_numbers() -> None:
    plain = config(1e4, None)
    heads_RHE = heads(2).double()
    table = RotaryTable(plain, MAX_LEN, heads_RHE)
    found_RHE = rotate(heads_RHE, *table.gather(POSITIONS_R))
    angle_RE = torch.outer(POSITIONS_R.float(), inverse_frequencies(plain)).double()
    turned = torch.complex(heads_RHE[..., : E // 2], heads_RHE[..., E // 2 :]) * torch.polar(
        torch.ones_like(angle_RE), angle_RE
    ).unsqueeze(1)
    expected_RHE = torch.cat((turned.real, turned.imag), dim=2)
    torch.testing.assert_close(found_RHE, expected_RHE, atol=1e-5, rtol=0)
