"""What changes on live links: settings, and the sessions when a draft joins."""

from dataclasses import replace

import pytest
from tests.unit.ssd_target.bench import GREEDY, Bench, plain

from ssd.pool import tables
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.pool.table_deadline import Prospect, RoundPace
from ssd.rpc.codec import BackupName
from ssd.speculation.controller import Choice
from ssd.testing.scripted_draft import Behaviour
from ssd.types import CloseSession, Mode, SessionRefused

SILENT = [Behaviour.SILENT]


def test_another_backup_applies_from_the_next_round_on() -> None:
    bench = Bench(backup="none")
    bench.join([Behaviour.HIT, Behaviour.MISS])
    bench.submit([1, 2] * 4, 50)
    bench.run_rounds(4)
    changes: list[tuple[BackupName, bool]] = [("none", False), ("ngram", True), ("none", False)]
    for backup, may_propose in changes:
        bench.pool.configure(replace(bench.pool.settings, backup=backup))
        before = len(bench.controller.rounds)
        bench.run_rounds(8)
        proposed = [each.num_proposed for each in bench.controller.rounds[before + 1 :]]
        assert any(proposed) is may_propose
    assert bench.pool.links()[0].counts.misses > 10


def test_another_table_deadline_applies_from_the_next_round_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(circuit_breaker=False)
    bench.join([Behaviour.HIT, *SILENT])
    bench.submit([1, 2, 3], 40)
    bench.run_rounds()
    waits: list[float] = []
    monkeypatch.setattr(bench.pool._changed, "wait", waits.append)
    for deadline_ms in (500.0, 50.0, 900.0):
        settings = replace(
            bench.pool.settings, adaptive_deadline=False, draft_deadline_ms=deadline_ms
        )
        bench.pool.configure(settings)
        bench.run_rounds(2)
    assert waits == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.9, 0.9], abs=0.002)


def test_all_sequences_of_a_round_count_in_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.join([Behaviour.SHALLOW])
    for mode in (Mode.AUTO, Mode.AUTOREGRESSIVE, Mode.AUTOREGRESSIVE):
        bench.submit([1, 2, 3], 40, mode=mode)
    bench.run_rounds(3)  # the prompts are stored one after the other
    nums_rows: list[int] = []

    def wait_until(rows: list[Prospect], _pace: RoundPace, _begun_at: float, now: float) -> float:
        nums_rows.append(len(rows))
        return now

    monkeypatch.setattr(tables, "wait_until", wait_until)
    bench.run_rounds()
    assert nums_rows == [3]


class FixedTimes(BatchTimes):
    """The tables of a batch take a fixed time for each of its sessions."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = {1: seconds}

    def add_batch(self, _seconds: object) -> None: ...


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_sessions", "seconds", "num_moved"),
    [(2, 10.0, 1), (3, 10.0, 1), (4, 10.0, 2), (4, 1e-6, 0)],
)
def test_sessions_of_a_draft_that_has_too_many_move_to_one_that_joins(
    num_sessions: int, seconds: float, num_moved: int, num_rounds: int
) -> None:
    """A sequence whose session has closed opens one a round later: it has a proposal until then."""
    bench = Bench()
    slow = bench.join([Behaviour.HIT], name="slow")
    (link,) = bench.pool.links()
    link.batch_times = FixedTimes(seconds)
    prompts = [[number, 2, 3] for number in range(num_sessions)]
    sinks = [bench.submit(prompt, 60) for prompt in prompts]
    while len(link.sessions) < num_sessions:
        bench.run_rounds()
    bench.run_rounds(num_rounds)
    joined = bench.join([Behaviour.HIT], name="joined")
    bench.run_rounds(8)
    assert len(slow.closings) == len(joined.openings) == num_moved
    bench.run()
    num_opened = len(slow.openings) + len(joined.openings)
    assert num_opened == num_sessions + num_moved, "no session returns"
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == plain(prompt, 60, GREEDY)
        assert sink.statistics.hits > 0


@pytest.mark.parametrize("how", ["ends", "is paused"])
def test_a_sequence_that_needs_no_session_after_its_move_delays_no_other_move(how: str) -> None:
    bench = Bench()
    slow = bench.join([Behaviour.HIT], name="slow")
    (link,) = bench.pool.links()
    link.batch_times = FixedTimes(10.0)
    bench.submit([1, 2, 3], 60)  # it has most tokens to go, so it moves first
    for number in range(3):
        bench.submit([number, 2, 3], 55, mode=Mode.SPECULATIVE)
    while len(link.sessions) < 4:
        bench.run_rounds()
    joined = bench.join([Behaviour.HIT], name="joined")
    while not slow.closings:
        bench.run_rounds()
    if how == "ends":
        bench.inbox.cancel(1)
    else:
        bench.controller.choices = [Choice(is_on=False, max_proposed=0)]
    bench.run_rounds(3)
    assert len(slow.closings) == 2
    assert len(joined.openings) == 1


def test_after_a_refused_opening_no_session_moves_there_for_a_while() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT], name="slow")
    (link,) = bench.pool.links()
    link.batch_times = FixedTimes(10.0)
    for number in range(4):
        bench.submit([number, 2, 3], 60)
    while len(link.sessions) < 4:
        bench.run_rounds()
    joined = bench.join(SILENT, name="full")
    _, full = bench.pool.links()
    while not full.sessions:
        bench.run_rounds()
    bench.pool.refuse(full, SessionRefused(1, "max_sessions"))
    joined.receive(CloseSession(1))
    while len(link.sessions) < 4:
        bench.run_rounds()
    bench.clock.time += 2.0
    bench.run_rounds(3)
    assert joined.openings == [1]
    assert len(link.sessions) == 4
    bench.clock.time += 30.0
    bench.run_rounds(2)
    assert joined.openings == [1, 2]
