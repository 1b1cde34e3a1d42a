"""The passes of a draft give the logits of the plain text of each branch."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import CPU_ENGINES, PlainLogits, inside, load, on, paged, store
from torch import Tensor

from ssd.engine.batch import AppendBatch, BranchBatch, ProposalBatch, StoredNoise
from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.openvino_engine import draft
from ssd.engine.openvino_engine.draft import Tables
from ssd.engine.openvino_engine.draft_graph import DraftGraph, PassInputs
from ssd.engine.sampling.soft_filters import SoftFilters
from ssd.speculation.noise import gumbel_noise

pytestmark = pytest.mark.timeout(60)
"""Graphs of whole tables are compiled: 5 s of a slow core."""
RunnerOn = Callable[[str], DraftRunner]

K, N = 3, 4
P = K + 1
VOCAB = 257
NUM_IDS = VOCAB - 9
"""The others are padding of the vocabulary."""
BLOCKS = 32
ENGINE = EngineConfig(
    max_model_len=1024,
    max_num_seqs=4,
    num_columns=P,
    branches=N,
    dtype="float32",
    block_size=32,
    prefill_chunk=32,
    context_chunk=64,
    num_token_ids=NUM_IDS,
)


@dataclass
class Session:
    """What is committed, what is proposed after it, and the tokens of each branch."""

    slot: int
    committed: list[int]
    proposal: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    own: list[list[int]] = field(default_factory=list)

    def fork(self, generator: torch.Generator) -> None:
        """Take branches at random, one of them after full acceptance."""
        m = len(self.proposal)
        self.accepted = torch.randint(0, m + 1, (N,), generator=generator).tolist()
        self.accepted[0] = m
        self.own = torch.randint(0, VOCAB, (N, P), generator=generator).tolist()

    def text(self, branch: int) -> list[int]:
        return [*self.committed, *self.proposal[: self.accepted[branch]], *self.own[branch]]

    def commit(self, branch: int, num_proposed: int) -> None:
        self.committed = self.text(branch)[: 1 - P]
        self.proposal = self.own[branch][1 : 1 + num_proposed]


class Harness:
    """Drives the passes as a draft does."""

    def __init__(self, runner: DraftRunner, plain: PlainLogits, sessions: list[Session]) -> None:
        self.runner = runner
        self.plain = plain
        self.sessions = sessions
        self.slots_B = torch.tensor([session.slot for session in sessions])
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randperm(4 * BLOCKS, generator=generator) + 1
        self.tables_BJ = blocks.view(4, BLOCKS)[self.slots_B]
        for session in sessions:
            runner.end_session(session.slot)

    @property
    def trunk_lengths(self) -> Tensor:
        return torch.tensor([len(session.committed) - 1 for session in self.sessions])

    def expected(self, text: list[int], num_rows: int) -> Tensor:
        padding = torch.arange(NUM_IDS, VOCAB)
        return self.plain(text)[-num_rows:].index_fill(1, padding, -torch.inf)

    def explicit(self) -> None:
        rows = [[session.committed[-1], *session.proposal] for session in self.sessions]
        tokens_BP = torch.full((len(rows), P), 99)
        for index, row in enumerate(rows):
            tokens_BP[index, : len(row)] = torch.tensor(row)
        counts_B = torch.tensor([len(row) for row in rows])
        logits_BPV = self.runner.run_proposals(
            ProposalBatch(self.slots_B, tokens_BP, counts_B, self.trunk_lengths, self.tables_BJ)
        )
        for session, row, logits_PV in zip(self.sessions, rows, logits_BPV, strict=True):
            expected_RV = self.expected([*session.committed, *session.proposal], len(row))
            close(logits_PV[: len(row)], expected_RV)

    def branches(self) -> None:
        accepted_BN = torch.tensor([session.accepted for session in self.sessions])
        own_BNP = torch.tensor([session.own for session in self.sessions])
        found = [
            self.runner.run_branches(
                BranchBatch(
                    self.slots_B,
                    own_BNP[:, :, step],
                    accepted_BN,
                    step,
                    self.trunk_lengths,
                    self.tables_BJ,
                )
            ).clone()
            for step in range(P)
        ]
        found_BNPV = torch.stack(found, dim=2)
        for session, found_NPV in zip(self.sessions, found_BNPV, strict=True):
            for branch in range(N):
                close(found_NPV[branch], self.expected(session.text(branch), P))

    def append(self, branches: list[int]) -> None:
        entries = [
            s.accepted[branch] + 1 for s, branch in zip(self.sessions, branches, strict=True)
        ]
        entries_B = torch.tensor(entries)
        batch = AppendBatch(self.slots_B, entries_B, self.trunk_lengths, self.tables_BJ)
        self.runner.append_proposal(batch)

    def adopt(self, branches: list[int], num_proposed: list[int]) -> None:
        self.append(branches)
        self.runner.promote_branches(self.slots_B, torch.tensor(branches))
        for session, branch, m in zip(self.sessions, branches, num_proposed, strict=True):
            session.commit(branch, m)

    def stray(self, branches: list[int], guesses: list[list[int]]) -> None:
        self.append(branches)
        for session, branch, guess in zip(self.sessions, branches, guesses, strict=True):
            session.commit(branch, 0)
            session.committed[-1] = 5
            session.proposal = guess


@pytest.fixture(scope="module")
def runner_on(folder: Path) -> RunnerOn:
    """The runner on each engine; a test finds what another one has stored."""
    return cache(lambda name: load(DraftRunner, folder, on(name, ENGINE)))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", CPU_ENGINES)
@pytest.mark.parametrize("lengths", [[1], [33, 1, 70], [3, 300, 40]])
def test_branches_equal_their_plain_texts_in_every_round(
    runner_on: RunnerOn, plain_logits: PlainLogits, attention: str, lengths: list[int]
) -> None:
    runner = runner_on(attention)
    generator = torch.Generator().manual_seed(sum(lengths))
    sessions = [
        Session(slot, torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        for slot, length in zip([2, 0, 3], lengths, strict=False)
    ]
    harness = Harness(runner, plain_logits, sessions)
    for session, blocks_J in zip(sessions, harness.tables_BJ, strict=True):
        store(runner, session.committed[:-1], blocks_J)
    count = len(sessions)

    def grow() -> None:
        for session in sessions:
            session.fork(generator)
        harness.branches()

    harness.explicit()
    grow()
    harness.adopt([0, 1, 2][:count], [K, 2, 0][:count])
    grow()
    harness.adopt([0, 0, 3][:count], [K, K, K][:count])
    grow()
    harness.stray([3, 0, 1][:count], [[7, 8], [], [1, 2, 3]][:count])
    harness.explicit()
    grow()
    harness.adopt([0, 3, 2][:count], [1, K, K][:count])
    grow()


def test_a_draft_warms_up_and_reports_its_progress(folder: Path) -> None:
    reports: list[float] = []
    load(DraftRunner, folder, ENGINE).warm_up(lambda _stage, fraction: reports.append(fraction))
    assert reports[-1] == 1.0


def test_arrays_of_passes_are_freed_with_their_sessions_without_a_search_for_cycles(
    runner_on: RunnerOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Tables]] = []

    def recorded(*parts: Any) -> Tables:
        tables = Tables(*parts)
        made.append(weakref.ref(tables))
        return tables

    runner = runner_on("openvino")
    monkeypatch.setattr(draft, "Tables", recorded)
    gc.disable()
    try:
        runner.warm_up(lambda _stage, _fraction: None)
        num_alive = sum(each() is not None for each in made)
    finally:
        gc.enable()
    assert num_alive == 0 < len(made)


def test_after_the_warm_up_no_opening_session_has_a_new_shape(
    runner_on: RunnerOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO compiles kernels for each shape, which would delay the first table."""
    shapes: set[tuple[object, ...]] = set()
    run = DraftGraph.run

    def recorded(graph: DraftGraph, inputs: PassInputs, *more: Any) -> None:
        of_inputs = ((name, *each.get_shape()) for name, each in inputs.tensors.items())
        shapes.add((graph, *of_inputs))
        run(graph, inputs, *more)

    monkeypatch.setattr(DraftGraph, "run", recorded)
    runner = runner_on("openvino")
    runner.warm_up(lambda _stage, _fraction: None)
    warm = shapes.copy()
    assert len(warm) > 5
    blocks_2J = torch.arange(1, 9).view(2, 4)
    for length in (1, 9, 16, 17, 32, 40, 60):
        for slot, blocks_J in enumerate(blocks_2J):
            runner.end_session(slot)
            store(runner, [1] * length, blocks_J)
        for sessions in (1, 2):
            slots_B = torch.arange(sessions)
            lengths_B, tables_BJ = torch.full((sessions,), length), blocks_2J[:sessions]
            for columns in (1, 2, P):
                tokens_BP, counts_B = torch.ones((sessions, P)).long(), slots_B * 0 + columns
                runner.run_proposals(
                    ProposalBatch(slots_B, tokens_BP, counts_B, lengths_B, tables_BJ)
                )
            tokens_BN = torch.ones((sessions, N)).long()
            runner.run_branches(
                BranchBatch(slots_B, tokens_BN, tokens_BN * 0, 0, lengths_B, tables_BJ)
            )
    assert shapes == warm


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_a_chunk_begins_at_any_position(
    runner_on: RunnerOn, plain_logits: PlainLogits, engine: str
) -> None:
    runner = runner_on(engine)
    committed = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    harness = Harness(runner, plain_logits, [Session(1, committed)])
    store(runner, committed[:45], harness.tables_BJ[0])
    runner.prefill(paged([(committed[45:59], 45, harness.tables_BJ[0])], 32))
    harness.explicit()


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_a_chunk_may_begin_just_before_the_last_position(runner_on: RunnerOn, engine: str) -> None:
    """Its padding is beyond the block table."""
    first = ENGINE.max_model_len - 10
    assert runner_on(engine).prefill(paged([([1] * 9, first, torch.arange(1, 33))], 32)) is None


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_pass_does_not_change_other_slots(runner_on: RunnerOn, engine: str) -> None:
    runner = runner_on(engine)
    runner.warm_up(lambda _stage, _fraction: None)
    entries = inside(runner)._entries
    others_B = torch.tensor([0, 2, 3])
    theirs = torch.cat((entries.proposal(others_B).flatten(), entries.own(others_B).flatten()))
    before = inside(runner)._storage.entries_L2ZW[:, :, theirs].clone()
    one_B, table_B1 = torch.tensor([1]), torch.tensor([[1]])
    tokens_BP, tokens_BN = torch.ones((1, P)).long(), torch.ones((1, N)).long()
    runner.run_proposals(ProposalBatch(one_B, tokens_BP, one_B * 2, one_B, table_B1))
    for step in range(P):
        runner.run_branches(BranchBatch(one_B, tokens_BN, tokens_BN, step, one_B, table_B1))
    runner.append_proposal(AppendBatch(one_B, one_B, one_B, table_B1))
    runner.promote_branches(one_B, one_B)
    assert torch.equal(inside(runner)._storage.entries_L2ZW[:, :, theirs], before)


