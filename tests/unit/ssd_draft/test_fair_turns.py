"""Links share the time of a draft, whatever a turn of each takes."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_draft.ledger_draft import CHUNK, ENGINE, VOCAB, Draft, FakeLink, K, a_text
from tests.unit.ssd_draft.virtual_target import VirtualClock

from ssd.pool.sustainable_sessions import sustainable_sessions
from ssd.speculation.table import OutcomeTable
from ssd.types import Commit, Outcome
from ssd_draft.fair_turns import FairTurns
from ssd_draft.inbox import Event
from ssd_draft.table_size import Size, SizeChoice

SESSION_SECONDS = 0.002
"""Time of a step for each session of a batch."""
MANY, SEVERAL = 15, 4


@given(st.dictionaries(st.integers(1, 5), st.floats(0.001, 1.0), min_size=2), st.integers(1, 60))
def test_links_that_always_wait_get_equal_time(seconds: dict[int, float], num_turns: int) -> None:
    turns, used = FairTurns(), defaultdict[int, float](float)
    for _ in range(num_turns):
        link = turns.next(seconds.keys())
        turns.add_turn(link, seconds[link])
        used[link] += seconds[link]
    shares = [used[link] for link in seconds]
    assert max(shares) - min(shares) <= max(seconds.values()) + 1e-9


def test_a_link_that_waits_seldom_gets_the_next_turn() -> None:
    turns = FairTurns()
    for number in range(20):
        waiting = {1, 2} if number % 5 == 4 else {1}
        link = turns.next(waiting)
        assert link == max(waiting)
        turns.add_turn(link, 1.0 if link == 1 else 0.1)
        if link == 2:
            turns.add_turn(turns.next({1}), 1.0)


def test_a_link_does_not_save_time_up() -> None:
    turns = FairTurns()
    for _ in range(100):
        turns.add_turn(turns.next({1}), 1.0)
    order = []
    for _ in range(6):
        order.append(turns.next({1, 2}))
        turns.add_turn(order[-1], 1.0)
    assert order.count(1) == order.count(2) == 3


def test_equal_links_take_turns_in_order() -> None:
    turns, order = FairTurns(), []
    for _ in range(6):
        order.append(turns.next({1, 2, 3}))
        turns.add_turn(order[-1], 0.0)
    assert order == [1, 2, 3, 1, 2, 3]


class TimedLink(FakeLink):
    """Keeps the time of each frame."""

    def __init__(self, number: int, clock: VirtualClock) -> None:
        super().__init__(number)
        self.sent: list[tuple[float, int]] = []
        """Times and depths."""
        self._clock = clock

    def push(self, tables: Collection[OutcomeTable]) -> None:
        super().push(tables)
        self.sent.append((self._clock.time, self.frames[-1][0].depth))


class SharedDraft:
    """A draft on a virtual clock; a step takes time for each session, a chunk as long as 15."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.draft = Draft(replace(ENGINE, max_num_seqs=MANY + 1), num_blocks=500, clock=self.clock)
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
            for each in self.draft.sessions.of(link.number)
            if each.table is not None and each.table.depth == K and not each.pending
        ]
        commits = [Commit(each.number, each.num_committed, Outcome(0, 1)) for each in found]
        if commits:
            self.draft.commit(link, *commits)

    def commit_at(self, link: FakeLink, times: Iterable[float]) -> None:
        """Commit one token of each session of a link at some times."""
        for number, at in enumerate(times):
            commits = tuple(
                Commit(each.number, each.num_committed + number, Outcome(0, 1))
                for each in self.draft.sessions.of(link.number)
            )
            self.draft.inbox.put(Event(link, commits, at))

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


def shared_by_busy_links() -> tuple[SharedDraft, TimedLink, FakeLink]:
    """Return a draft that has served a target with several sessions and one with one."""
    shared = SharedDraft()
    greedy, modest = TimedLink(1, shared.clock), FakeLink(2)
    for session in range(SEVERAL):
        shared.draft.open(greedy, a_text([session, 2, 3]), session)
    shared.draft.open(modest, a_text([1, 2, 3]))
    shared.draft.settle()
    for _ in range(4):
        shared.commit_each(greedy)
        shared.commit_each(modest)
        shared.draft.settle()
    return shared, greedy, modest


def column_times(
    shared: SharedDraft, greedy: TimedLink, modest: FakeLink, interval: float = 100.0
) -> list[float]:
    """Run a table of ``greedy``, which commits at an interval, beside a link that always has work.

    Returns:
        The seconds from the newest commit to each column.
    """
    began_at, session = shared.clock.time, shared.draft.sessions.of(greedy.number)[0]
    shared.commit_at(greedy, (began_at + number * interval for number in range(-4, 1)))
    base_len = session.num_committed + 5
    times: list[float] = []
    while len(times) < K:
        shared.commit_each(modest)
        shared.draft.worker.run_step()
        table = session.table
        if table is not None and table.base_len == base_len and table.depth > len(times):
            times.append(shared.clock.time - began_at)
    return times


