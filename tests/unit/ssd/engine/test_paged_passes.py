"""Prefill and verify over pages give the logits of one dense pass over the whole text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines import CPU_ENGINES, PlainLogits, inside, load, on, paged, store
from torch import Tensor

from ssd.engine.attention.context import MAX_CHUNKS_A_CALL
from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, sequence_buckets
from ssd.engine.target_runner import TargetRunner

P = 4
VOCAB = 257
MAX_LEN = 320
BLOCKS = 10
ENGINE = EngineConfig(
    max_model_len=MAX_LEN,
    max_num_seqs=4,
    num_columns=P,
    dtype="float32",
    block_size=32,
    prefill_chunk=32,
    context_chunk=32,
)


@pytest.fixture(scope="module", params=CPU_ENGINES)
def runner(folder: Path, request: pytest.FixtureRequest) -> TargetRunner:
    return load(TargetRunner, folder, on(request.param, ENGINE))


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def tables(count: int, blocks_each: int = BLOCKS) -> Tensor:
    """Block tables in no order."""
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randperm(count * blocks_each, generator=generator) + 1
    return blocks.view(count, blocks_each)


def columns(texts: Sequence[Sequence[int]], firsts: Sequence[int], tables_BJ: Tensor) -> PagedBatch:
    """What stands from ``firsts`` on, up to P columns; the rest is padding."""
    rows = zip(texts, firsts, tables_BJ, strict=True)
    return paged([(each[first : first + P], first, table) for each, first, table in rows], P, 200)


def stored(
    runner: TargetRunner, texts: Sequence[list[int]], firsts: Sequence[int], tables_BJ: Tensor
) -> PagedBatch:
    """Store each text up to its ``firsts``; returns the columns that follow."""
    for tokens, first, blocks_J in zip(texts, firsts, tables_BJ, strict=True):
        store(runner, tokens[:first], blocks_J)
    return columns(texts, firsts, tables_BJ)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 17, 100, 300])
def test_chunked_prefill_and_columns_equal_one_pass(
    runner: TargetRunner, plain_logits: PlainLogits, length: int
) -> None:
    tokens = text(length)
    blocks_J = tables(1)[0]
    stored = max(0, length - 3 * P)
    store(runner, tokens[:stored], blocks_J)
    expected_RV = plain_logits(tokens)
    for first in range(stored, length, P):
        logits_BPV = runner.forward(columns([tokens], [first], blocks_J[None]))
        real = min(P, length - first)
        assert logits_BPV.shape == (1, P, VOCAB)
        assert logits_BPV.dtype == torch.float32
        close(logits_BPV[0, :real], expected_RV[first : first + real])


def test_one_column_equals_the_first_of_several(runner: TargetRunner) -> None:
    texts = [text(length, seed=3) for length in (9, 70)]
    wide = stored(runner, texts, [len(tokens) - 1 for tokens in texts], tables(2))
    narrow = replace(wide, tokens_BP=wide.tokens_BP[:, :1])
    logits_B1V = runner.forward(narrow)
    assert logits_B1V.shape == (2, 1, VOCAB)
    close(logits_B1V[:, 0], runner.forward(wide)[:, 0])


def test_there_is_one_shape_in_deterministic_mode() -> None:
    assert replace(ENGINE, deterministic=True).verify_columns == (P,)
    assert replace(ENGINE, num_columns=1).verify_columns == (1,)


def test_sequences_of_all_lengths_share_a_pass(
    runner: TargetRunner, plain_logits: PlainLogits
) -> None:
    texts = [text(length) for length in (290, 3, 40)]
    firsts = [286, 0, 39]
    logits_BPV = runner.forward(stored(runner, texts, firsts, tables(3)))
    for row, (tokens, first) in enumerate(zip(texts, firsts, strict=True)):
        expected_RV = plain_logits(tokens)[first:]
        close(logits_BPV[row, : len(expected_RV)], expected_RV)


@pytest.mark.parametrize("num_chunks", [MAX_CHUNKS_A_CALL, MAX_CHUNKS_A_CALL + 1, 20])
def test_a_context_of_several_kernel_calls_equals_one_pass(
    folder: Path, plain_logits: PlainLogits, num_chunks: int
) -> None:
    width = 16
    runner = load(TargetRunner, folder, replace(ENGINE, block_size=width, context_chunk=width))
    # The mate reaches no further than the first call: it sees nothing of the later ones.
    texts = [text(num_chunks * width - 2), text(20)]
    firsts = [len(tokens) - P for tokens in texts]
    logits_BPV = runner.forward(stored(runner, texts, firsts, tables(2, MAX_LEN // width)))
    for logits_PV, tokens in zip(logits_BPV, texts, strict=True):
        close(logits_PV, plain_logits(tokens)[-P:])


def test_rejected_columns_are_overwritten_before_they_are_seen(
    runner: TargetRunner, plain_logits: PlainLogits
) -> None:
    tokens = text(60)
    tables_BJ = tables(1)
    store(runner, tokens[:50], tables_BJ[0])
    wrong = [*tokens[:51], 1, 2, 3]
    runner.forward(columns([wrong], [50], tables_BJ))
    logits_BPV = runner.forward(columns([tokens[:55]], [51], tables_BJ))
    close(logits_BPV[0], plain_logits(tokens[:55])[51:])


def test_padding_columns_write_to_block_0_only(folder: Path) -> None:
    runner = load(TargetRunner, folder, ENGINE)
    inside(runner)._storage.entries_L2ZW.fill_(5.0)
    runner.forward(columns([text(2)], [0], tables(1)))
    is_touched_Z = (inside(runner)._storage.entries_L2ZW != 5.0).any(dim=3).any(dim=1).any(dim=0)
    first = int(tables(1)[0, 0]) * ENGINE.block_size
    touched = set(is_touched_Z.nonzero().flatten().tolist())
    assert touched - set(range(ENGINE.block_size)) == {first, first + 1}


def test_the_last_positions_of_a_full_sequence_are_correct(
    runner: TargetRunner, plain_logits: PlainLogits
) -> None:
    tokens = text(MAX_LEN)
    tables_BJ = tables(1)
    store(runner, tokens[: MAX_LEN - 2], tables_BJ[0])
    logits_BPV = runner.forward(columns([tokens], [MAX_LEN - 2], tables_BJ))
    close(logits_BPV[0, :2], plain_logits(tokens)[-2:])


def test_a_block_table_may_be_no_longer_than_its_text(
    runner: TargetRunner, plain_logits: PlainLogits
) -> None:
    tokens = text(3)
    logits_BPV = runner.forward(columns([tokens], [0], tables(1)[:, :1]))
    close(logits_BPV[0, :3], plain_logits(tokens))


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_ids_beyond_the_tokenizer_cannot_be_chosen(folder: Path, engine: str) -> None:
    runner = load(TargetRunner, folder, on(engine, replace(ENGINE, num_token_ids=200)))
    logits_BPV = runner.forward(columns([text(4)], [0], tables(1)))
    assert (logits_BPV[..., 200:] == -torch.inf).all()
    assert logits_BPV[..., :200].isfinite().all()


def test_warming_up_runs_every_shape_and_reports_its_progress(folder: Path) -> None:
    runner = load(TargetRunner, folder, ENGINE)
    reports: list[tuple[str, float]] = []
    runner.warm_up(lambda stage, fraction: reports.append((stage, fraction)))
    assert reports[-1] == ("warm-up", 1.0)
    assert [share for _, share in reports] == sorted(share for _, share in reports)


def test_sequence_counts_are_few_and_one_in_deterministic_mode() -> None:
    engine = replace(ENGINE, max_num_seqs=12)
    assert sequence_buckets(engine) == [1, 2, 4, 8, 12]
    assert sequence_buckets(replace(engine, deterministic=True)) == [12]


def test_bfloat16_logits_are_close_to_float32(folder: Path, plain_logits: PlainLogits) -> None:
    tokens = text(P)
    truth_RV = plain_logits(tokens)
    runner = load(TargetRunner, folder, replace(ENGINE, dtype="bfloat16"))
    found_RV = runner.forward(columns([tokens], [0], tables(1)))[0]
    assert (found_RV - truth_RV).abs().max() < 0.02 * truth_RV.abs().max()
