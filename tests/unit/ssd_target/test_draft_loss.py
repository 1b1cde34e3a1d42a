"""Lost, returning and busy drafts: which rounds wait, and which sequences get a session."""

import threading

import pytest
from tests.unit.ssd_target.bench import GREEDY, Bench, plain

from ssd.speculation.backup import BACKUPS, BackupProposal
from ssd.speculation.sources import Sources
from ssd.testing.scripted_draft import Behaviour
from ssd.types import Mode, SessionRefused

MAX_SECONDS = 60.0


class WatchedCondition(threading.Condition):
    """A condition that reports when a thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def watch_lock(bench: Bench) -> WatchedCondition:
    """Replace the lock of the pool by one that reports when a thread waits."""
    bench.pool._changed = changed = WatchedCondition()
    return changed


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "refused"])
def test_a_waiting_round_continues_when_its_draft_or_session_is_lost(*, is_lost: bool) -> None:
    bench = Bench(deadline_ms=600000)
    bench.join([Behaviour.HIT, Behaviour.SILENT])
    sink = bench.submit([1, 2, 3], 20)
    bench.run_rounds()
    changed = watch_lock(bench)
    waiting_round = threading.Thread(target=bench.loop.run_round, daemon=True)
    waiting_round.start()
    assert changed.is_waited_for.wait(MAX_SECONDS)
    (link,) = bench.pool.links()
    if is_lost:
        bench.pool.detach(link, "lost")
    else:
        (session,) = link.sessions
        bench.pool.refuse(link, SessionRefused(session, "gap"))
    waiting_round.join(MAX_SECONDS)
    assert not waiting_round.is_alive()
    if is_lost:
        bench.run()
        assert sink.tokens == plain([1, 2, 3], 20, GREEDY)


def test_a_proposal_is_verified_after_its_draft_is_lost() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 20)
    bench.run_rounds()
    (link,) = bench.pool.links()
    bench.pool.detach(link, "lost")
    bench.run_rounds()
    assert len(sink.tokens) == 1 + 4, "the whole proposal is accepted"
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 20, GREEDY)
    assert sink.statistics.accepted_tokens == 3
    assert sink.statistics.rounds == 2 + 15


@pytest.mark.parametrize("repeats", [False, True])
def test_a_round_tests_the_proposals_of_tables_and_backup(
    monkeypatch: pytest.MonkeyPatch, *, repeats: bool
) -> None:
    monkeypatch.setitem(BACKUPS, "ngram", lambda _tokens, num: BackupProposal((12,) * num, repeats))
    bench = Bench(backup="ngram", deadline_ms=1000.0)
    bench.join([Behaviour.HIT] * 60)
    sink = bench.submit([1, 2, 3], 40, mode=Mode.SPECULATIVE)
    bench.run_rounds(7)
    sources = bench.pool._pace.sources
    of_draft, of_backup = sources.acceptances(repeats=repeats)
    assert of_draft > 0.85
    assert of_backup < 0.5
    assert sources.acceptances(repeats=not repeats) == Sources().acceptances(repeats=not repeats)
    # Without a session, the last candidates are not tested again.
    (link,) = bench.pool.links()
    bench.pool.detach(link, "lost")
    bench.run_rounds()
    before = sources.acceptances(repeats=repeats)
    bench.run()
    assert sources.acceptances(repeats=repeats) == before
    assert sink.tokens == plain([1, 2, 3], 40, GREEDY)


@pytest.fixture
def always_proposing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup that proposes in every round."""
    monkeypatch.setitem(BACKUPS, "ngram", lambda _tokens, count: BackupProposal((1, 2, 3)[:count]))


