"""Sizes of models against the tensors of their checkpoints and published numbers of weights."""

import math
from dataclasses import replace

import pytest

from ssd.engine.config import EngineConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.models.llama import shapes
from ssd.engine.sizes import branch_logits_bytes, num_weights, pass_weights


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_the_number_of_weights_is_that_of_the_tensors_of_a_checkpoint(name: str) -> None:
    for is_tied in (True, False):
        model = replace(KNOWN_SHAPES[name], tie_word_embeddings=is_tied)
        assert num_weights(model) == sum(math.prod(shape) for shape in shapes(model).values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.236),
        ("qwen3-32b", 32.76),
        ("qwen3-8b", 8.19),
        ("qwen3-0.6b", 0.596),
    ],
)
def test_known_shapes_have_the_published_numbers_of_weights(name: str, billions: float) -> None:
    assert num_weights(KNOWN_SHAPES[name]) == pytest.approx(billions * 1e9, rel=1e-3)


def test_a_pass_reads_a_tied_head_but_not_the_embedding() -> None:
    tied = KNOWN_SHAPES["llama-3.2-1b"]
    untied = replace(tied, tie_word_embeddings=False)
    assert pass_weights(tied) == pass_weights(untied) == num_weights(tied)


def test_a_target_keeps_no_logits_of_branches() -> None:
    model = KNOWN_SHAPES["llama-3.2-1b"]
    target = EngineConfig(max_model_len=64, dtype="bfloat16")
    assert branch_logits_bytes(model, target) == 0
    draft = replace(target, branches=24, num_columns=7, max_num_seqs=2)
    assert branch_logits_bytes(model, draft) == 2 * 24 * 7 * 128_256 * 2
