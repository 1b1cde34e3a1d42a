"""Verifies that store prompts too have the bits of separate passes; where not, it is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines import paged, store
from tests.unit.ssd.engine.wide import (
    BLOCK_SIZE,
    BLOCKS,
    KEPT,
    Faulty,
    P,
    load_wide,
    stack,
    table,
    text,
)
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.precision import has_bfloat16
from ssd.engine.same_bits import find_joined_difference

DTYPES = [
    "float32",
    KEPT,
    pytest.param(
        "bfloat16",
        marks=pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16 arithmetic"),
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_prompts_of_one_pass_have_the_bits_of_passes_of_their_own(
    wide_folder: Path, dtype: str
) -> None:
    runner = load_wide(wide_folder, "openvino", dtype, max_num_seqs=8)
    runner.warm_up(lambda _stage, _fraction: None)
    assert runner.joins_prompts
    texts = [text(length + P) for length in (40, 300, 90)]
    for row, tokens in enumerate(texts):
        store(runner, tokens[:-P], table(row))
    rows = [(tokens[-P:], len(tokens) - P, row) for row, tokens in enumerate(texts)]
    expected_BPV = runner.forward(stack(rows))
    # The next part of a long prompt, and a short one whole.
    parts = [(texts[1][256:300], 256, table(3)), (texts[2][:90], 0, table(4))]
    store(runner, texts[1][:256], table(3))
    prompts = paged(parts, 96)
    for count in (1, 3):
        batch = replace(stack(rows[:count]), prompts=prompts)
        assert torch.equal(runner.forward(batch)[:count], expected_BPV[:count])
        assert runner.bad_columns(prompts) == [None, None]
        moved = [(*rows[1][:2], 3), (*rows[2][:2], 4)]
        assert torch.equal(runner.forward(stack(moved)), expected_BPV[1:])


class FaultyTogether(Faulty):
    """Has other bits in passes with rows and prompts, or after them."""

    def prefill(self, batch: PagedBatch) -> int | None:
        return self._runner.prefill(batch)

    def forward(self, batch: PagedBatch) -> Tensor:
        is_faulty = self._is_stored_wrong and batch.prompts is None
        if batch.prompts is not None and self._is_faulty(batch):
            is_faulty, self._is_stored_wrong = not self._prefills, self._prefills
        logits_BPV = self._runner.forward(batch)
        return torch.nextafter(logits_BPV, logits_BPV + 1) if is_faulty else logits_BPV


@pytest.mark.parametrize(
    ("is_faulty", "prefills", "found"),
    [
        (lambda batch: batch.num_columns_B.sum() == 1, False, "1 x 1 rows beside prompts"),
        (lambda batch: len(batch.tokens_BP) == 8, False, "8 x 7 rows beside prompts"),
        (lambda batch: batch.prompts.num_columns_B[0] == 1, True, "prompts beside 0 x 0 rows"),
        (lambda batch: batch.num_columns_B.sum() == 7, True, "prompts beside 1 x 7 rows"),
        (
            lambda batch: batch.prompts.num_columns_B[0] > 64 and len(batch.tokens_BP) == 8,
            True,
            "a prompt of one step beside all rows",
        ),
        (lambda _batch: False, False, None),
    ],
    ids=["one row", "all rows", "a short part", "beside some rows", "a long prompt", "none"],
)
def test_other_bits_of_rows_and_prompts_in_one_pass_are_found(
    wide_folder: Path, is_faulty: Callable[[PagedBatch], bool], found: str | None, *, prefills: bool
) -> None:
    runner = load_wide(wide_folder, "openvino", "float32", max_num_seqs=8, prefill_chunk=16)
    faulty = FaultyTogether(runner, is_faulty, prefills=prefills)
    assert find_joined_difference(faulty) == found


def test_without_room_for_a_proof_prompts_have_passes_of_their_own(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = BLOCKS * BLOCK_SIZE
    runner = load_wide(
        wide_folder, "openvino", "float32", max_num_seqs=1, prefill_chunk=16, step_tokens=few
    )
    runner.folder = None
    runner.warm_up(lambda _stage, _fraction: None)
    assert not runner.joins_prompts
    tokens = text(20)
    assert runner.prefill(paged([(tokens, 0, table(0))], 32)) is None
