"""The bits of a row do not depend on its column or on other sequences and their lengths.

So plain decoding and verification of proposals give the same logits, bit for bit. The layers are as
wide as those of a real small model: narrow matrices would not show what the kernels do.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import paged, store
from tests.unit.ssd.engine.wide import (
    BLOCK_SIZE,
    FUSED,
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

from ssd.engine import same_bits, target_runner
from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.weights import open_weights
from ssd.engine.openvino_engine import load as openvino_load
from ssd.engine.openvino_engine import target
from ssd.engine.precision import SMALL_MODEL, keeps_bfloat16
from ssd.engine.same_bits import find_difference, mixed_totals, proved
from ssd.engine.target_runner import TargetRunner

LENGTHS = (5, 252, 600)
"""Contexts within a chunk, across a border, and of three chunks."""
ENGINES = [
    pytest.param(("torch", "bfloat16"), id="torch-bfloat16"),
    pytest.param(("torch", "float32"), id="torch-float32"),
    pytest.param(("openvino", "float32"), id="openvino-float32"),
    pytest.param(("openvino", KEPT), id="openvino-float32-of-bfloat16"),
    pytest.param(("openvino", "bfloat16"), id="openvino-bfloat16", marks=needs_bfloat16),
    pytest.param(("openvino", FUSED), id="openvino-bfloat16-two-threads", marks=needs_bfloat16),
]


@pytest.fixture(scope="module", params=ENGINES)
def runner(wide_folder: Path, request: pytest.FixtureRequest) -> TargetRunner:
    """All passes of one shape."""
    return load_wide(wide_folder, *request.param, max_num_seqs=4, deterministic=True)


@pytest.fixture(scope="module", params=ENGINES)
def fast_runner(wide_folder: Path, request: pytest.FixtureRequest) -> TargetRunner:
    """The shapes of the fast mode, as far as the warm-up proves them."""
    found = load_wide(wide_folder, *request.param, max_num_seqs=8)
    found.warm_up(lambda _stage, _fraction: None)
    return found


def decode_plainly(runner: TargetRunner, tokens: Sequence[int], first: int) -> Tensor:
    """Logits of P tokens run one by one, each in column 0 of its own pass."""
    passes = [
        runner.forward(stack([(tokens[first + i : first + i + 1], first + i, 0)])) for i in range(P)
    ]
    return torch.stack([logits_BPV[0, 0] for logits_BPV in passes])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_token_has_the_bits_of_column_0_in_every_column(
    runner: TargetRunner, length: int
) -> None:
    tokens = text(length + P)
    store(runner, tokens[:length], table(0))
    store(runner, tokens[:length], table(1))
    plain_PV = decode_plainly(runner, tokens, length)
    for start in (0, 3):
        columns = tokens[length + start :]
        logits_BPV = runner.forward(stack([(tokens[length:], length, 1)]))
        assert torch.equal(logits_BPV[0], plain_PV)
        logits_BPV = runner.forward(stack([(columns, length + start, 1)]))
        assert torch.equal(logits_BPV[0, : len(columns)], plain_PV[start:])


def test_a_verify_of_one_column_has_the_bits_of_a_wide_one_in_every_batch(
    fast_runner: TargetRunner,
) -> None:
    rows = stored(fast_runner, 5, 252, 600, 1, 255, 256, 120, 511)
    for count in (1, 2, 5, len(rows)):
        assert_same_bits_of_one_column(fast_runner, rows[:count])


def assert_same_bits_of_one_column(
    fast_runner: TargetRunner, rows: Sequence[tuple[Sequence[int], int, int]]
) -> None:
    wide_BPV = fast_runner.forward(stack(rows))
    for column in range(P):
        ones = [(tokens[column : column + 1], first + column, row) for tokens, first, row in rows]
        # In another order too.
        batch = stack(ones[::-1])
        narrow = replace(batch, tokens_BP=batch.tokens_BP[:, : fast_runner.verify_columns[0]])
        narrow_BV = fast_runner.forward(narrow)[:, 0]
        assert torch.equal(narrow_BV, wide_BPV[: len(rows), column].flip(0))
    alone_PV = fast_runner.forward(stack(rows[-1:]))[0]
    assert torch.equal(alone_PV, wide_BPV[-1])


@pytest.mark.parametrize("length", LENGTHS)
def test_other_sequences_of_any_length_change_no_bit(runner: TargetRunner, length: int) -> None:
    tokens, mate = text(length + P), text(700)
    store(runner, tokens[:length], table(0))
    store(runner, mate[:650], table(1))
    alone_PV = runner.forward(stack([(tokens[length:], length, 0)]))[0]
    mine, theirs = (tokens[length:], length, 0), (mate[650 : 650 + P], 650, 1)
    short = (mate[:2], 0, 2)
    for rows in ([mine, theirs], [theirs, mine], [theirs, short, (mate[:1], 0, 3), mine]):
        logits_BPV = runner.forward(stack(rows))
        assert torch.equal(logits_BPV[rows.index(mine)], alone_PV)


@pytest.mark.parametrize("counts", [(1, 7, 2), (7, 1, 1), (3, 3, 6)])
def test_rows_of_sequences_with_fewer_columns_have_the_same_bits(
    fast_runner: TargetRunner, counts: tuple[int, ...]
) -> None:
    rows = stored(fast_runner, *LENGTHS)
    wide_BPV = fast_runner.forward(stack(rows))
    fewer = [(row[0][:count], *row[1:]) for row, count in zip(rows, counts, strict=True)]
    found_BPV = fast_runner.forward(stack(fewer))
    for found_PV, wide_PV, count in zip(found_BPV, wide_BPV, counts, strict=True):
        assert torch.equal(found_PV[:count], wide_PV[:count])


def test_an_execution_that_packs_rows_has_a_row_count_for_each_length(
    fast_runner: TargetRunner,
) -> None:
    is_packed = fast_runner.attention_name == "openvino"
    assert fast_runner.row_counts == (tuple(range(1, P + 1)) if is_packed else (P,))


@pytest.mark.parametrize(
    ("is_faulty", "prefills", "found"),
    [
        (lambda batch: len(batch.tokens_BP) * batch.tokens_BP.shape[1] > 33, False, "8 x 7 rows"),
        (lambda batch: batch.num_columns_B[0] == 1, False, "column 0 alone"),
        (lambda batch: batch.num_columns_B[0] == 3, False, "column 4 first"),
        (lambda batch: batch.num_columns_B.sum() == 33, False, "33 rows of proposals"),
        (lambda batch: batch.num_columns_B[0] < 16, True, "a prompt in chunks"),
        (lambda batch: batch.num_columns_B[0] == 64, True, "a prompt of one step"),
        (lambda batch: batch.num_columns_B[0] > 80, True, "a prompt of one step"),
        (lambda _batch: False, False, None),
    ],
    ids=[
        "more rows",
        "one row",
        "three columns",
        "different lengths",
        "chunks",
        "a part of a step",
        "a whole step",
        "none",
    ],
)
def test_a_pass_with_other_bits_is_found(
    chunked: TargetRunner,
    is_faulty: Callable[[PagedBatch], bool],
    found: str | None,
    *,
    prefills: bool,
) -> None:
    faulty = Faulty(chunked, is_faulty, prefills=prefills)
    assert find_difference(faulty, (1, 2, 4, 8), lambda _share: None) == found


def test_each_difference_leaves_fewer_shapes_until_there_is_one(
    wide_folder: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(runner: TargetRunner, *_: object) -> str:
        runner.forward(stack([(text(1), 0, 0)]))
        return "a difference"

    monkeypatch.setattr(target_runner, "find_difference", find)
    runner = load_wide(wide_folder, "openvino", "float32", max_num_seqs=8)
    runner.folder = None
    runner.warm_up(lambda _stage, _fraction: None)
    assert rows == [1, 1, 2, 2, 5, 8 * P]
    assert runner.row_counts == runner.verify_columns == (P,)
    assert list(runner.execution.sequence_counts) == [8]


def test_kept_bfloat16_weights_have_the_logits_of_the_same_weights_in_float32(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def recorded(folder: Path, model: ModelConfig, dtype: torch.dtype, *rest: Any) -> object:
        read.append(dtype)
        return open_weights(folder, model, dtype, *rest)

    monkeypatch.setattr(openvino_load, "open_weights", recorded)
    first = stack([(text(P), 0, 0)])
    kept, float32 = (
        load_wide(wide_folder, "openvino", dtype, max_num_seqs=1).forward(first)
        for dtype in (KEPT, "float32")
    )
    assert read == [torch.bfloat16, torch.float32]
    assert torch.allclose(kept, float32, atol=1e-3)


@pytest.mark.skipif(
    not keeps_bfloat16(SMALL_MODEL), reason="few rows have a kernel of their own on this CPU"
)
def test_one_row_is_a_pass_and_many_are_divided_evenly_with_kept_weights(
    wide_folder: Path, rows: list[int]
) -> None:
    runner = load_wide(wide_folder, "openvino", KEPT, max_num_seqs=16)
    runner.warm_up(lambda _stage, _fraction: None)
    rows.clear()
    tokens = text(P)
    alone_PV = runner.forward(stack([(tokens[:1], 0, 0)]))[0]
    each_BPV = runner.forward(stack([(tokens, 0, row) for row in range(16)]))
    assert rows == [1, 8 * P, 8 * P]
    for each_PV in each_BPV:
        assert torch.equal(each_PV[0], alone_PV[0])


def test_a_pass_with_more_rows_than_the_limit_stores_its_prompts_alone(
    wide_folder: Path, rows: list[int]
) -> None:
    runner = load_wide(wide_folder, "openvino", "float32", max_num_seqs=8)
    runner.execution.use_fewer_shapes()
    assert runner.execution.shapes == "passes of 1 rows or more, at most 64"
    tokens = text(60)
    for length in (50, 60):
        prompts = paged([(tokens[:length], 0, table(1))], 64)
        runner.forward(replace(stack([(tokens[:P], 0, 0)]), prompts=prompts))
        assert runner.bad_columns(prompts) == [None]
    assert rows == [P + 50, P, 60]


def test_padding_and_division_of_passes_change_no_logits(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "ROW_LIMITS", ((1, target.ANY), (2, 8), (5, 8)))
    runner = load_wide(wide_folder, "openvino", "float32", max_num_seqs=8)

    def run() -> list[torch.Tensor]:
        rows = stored(runner, 40, 41)
        one = stack([(rows[0][0][:1], 40, 0)])
        return [runner.forward(stack(rows)), runner.forward(one)[:, :1]]

    expected = run()
    for least in (2, 5):
        shapes = f"passes of {least} rows or more, at most 8"
        assert runner.execution.use_fewer_shapes() == shapes
        assert all(map(torch.equal, run(), expected))


def test_rows_are_added_only_where_they_save_time() -> None:
    few = target.FEW_ROWS
    assert target.least_rows({1: 1.0, few: 0.9}.__getitem__) == few
    assert target.least_rows({1: 0.010, few: 0.009}.__getitem__) == few
    assert target.least_rows({1: 1.0, few: 0.99}.__getitem__) == 1


def test_a_target_with_a_slow_kernel_for_one_row_runs_more(
    wide_folder: Path, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = stack([(text(1), 0, 0)])
    expected = load_wide(wide_folder, "openvino", "float32").forward(batch)[:, :1]
    monkeypatch.setattr(target, "SMALL_MODEL", 0)
    monkeypatch.setattr(target, "least_rows", lambda _seconds_of: target.FEW_ROWS)
    runner = load_wide(wide_folder, "openvino", "float32")
    rows.clear()
    assert torch.equal(runner.forward(batch)[:, :1], expected)
    assert rows == [target.FEW_ROWS]
    assert runner.execution.shapes == f"passes of {target.FEW_ROWS} rows or more"


def test_the_result_of_a_long_proof_is_kept(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    engine = EngineConfig(max_model_len=64)
    results = iter(("a", "b", None))
    assert proved(wide_folder, engine, 9, "", lambda: next(results)) == "a"
    monkeypatch.setattr(same_bits, "LONG_SECONDS", 0.0)
    assert proved(wide_folder, engine, 9, "", lambda: next(results)) == "b"
    assert proved(wide_folder, engine, 9, "", lambda: next(results)) == "b"
    assert proved(wide_folder, replace(engine, threads=2), 9, "", lambda: "c") == "c"
    assert proved(wide_folder, engine, 9, "fewer", lambda: next(results)) is None
    assert proved(wide_folder, engine, 8, "", lambda: "e") == "e"
    assert proved(wide_folder, engine, 1000, "", lambda: "f") == "f"
    assert proved(wide_folder, engine, 2000, "", lambda: "g") == "f"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert proved(wide_folder, engine, 9, "", lambda: "d") == "d"


def test_the_result_of_a_long_proof_is_kept_in_the_cache_folder_of_the_environment(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "volume"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(same_bits, "LONG_SECONDS", 0.0)
    engine = EngineConfig(max_model_len=64)
    assert proved(wide_folder, engine, 9, "", lambda: "a") == "a"
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home of the next pod")
    assert proved(wide_folder, engine, 9, "", lambda: "b") == "a"
    assert not list(tmp_path.glob("home*"))


@pytest.mark.parametrize("content", ["", '{"diff', "{}", "null"])
def test_a_proof_runs_again_where_its_result_was_not_written_whole(
    content: str, wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(same_bits, "LONG_SECONDS", 0.0)
    engine = EngineConfig(max_model_len=64)
    assert proved(wide_folder, engine, 9, "", lambda: "a") == "a"
    (file,) = (tmp_path / ".cache" / "ssd" / "same_bits").iterdir()
    file.write_text(content)
    assert proved(wide_folder, engine, 9, "", lambda: "b") == "b"
    assert proved(wide_folder, engine, 9, "", lambda: "c") == "b"


def test_rows_of_proposals_of_different_lengths_are_compared() -> None:
    assert mixed_totals(7, 16 * 7) == [9, 11, 17, 23, 33, 47, 65, 95]
    assert mixed_totals(7, 7) == []


def test_a_proof_runs_where_its_result_cannot_be_kept(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in place of the home folder: nothing in it can be read or written.
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(same_bits, "LONG_SECONDS", 0.0)
    assert proved(wide_folder, EngineConfig(max_model_len=64), 9, "", lambda: "a") == "a"


def without_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_proof_runs_for_a_user_without_a_home_folder(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    monkeypatch.setattr(same_bits, "LONG_SECONDS", 0.0)
    results = iter(("a", None))
    assert proved(wide_folder, EngineConfig(max_model_len=64), 9, "", lambda: next(results)) == "a"
    assert proved(wide_folder, EngineConfig(max_model_len=64), 9, "", lambda: next(results)) is None


@pytest.mark.parametrize("shared", [128, 512])
def test_a_shared_beginning_changes_no_bit(runner: TargetRunner, shared: int) -> None:
    check_shared_beginning(runner, shared)


@pytest.mark.parametrize("shared", [128, 512])
def test_a_shared_beginning_and_chunks_in_one_pass_change_no_bit(
    fast_runner: TargetRunner, shared: int
) -> None:
    check_shared_beginning(fast_runner, shared)


def check_shared_beginning(runner: TargetRunner, shared: int) -> None:
    """Store a text alone, and after the blocks of another text that begins with it."""
    length, own = 600, table(2)
    tokens = text(length + P)
    store(runner, [*tokens[:shared], *text(650)[shared:]], table(0))
    store(runner, tokens[:length], table(1))
    alone_BPV = runner.forward(stack([(tokens[length:], length, 1)]))
    own[: shared // BLOCK_SIZE] = table(0)[: shared // BLOCK_SIZE]
    rest = tokens[shared:length]
    runner.prefill(paged([(rest, shared, own)], len(rest) + -len(rest) % 128))
    batch = stack([(tokens[length:], length, 1)])
    found_BPV = runner.forward(replace(batch, block_tables_BJ=own[None]))
    assert torch.equal(found_BPV, alone_BPV)
