"""The tiny model's law, and that a runner that attends wrongly would break it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import paged, store
from torch import Tensor

from ssd.engine.batch import BranchBatch, ProposalBatch
from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.target_runner import TargetRunner
from ssd.testing.tiny_model import TinyModel

VOCAB = 5
P, N = 4, 3
ENGINE = EngineConfig(
    max_model_len=128,
    max_num_seqs=2,
    num_columns=P,
    dtype="float32",
    prefill_chunk=16,
    context_chunk=32,
)
BLOCKS_J = torch.tensor([3, 1, 4, 2, 6, 5, 8, 7])
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=100)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(VOCAB)


@pytest.fixture(scope="module")
def runner(model: TinyModel) -> TargetRunner:
    return model.make_runner(TargetRunner, ENGINE)


def verify(runner: TargetRunner, tokens: Sequence[int], first: int) -> Tensor:
    columns = tokens[first : first + P]
    return runner.forward(paged([(columns, first, BLOCKS_J)], P))[0, : len(columns)]


@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, start=st.integers(0, 10))
def test_a_runner_returns_the_exact_law(
    model: TinyModel, runner: TargetRunner, tokens: list[int], start: int
) -> None:
    first = max(0, len(tokens) - 1 - start % P)
    store(runner, tokens[:first], BLOCKS_J)
    found_PV = verify(runner, tokens, first)
    expected = [model.law(tokens[: first + i + 1]) for i in range(len(found_PV))]
    assert torch.equal(found_PV, torch.stack(expected))


def test_bfloat16_counts_without_error() -> None:
    model = TinyModel(VOCAB, dtype=torch.bfloat16)
    runner = model.make_runner(TargetRunner, replace(ENGINE, dtype="bfloat16"))
    tokens = torch.randint(0, VOCAB, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    store(runner, tokens[:116], BLOCKS_J)
    expected = [model.law(tokens[: i + 1]) for i in range(116, 120)]
    assert torch.equal(verify(runner, tokens, 116), torch.stack(expected))


def test_order_matters_to_the_law_and_so_does_each_token(model: TinyModel) -> None:
    laws = {tuple(model.law(tokens).tolist()) for tokens in ([1, 2, 0], [2, 1, 0], [1, 1, 0])}
    assert len(laws) == 3


def test_a_stale_token_in_the_pages_changes_the_logits(
    model: TinyModel, runner: TargetRunner
) -> None:
    tokens = [0, 1, 2, 3, 4, 0, 1, 2]
    store(runner, [0, 1, 2, 4, 4, 0, 1], BLOCKS_J)
    assert not torch.equal(verify(runner, tokens, 7)[0], model.law(tokens))


def test_branches_return_the_exact_law(model: TinyModel) -> None:
    runner = model.make_runner(DraftRunner, replace(ENGINE, branches=N))
    committed, proposal, accepted = [1, 4, 2, 2, 0], [3, 1], [2, 0, 1]
    own = [[0, 1, 2, 3], [4, 4, 0, 1], [2, 3, 3, 0]]
    trunk = torch.tensor([len(committed) - 1])
    slot, table_BJ = torch.tensor([1]), BLOCKS_J[None]
    store(runner, committed[:-1], BLOCKS_J)
    columns = torch.tensor([[committed[-1], *proposal, 0]])
    logits_BPV = runner.run_proposals(ProposalBatch(slot, columns, slot * 3, trunk, table_BJ))
    for count in range(3):
        assert torch.equal(logits_BPV[0, count], model.law([*committed, *proposal[:count]]))
    own_1NP, accepted_1N = torch.tensor([own]), torch.tensor([accepted])
    for step in range(P):
        logits_BNV = runner.run_branches(
            BranchBatch(slot, own_1NP[:, :, step], accepted_1N, step, trunk, table_BJ)
        )
        for branch in range(N):
            text = [*committed, *proposal[: accepted[branch]], *own[branch][: step + 1]]
            assert torch.equal(logits_BNV[0, branch], model.law(text))
