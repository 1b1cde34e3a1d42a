"""A token with a NaN embedding affects the rows that see it, and no others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engines import CPU_ENGINES, load, on, paged, store
from torch import Tensor

from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch, RowFilters, StoredNoise
from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.target_runner import TargetRunner
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import NO_TOKEN

BAD = 200
P, N, CHUNK, BLOCKS = 4, 3, 32, 4
ENGINE = EngineConfig(
    max_model_len=128,
    max_num_seqs=2,
    num_columns=P,
    dtype="float32",
    block_size=32,
    prefill_chunk=CHUNK,
    context_chunk=64,
)
TEXT = list(range(40, 60))
TABLE, OTHER_TABLE = torch.arange(1, 1 + BLOCKS), torch.arange(1 + BLOCKS, 1 + 2 * BLOCKS)


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("bad") / "model", nan_token=BAD)


@pytest.fixture(scope="module", params=CPU_ENGINES)
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(bad_folder: Path, attention: str) -> TargetRunner:
    return load(TargetRunner, bad_folder, on(attention, ENGINE))


@pytest.fixture(scope="module")
def draft(bad_folder: Path, attention: str) -> DraftRunner:
    return load(DraftRunner, bad_folder, on(attention, replace(ENGINE, branches=N)))


def verify(*rows: tuple[Sequence[int], int, Tensor]) -> PagedBatch:
    return paged(rows, P)


def test_other_sequences_and_later_owners_of_the_blocks_have_the_same_bits(
    target: TargetRunner,
) -> None:
    store(target, TEXT, TABLE)
    alone_PV = target.forward(verify(([1, 2], len(TEXT), TABLE)))[0, :2]
    assert alone_PV.isfinite().all()
    store(target, [3, BAD, 4, BAD], OTHER_TABLE)
    mine = ([1, 2], len(TEXT), TABLE)
    theirs = ([BAD, 5, BAD], 4, OTHER_TABLE)
    logits_BPV = target.forward(verify(theirs, mine))
    assert logits_BPV[0, 0].isnan().all()
    assert torch.equal(logits_BPV[1, :2], alone_PV)
    # The text again, in the blocks that the other sequence leaves.
    store(target, TEXT, OTHER_TABLE)
    logits_BPV = target.forward(verify(([1, 2], len(TEXT), OTHER_TABLE)))
    assert torch.equal(logits_BPV[0, :2], alone_PV)


def test_a_rejected_proposal_affects_no_earlier_row_and_no_later_round(
    target: TargetRunner,
) -> None:
    store(target, TEXT, TABLE)
    first_V = target.forward(verify(([1], len(TEXT), TABLE)))[0, 0]
    second_V = target.forward(verify(([2], len(TEXT) + 1, TABLE)))[0, 0]
    logits_PV = target.forward(verify(([1, BAD, 7], len(TEXT), TABLE)))[0]
    assert torch.equal(logits_PV[0], first_V)
    assert logits_PV[1].isnan().all()
    again_V = target.forward(verify(([2], len(TEXT) + 1, TABLE)))[0, 0]
    assert torch.equal(again_V, second_V)


@pytest.mark.parametrize(("tokens", "expected"), [(TEXT, None), ([*TEXT, BAD, 1], len(TEXT))])
def test_prefill_returns_the_first_column_that_is_not_finite(
    target: TargetRunner, tokens: list[int], expected: int | None
) -> None:
    passes: list[None] = []
    batch = paged([(tokens, 0, TABLE)], CHUNK, padding=BAD)
    assert target.prefill(batch, lambda: passes.append(None)) == expected
    assert len(passes) == 1


def test_a_branch_affects_no_other_branch_and_no_other_session(draft: DraftRunner) -> None:
    tables_BJ = torch.stack([TABLE, OTHER_TABLE])
    for table_J in tables_BJ:
        store(draft, TEXT[:-1], table_J)
    slots_B = torch.arange(2)
    lengths_B = torch.full((2,), len(TEXT) - 1)
    tokens_BP = torch.tensor([[TEXT[-1], 7, 8, 9]]).expand(2, -1)
    explicit = ProposalBatch(slots_B, tokens_BP, torch.tensor([4, 4]), lengths_B, tables_BJ)

    def steps(bad_branch: int | None) -> list[Tensor]:
        draft.run_proposals(explicit)
        found = []
        for step in range(P):
            tokens_BN = torch.arange(2 * N).view(2, N) + 10 * step
            if bad_branch is not None and step == 1:
                tokens_BN[0, bad_branch] = BAD
            accepted_BN = torch.tensor([[0, 3, 2], [1, 1, 0]])
            batch = BranchBatch(slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ)
            found.append(draft.run_branches(batch).clone())
        return found

    for found, expected in zip(steps(1), steps(None), strict=True):
        assert expected.isfinite().all()
        assert torch.equal(found[0, [0, 2]], expected[0, [0, 2]])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    "filters", [None, RowFilters(np.full(N, 2), np.full(N, -1.0, dtype=np.float32))]
)
def test_a_branch_that_is_not_finite_has_no_token_in_a_pass_of_all_columns(
    draft: DraftRunner, filters: RowFilters | None
) -> None:
    store(draft, TEXT[:-1], TABLE)
    slot_B, length_B = torch.zeros(1, dtype=torch.int64), torch.tensor([len(TEXT) - 1])
    tokens_1P = torch.tensor([[TEXT[-1], 7, 8, 9]])
    tables_BJ = TABLE[None]
    found = []
    for tokens in ([1, 2, 3], [1, BAD, 3]):
        draft.run_proposals(
            ProposalBatch(slot_B, tokens_1P, torch.tensor([4]), length_B, tables_BJ)
        )
        batch = BranchBatch(
            slot_B, torch.tensor([tokens]), torch.tensor([[0, 3, 2]]), 0, length_B, tables_BJ
        )
        rows_KR = np.zeros((P - 1, N), dtype=np.int64)
        no_noise_YV = torch.zeros((1, draft.model.vocab_size))
        noise = StoredNoise(torch.zeros(N), no_noise_YV, rows_KR, filters)
        found.append(draft.run_columns(batch, noise)[0].clone())
    good, bad = found
    assert int(bad[0, 0, 1]) == NO_TOKEN
    assert torch.equal(bad[:, 0, [0, 2]], good[:, 0, [0, 2]])
