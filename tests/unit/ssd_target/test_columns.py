"""A target and a draft, both without a model: tables that arrive column by column, or not at all.

Both ends are the real ones: decode loop and pool, worker and tree. Only the models are ledgers,
and tables wait until a test delivers them.
"""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ssd_draft import ledger_draft
from tests.unit.ssd_draft.ledger_draft import Draft
from tests.unit.ssd_target.bench import BRANCHES, LOOKAHEAD, VOCAB, Backup, Bench, plain

from ssd.engine.batch import BranchBatch
from ssd.errors import LinkError
from ssd.pool.link import DraftLink
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.speculation.table import OutcomeTable, pack_tables, unpack_commits
from ssd.types import (
    CloseSession,
    LinkSettings,
    OpenSession,
    RefusalReason,
    SamplingParams,
    SessionRefused,
    TargetMessage,
    Welcome,
)
from ssd_draft.inbox import Event

ENGINE = replace(ledger_draft.ENGINE, branches=BRANCHES)
NUM_TOKENS = 40


class DraftEnd:
    """A draft at the end of a link to a bench; the tests run its steps."""

    number = 1
    settings = LinkSettings(fan_out_policy="adaptive")

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.batch_times = BatchTimes()
        self.depths: list[int] = []
        self.is_slow = False
        """Whether the tables wait for ``deliver``."""
        self.waiting: list[bytes] = []
        draft = Draft(ENGINE, num_blocks=120, vocab_size=VOCAB, clock=bench.clock)
        self.runner, self.inbox, self.worker = draft.runner, draft.inbox, draft.worker
        welcome = Welcome(
            epoch=1, max_sessions=ENGINE.max_num_seqs, lookahead=LOOKAHEAD, branches=BRANCHES
        )
        self.link = DraftLink("draft", welcome, self.receive)
        bench.pool.attach(self.link)

    def receive(self, message: TargetMessage | bytes) -> None:
        now = self.bench.clock.now()
        if isinstance(message, bytes):
            commits = unpack_commits(
                message, LOOKAHEAD, max_commits=ENGINE.max_num_seqs, num_token_ids=VOCAB
            )
            self.inbox.put(Event(self, commits, now))
        elif isinstance(message, OpenSession):
            self.inbox.put(Event(self, message, now))
        elif isinstance(message, CloseSession):
            self.inbox.put(Event(self, message))

    def push(self, tables: Collection[OutcomeTable]) -> None:
        self.depths += [table.depth for table in tables]
        self.waiting.append(pack_tables(tables, LOOKAHEAD))
        if not self.is_slow:
            self.deliver()

    def deliver(self) -> None:
        while self.waiting:
            self.bench.pool.receive(self.link, self.waiting.pop(0))

    def refuse(self, session: int, reason: RefusalReason) -> None:
        self.bench.pool.refuse(self.link, SessionRefused(session, str(reason)))

    def fail(self, error: LinkError) -> None:
        raise error

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.worker.run_step()


turns = st.tuples(st.integers(0, LOOKAHEAD + 3), st.booleans())
"""Steps of the draft before a round, and whether its tables wait until the next round."""


@settings(max_examples=30, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 1.0]),
    turns=st.lists(turns, max_size=30),
    backup=st.sampled_from(["none", "ngram"]),
)
def test_no_delay_of_a_table_changes_a_token(
    temperature: float, turns: list[tuple[int, bool]], backup: Backup
) -> None:
    bench = Bench(backup=backup, circuit_breaker=False)
    draft = DraftEnd(bench)
    sampling = SamplingParams(temperature=temperature, seed=7)
    prompts = [[1, 2, 3], [4, 5], list(range(12))]
    sinks = [bench.submit(prompt, NUM_TOKENS, sampling=sampling) for prompt in prompts]
    for num_steps, draft.is_slow in turns:
        draft.deliver()
        draft.run(num_steps)
        bench.run_rounds()
    bench.run()
    assert bench.pool.links() == (draft.link,), "a late table is no fault of the draft"
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == plain(prompt, NUM_TOKENS, sampling)


@pytest.mark.parametrize("steps_a_round", [1, 2, 3, 4, 8])
def test_a_slower_draft_yields_shorter_proposals_and_is_not_late(steps_a_round: int) -> None:
    bench = Bench()
    draft = DraftEnd(bench)
    run_branches = draft.runner.run_branches

    def run_slowly(batch: BranchBatch) -> torch.Tensor:
        bench.clock.time += 1.0
        return run_branches(batch)

    draft.runner.run_branches = run_slowly  # type: ignore[method-assign]
    sink = bench.submit([1, 2, 3], NUM_TOKENS)
    bench.run_rounds()
    draft.run(12)
    while not sink.has_ended:
        bench.run_rounds()
        draft.run(steps_a_round)
    bench.run()
    statistics = sink.statistics
    assert sink.tokens == plain([1, 2, 3], NUM_TOKENS, SamplingParams(temperature=0.0))
    assert statistics.late <= 1, "the first interval between commits is not that of the later ones"
    assert statistics.hits > 0
    # The two models are the same, so a proposal is as long as its table was deep.
    assert statistics.accepted_tokens == statistics.proposed_tokens
    assert statistics.proposed_tokens / statistics.hits <= min(steps_a_round, LOOKAHEAD) + 0.6