def test_all_columns_of_one_pass_are_those_of_the_steps(runner_on: RunnerOn) -> None:
    """The reference chooses step by step. The entries of the branch that wins are stored."""
    reference, graphs = runner_on("torch"), runner_on("openvino")
    for top_k, min_p in ((0, 0.0), (4, 0.0), (0, 0.4), (9, 0.2)):
        found = columns_of(graphs, top_k, min_p)
        for actual, expected in zip(found, columns_of(reference, top_k, min_p), strict=True):
            assert torch.equal(actual[0], expected[0]), (top_k, min_p)
            assert int(actual[0].max()) < NUM_IDS
            close(actual[1], expected[1])
            close(actual[2], expected[2])


def columns_of(
    runner: DraftRunner, top_k: int, min_p: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, logits and stored entries of two passes with filters."""
    soft_filters = SoftFilters(1, "cpu")
    soft_filters.assign(0, 1.0, top_k, min_p)
    filters = soft_filters.of_rows(np.zeros(N, dtype=np.int64), VOCAB)
    committed = torch.randint(0, NUM_IDS, (70,), generator=torch.Generator().manual_seed(5))
    noise_YV = torch.from_numpy(gumbel_noise(7, range(K), VOCAB))
    blocks_1J = torch.arange(1, 4)[None]
    accepted_1N = torch.tensor([[0, 2, 1, 2]])
    proposal_1P = torch.tensor([[1, 2, 3, 0]])
    found = []
    store(runner, committed.tolist(), blocks_1J[0])
    for length, num_columns, table_length in ((50, 3, K), (60, 2, 2)):
        slot_B, length_B = torch.tensor([2]), torch.tensor([length])
        counts_B = torch.tensor([num_columns])
        runner.run_proposals(ProposalBatch(slot_B, proposal_1P, counts_B, length_B, blocks_1J))
        tokens_1N = torch.tensor([[9, 8, 7, 6]]) + length
        batch = BranchBatch(slot_B, tokens_1N, accepted_1N, 0, length_B, blocks_1J)
        temperature_R = torch.tensor([0.0, 1.0, 0.7, 0.0])
        rows_KR = np.arange(table_length)[:, None].repeat(N, axis=1)
        noise = StoredNoise(temperature_R, noise_YV, rows_KR, filters)
        tokens_K1N, logits_P1NV = runner.run_columns(batch, noise)
        outputs = tokens_K1N.clone(), logits_P1NV.clone()
        runner.promote_branches(slot_B, torch.tensor([1]))
        storage = inside(runner)._storage
        entries_1P = storage.entries.proposal(slot_B)[:, : table_length + 1]
        found.append((*outputs, storage.select(entries_1P)))
    return found


def test_a_trunk_of_another_session_in_the_same_slot_is_read_again(
    runner_on: RunnerOn, plain_logits: PlainLogits
) -> None:
    """One session ends with a long trunk; the next one has the same slot and the same blocks."""
    runner = runner_on("openvino")
    generator = torch.Generator().manual_seed(1)
    for length in (40, 60, 1):
        committed = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        session = Session(1, committed)
        harness = Harness(runner, plain_logits, [session])
        store(runner, session.committed[:-1], harness.tables_BJ[0])
        harness.explicit()
        for _ in range(2):
            session.fork(generator)
            harness.branches()
            harness.adopt([0], [K])