@pytest.mark.usefixtures("always_proposing")
def test_after_the_circuit_breaker_sessions_reopen_at_once_while_rows_propose() -> None:
    bench = Bench(backup="ngram")
    draft = bench.join([*[Behaviour.MISS] * 3, *[Behaviour.SILENT] * 3, Behaviour.MISS])
    sink = bench.submit([1, 2, 3], 60)
    bench.run_rounds(12)
    (link,) = bench.pool.links()
    assert link.circuit_breaker.open_until > bench.clock.now()
    assert draft.num_sessions == 0
    bench.clock.time = link.circuit_breaker.open_until
    bench.run_rounds()
    assert draft.num_sessions == 1
    bench.run()
    assert sink.statistics.proposed_tokens > 0


@pytest.mark.usefixtures("always_proposing")
def test_a_new_link_gets_its_sessions_within_two_rounds() -> None:
    bench = Bench(backup="ngram")
    bench.join([Behaviour.MISS], name="first")
    sinks = [bench.submit([1, 2, number], 40) for number in range(4)]
    bench.run_rounds(5)
    (link,) = bench.pool.links()
    bench.pool.detach(link, "lost")
    second = bench.join([Behaviour.HIT], name="second")
    bench.run_rounds(2)
    assert second.num_sessions == 4
    bench.run()
    for number, sink in enumerate(sinks):
        assert sink.tokens == plain([1, 2, number], 40, GREEDY)
        assert sink.statistics.hits > 0


@pytest.mark.usefixtures("always_proposing")
def test_a_free_session_goes_to_a_sequence_without_a_draft() -> None:
    bench = Bench(backup="ngram")
    draft = bench.join([Behaviour.MISS], max_sessions=1)
    bench.submit([1, 2, 3], 5)
    bench.submit([4, 5, 6], 40)
    for _ in range(4):
        bench.run_rounds()
        assert len(draft.openings) == 1, "no session is opened beyond max_sessions"
    bench.run_rounds(3)
    assert len(draft.openings) == 2
    assert draft.num_sessions == 1
    bench.run()


def drain(bench: Bench, name: str) -> None:
    bench.pool.drain(next(link for link in bench.pool.links() if link.name == name))


def test_sequences_of_a_draining_draft_move_to_another_draft() -> None:
    bench = Bench()
    draining = bench.join([Behaviour.HIT], name="draining")
    sinks = [bench.submit([1, 2, number], 40) for number in range(3)]
    bench.run_rounds(5)
    staying = bench.join([Behaviour.HIT], name="staying")
    assert (draining.num_sessions, staying.num_sessions) == (3, 0)
    drain(bench, "draining")
    bench.run_rounds()
    assert draining.num_sessions == 0
    bench.run_rounds()
    assert (draining.num_sessions, staying.num_sessions) == (0, 3)
    bench.run()
    for number, sink in enumerate(sinks):
        assert sink.tokens == plain([1, 2, number], 40, GREEDY)
    assert bench.pool.counts.hits > sum(len(each.tokens) for each in sinks) / 8


def test_opening_sessions_of_a_draining_draft_move_too() -> None:
    bench = Bench()
    draining = bench.join([Behaviour.SILENT], name="draining")
    bench.submit([1, 2, 3], 40)
    bench.run_rounds()
    staying = bench.join([Behaviour.HIT], name="staying")
    drain(bench, "draining")
    bench.run_rounds()
    assert (draining.num_sessions, staying.num_sessions) == (0, 1)
    bench.run()


def test_sequences_of_a_draining_draft_run_without_a_draft_if_no_other_has_room() -> None:
    bench = Bench()
    draining = bench.join([Behaviour.HIT], name="draining")
    staying = bench.join([Behaviour.HIT], name="staying", max_sessions=1)
    sinks = [bench.submit([1, 2, number], 30) for number in range(3)]
    bench.run_rounds(4)
    assert (draining.num_sessions, staying.num_sessions) == (2, 1)
    drain(bench, "draining")
    bench.run_rounds(2)
    assert (draining.num_sessions, staying.num_sessions) == (0, 1)
    bench.run()
    for number, sink in enumerate(sinks):
        assert sink.tokens == plain([1, 2, number], 30, GREEDY)
