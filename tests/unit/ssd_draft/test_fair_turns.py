"""Links share the time of a draft, whatever a turn of each takes."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_draft.ledger_draft import CHUNK, VOCAB, Draft, FakeLink, K, a_text
from tests.unit.ssd_draft.virtual_target import VirtualClock

from ssd.types import Commit, Explicit, Outcome
from ssd_draft.fair_turns import FairTurns

SESSION_SECONDS = 0.002
"""Time of a step for each session of a batch."""
MANY = 15


@given(
    st.dictionaries(st.integers(1, 5), st.floats(0.001, 1.0), min_size=2),
    st.integers(1, 60),
)
def test_links_that_always_wait_get_equal_time(seconds: dict[int, float], num_turns: int) -> None:
    turns, used = FairTurns(), defaultdict[int, float](float)
    for _ in range(num_turns):
        link = turns.next(seconds.keys())
        turns.note(link, seconds[link])
        used[link] += seconds[link]
    shares = [used[link] for link in seconds]
    assert max(shares) - min(shares) <= max(seconds.values()) + 1e-9


def test_a_link_that_waits_seldom_gets_the_next_turn() -> None:
    turns = FairTurns()
    for number in range(20):
        waiting = {1, 2} if number % 5 == 4 else {1}
        link = turns.next(waiting)
        assert link == max(waiting)
        turns.note(link, 1.0 if link == 1 else 0.1)
        if link == 2:
            turns.note(turns.next({1}), 1.0)


def test_a_link_does_not_save_time_up() -> None:
    turns = FairTurns()
    for _ in range(100):
        turns.note(turns.next({1}), 1.0)
    order = []
    for _ in range(6):
        order.append(turns.next({1, 2}))
        turns.note(order[-1], 1.0)
    assert order.count(1) == order.count(2) == 3


def test_equal_links_take_turns_in_order() -> None:
    turns, order = FairTurns(), []
    for _ in range(6):
        order.append(turns.next({1, 2, 3}))
        turns.note(order[-1], 0.0)
    assert order == [1, 2, 3, 1, 2, 3]


class SharedDraft:
    """A draft on a virtual clock; a step takes time for each session, a chunk as long as 15."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.draft = Draft(clock=self.clock, num_blocks=500, num_slots=MANY + 1)
        runner = self.draft.runner
        runner.run_branches = self._slowly(  # type: ignore[method-assign]
            runner.run_branches, lambda batch: len(batch.slots_B)
        )
        runner.prefill = self._slowly(runner.prefill, lambda _: MANY)  # type: ignore[method-assign]

    def _slowly(self, run: Callable[[Any], Any], num_units: Callable[[Any], int]) -> Any:
        def run_slowly(batch: Any) -> Any:
            self.clock.time += SESSION_SECONDS * num_units(batch)
            return run(batch)

        return run_slowly

    def commit_each(self, link: FakeLink) -> None:
        """Commit one token of each session of a link whose table is complete."""
        found = [
            each
            for each in self.draft.sessions.of(link)
            if each.table is not None and each.table.depth == K and not each.pending
        ]
        commits = [
            Commit(each.number, each.num_committed, Outcome(0, 1), Explicit()) for each in found
        ]
        if commits:
            self.draft.commit(link, *commits)

    def table_seconds(self, greedy: FakeLink, modest: FakeLink) -> float:
        """Return the longest time of a table of ``modest``, while ``greedy`` always has work."""
        slowest, sent_at = 0.0, self.clock.time
        for _ in range(5):
            self.commit_each(modest)
            sent_at = self.clock.time
            num_whole = modest.depths.count(K)
            while modest.depths.count(K) == num_whole:
                self.commit_each(greedy)
                self.draft.worker.run_step()
            slowest = max(slowest, self.clock.time - sent_at)
        return slowest


@pytest.mark.parametrize("work", ["tables", "prompts"])
def test_a_target_with_one_session_waits_for_one_turn_of_a_target_with_many(work: str) -> None:
    shared, greedy, modest = SharedDraft(), FakeLink(1), FakeLink(2)
    shared.draft.open(modest, a_text([1, 2, 3]))
    if work == "tables":
        for session in range(MANY):
            shared.draft.open(greedy, a_text([session, 2, 3]), session)
    shared.draft.settle()
    if work == "prompts":
        for session in range(MANY):
            prompt = a_text([i % VOCAB for i in range(9 * CHUNK)])
            shared.draft.open(greedy, prompt, session)
    own_seconds = K * SESSION_SECONDS
    turn_seconds = MANY * SESSION_SECONDS
    # The step after the last column only ranks candidates.
    until_whole = shared.table_seconds(greedy, modest)
    assert until_whole <= own_seconds + turn_seconds + 1e-9
    assert until_whole >= own_seconds


def test_a_busy_target_with_one_session_leaves_half_of_the_time() -> None:
    shared, greedy, modest = SharedDraft(), FakeLink(1), FakeLink(2)
    for session in range(MANY):
        shared.draft.open(greedy, a_text([session, 2, 3]), session)
    shared.draft.open(modest, a_text([1, 2, 3]))
    shared.draft.settle()
    began_at, num_whole = shared.clock.time, greedy.depths.count(K)
    while greedy.depths.count(K) < num_whole + 3 * MANY:
        shared.commit_each(greedy)
        shared.commit_each(modest)
        shared.draft.worker.run_step()
    step_seconds = MANY * SESSION_SECONDS
    assert shared.clock.time - began_at <= 2 * 3 * (K + 1) * step_seconds + step_seconds
