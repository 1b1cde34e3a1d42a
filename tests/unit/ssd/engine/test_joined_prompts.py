"""Verifies that store prompts too have the bits of separate passes; where not, it is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines import inside, paged, store
from tests.unit.ssd.engine.wide import (
    KEPT,
    Faulty,
    P,
    load_wide,
    needs_bfloat16,
    stack,
    stored,
    table,
    text,
)
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.same_bits import find_joined_difference
from ssd.engine.target_runner import TargetRunner


@pytest.mark.parametrize("dtype", ["float32", KEPT, pytest.param("bfloat16", marks=needs_bfloat16)])
def test_rows_and_prompts_of_one_pass_have_the_bits_of_passes_of_their_own(
    wide_folder: Path, dtype: str
) -> None:
    runner = load_wide(wide_folder, "openvino", dtype, max_num_seqs=8)
    runner.warm_up(lambda _stage, _fraction: None)
    assert runner.joins_prompts
    rows = stored(runner, 40, 300, 90)
    expected_BPV = runner.forward(stack(rows))
    # The next part of a long prompt, and a short one whole.
    long, short = text(300 + P), text(90 + P)
    parts = [(long[256:300], 256, table(3)), (short[:90], 0, table(4))]
    store(runner, long[:256], table(3))
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
        (lambda batch: batch.num_columns_B.sum() == 1, False, "rows of 1 x 1 rows and 2 prompts"),
        (lambda batch: len(batch.tokens_BP) == 8, False, "rows of 8 x 7 rows and 2 prompts"),
        (
            lambda batch: batch.prompts.num_columns_B[0] == 1,
            True,
            "entries of 0 x 0 rows and 2 prompts",
        ),
        (lambda batch: batch.num_columns_B.sum() == 7, True, "entries of 1 x 7 rows and 2 prompts"),
        (
            lambda batch: batch.prompts.num_columns_B[0] > 64 and len(batch.tokens_BP) == 8,
            True,
            "entries of 8 x 7 rows and 1 prompts",
        ),
        (lambda _batch: False, False, None),
    ],
    ids=["one row", "all rows", "a short part", "beside some rows", "a long prompt", "none"],
)
def test_other_bits_of_rows_and_prompts_in_one_pass_are_found(
    chunked: TargetRunner,
    is_faulty: Callable[[PagedBatch], bool],
    found: str | None,
    *,
    prefills: bool,
) -> None:
    faulty = FaultyTogether(chunked, is_faulty, prefills=prefills)
    assert find_joined_difference(faulty, lambda _share: None) == found


@pytest.mark.parametrize(
    ("num_seqs", "max_model_len", "chunk", "step_tokens"),
    [(1, 64, 16, 256), (1, 512, 16, 256), (8, 768, 512, 256), (2, 128, 16, 16)],
)
def test_any_sizes_with_room_for_three_texts_are_proved(
    wide_folder: Path, num_seqs: int, max_model_len: int, chunk: int, step_tokens: int
) -> None:
    runner = load_wide(
        wide_folder,
        "openvino",
        "float32",
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
        prefill_chunk=chunk,
        step_tokens=step_tokens,
    )
    runner.folder = None
    runner.warm_up(lambda _stage, _fraction: None)
    assert runner.joins_prompts == (max_model_len > 64)


@pytest.mark.parametrize(
    ("limit", "num_padding"), [(None, 0), (64, 0), (None, 3)], ids=["any", "64", "padded"]
)
def test_a_prompt_that_is_not_finite_changes_no_other_row(
    wide_folder: Path, limit: int | None, num_padding: int
) -> None:
    runner = load_wide(wide_folder, "openvino", "float32", max_num_seqs=8)
    inside(runner)._pads_rows = num_padding > 0
    if limit:
        assert runner.execution.use_fewer_shapes()
        assert runner.execution.most_rows == limit
    tokens = text(40)
    store(runner, tokens[:30], table(0))
    rows = stack([(tokens[30:37], 30, 0)])
    expected_PV = runner.forward(rows)[0]
    lengths = (20, 30, 1, 1)
    parts = [(tokens[:length], 0, table(1 + row)) for row, length in enumerate(lengths)]
    storage = inside(runner).storage
    # The first block of the second prompt is beyond its own text: it has a bad entry to read.
    moved = parts[1][0], 32, table(2)
    storage[:, int(table(2)[0])] = torch.nan
    prompts = paged([parts[0], moved, *parts[2:]], 32)
    logits_BPV = runner.forward(replace(rows, prompts=prompts))
    assert runner.bad_columns(prompts) == [None, 0, None, None]
    assert torch.equal(logits_BPV[0], expected_PV)
    assert logits_BPV[2].isnan().any()
    for row in (1, 3, 4):
        assert logits_BPV[row, 0].isfinite().all()
    num_rows = len(inside(runner)._request.get_tensor("tokens").data)
    assert num_rows == 61 + num_padding