@pytest.mark.parametrize("spare_seconds", [0.002, 0.012])
@pytest.mark.parametrize("column", range(K - 1))
def test_a_target_has_the_columns_that_are_there_when_it_needs_them(
    column: int, spare_seconds: float
) -> None:
    """However often the other link has a turn before the next column."""
    needed = column_times(*shared_by_busy_links())[column] + spare_seconds
    shared, greedy, modest = shared_by_busy_links()
    began_at = shared.clock.time
    column_times(shared, greedy, modest, needed)
    in_time = [depth for at, depth in greedy.sent if began_at < at <= began_at + needed]
    assert in_time[-1:] == [column + 1]


def test_the_time_of_a_column_contains_the_turns_of_other_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added: list[tuple[int, float]] = []

    def add_step(_choice: SizeChoice, num_sessions: int, _size: Size, seconds: float) -> None:
        added.append((num_sessions, seconds))

    shared, greedy, modest = shared_by_busy_links()
    monkeypatch.setattr(SizeChoice, "add_step", add_step)
    times = column_times(shared, greedy, modest)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    assert [each for sessions, each in added if sessions == SEVERAL] == pytest.approx(seconds)
    assert min(seconds) > 1.5 * SEVERAL * SESSION_SECONDS


def shared_by(num_links: int) -> tuple[SharedDraft, list[FakeLink]]:
    """Return a draft with several open sessions of each of some links."""
    shared, links = SharedDraft(), [FakeLink(number) for number in range(1, num_links + 1)]
    for link in links:
        for session in range(SEVERAL):
            shared.draft.open(link, a_text([session, 2, 3]), session)
    shared.draft.settle()
    return shared, links


def run_rounds(shared: SharedDraft, links: Iterable[FakeLink], round_seconds: float) -> None:
    """Let each link commit at this interval, whether its tables are complete or not."""
    next_at = {link.number: shared.clock.time for link in links}
    for _ in range(60):
        for link in links:
            if shared.clock.time >= next_at[link.number]:
                shared.commit_at(link, [shared.clock.time])
                next_at[link.number] += round_seconds
        if not shared.draft.worker.run_step():
            shared.clock.time = min(next_at.values())


BATCH_SECONDS = (K + 1) * SEVERAL * SESSION_SECONDS
"""Work for the tables of several sessions: the step after the last column ranks candidates."""


@pytest.mark.parametrize("num_links", [1, 2, 4])
@pytest.mark.parametrize("sustainable", [6, 12, 24])
def test_the_work_for_a_batch_does_not_depend_on_other_targets(
    num_links: int, sustainable: int
) -> None:
    """Also where the draft has 16 sessions and completes the tables of 6."""
    verify_seconds = sustainable / SEVERAL * BATCH_SECONDS * 1.001
    shared, links = shared_by(num_links)
    run_rounds(shared, links, verify_seconds)
    for link in links:
        times = link.batch_times.seconds_by_sessions
        assert times[SEVERAL] == pytest.approx(BATCH_SECONDS)
        assert sustainable_sessions(times, verify_seconds, 64) == sustainable


def test_work_for_a_batch_that_ends_early_counts_for_all_its_steps() -> None:
    shared, (link,) = shared_by(1)
    shared.commit_at(link, [shared.clock.time])
    shared.draft.worker.run_step()
    shared.commit_at(link, [shared.clock.time])
    shared.draft.worker.run_step()
    assert link.batch_times.seconds_by_sessions == {SEVERAL: pytest.approx(BATCH_SECONDS)}


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_a_batch_has_its_own_steps_where_another_one_of_its_link_runs_beside_it(
    num_turns: int,
) -> None:
    shared, (link,) = shared_by(1)
    sessions, half = shared.draft.sessions.of(link.number), SEVERAL // 2
    for part in (sessions[:half], sessions[half:]):
        commits = [Commit(each.number, each.num_committed, Outcome(0, 1)) for each in part]
        shared.draft.commit(link, *commits)
        shared.draft.worker.run_step()
    for _ in range(num_turns):
        shared.draft.worker.run_step()
    shared.commit_at(link, [shared.clock.time])
    shared.draft.worker.run_step()
    assert link.batch_times.seconds_by_sessions == {half: pytest.approx(BATCH_SECONDS / 2)}


def test_the_prefill_before_the_first_table_of_a_session_is_no_work_for_a_batch() -> None:
    _, links = shared_by(2)
    assert [link.batch_times.seconds_by_sessions for link in links] == [{}, {}]


def test_a_prefill_between_batches_is_work() -> None:
    shared, (link,) = shared_by(1)
    prompt = a_text([i % VOCAB for i in range(9 * CHUNK)])
    seconds = []
    for _ in range(2):
        for _ in range(6):
            shared.commit_at(link, [shared.clock.time])
            for _ in range(K + 1):
                shared.draft.worker.run_step()
        seconds.append(link.batch_times.seconds_by_sessions[SEVERAL])
        shared.draft.open(link, prompt, MANY)
    assert seconds[0] == pytest.approx(BATCH_SECONDS)
    assert seconds[1] > 1.05 * BATCH_SECONDS
