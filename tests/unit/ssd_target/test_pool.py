"""Which tables the pool keeps, and when it opens and closes sessions."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from tests.unit.ssd_target.bench import GREEDY, LOOKAHEAD, Bench, plain

from ssd.errors import FrameError
from ssd.observability.metrics import STALE_FRAMES_TOTAL
from ssd.pool import link as link_module
from ssd.pool.link import LinkState
from ssd.pool.table_deadline import opening_seconds
from ssd.speculation.table import OutcomeTable, frame_bytes, pack_tables
from ssd.testing.scripted_draft import Behaviour
from ssd.types import CloseSession, OpenSession, SessionRefused, TargetMessage

SILENT = [Behaviour.SILENT]


def stale_frames() -> float:
    return float(STALE_FRAMES_TOTAL._value.get())


def tables_frame(
    session: int,
    base_len: int,
    bonus: Iterable[int],
    depth: int = LOOKAHEAD,
    length: int = LOOKAHEAD,
) -> bytes:
    bonus_N = np.array(tuple(bonus), dtype=np.int32)
    tokens_NK = np.full((len(bonus_N), LOOKAHEAD), 1, dtype=np.int32)
    tokens_NK[:, depth:] = -1
    table = OutcomeTable(
        session=session,
        base_len=base_len,
        accepted_N=np.zeros_like(bonus_N),
        bonus_N=bonus_N,
        tokens_NK=tokens_NK,
        length=length,
    )
    return pack_tables([table], LOOKAHEAD)


def begun(
    bench: Bench, script: Iterable[Behaviour] = SILENT, **options: Any
) -> tuple[Any, Any, Any]:
    """A draft, its link, and the session of one sequence after the first round."""
    draft = bench.join(script, **options)
    bench.submit([1, 2, 3], 60)
    bench.run_rounds()
    (link,) = bench.pool.links()
    (session,) = link.sessions.values()
    return draft, link, session


def test_an_unanswered_opening_is_closed_and_the_sequence_opens_on_another_link() -> None:
    bench = Bench()
    hung = bench.join(SILENT, name="hung")
    sink = bench.submit([1, 2, 3], 40)
    bench.run_rounds()
    other = bench.join([Behaviour.HIT], name="other")
    bench.run_rounds()
    assert other.openings == [], "the opening on the first link is not overdue"
    bench.clock.time += opening_seconds(3)
    bench.run_rounds()
    assert hung.closings == hung.openings == [1]
    assert other.openings == [1]
    hung_link, _ = bench.pool.links()
    assert bench.pool.state(hung_link) is LinkState.QUARANTINED
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 40, GREEDY)
    assert sink.statistics.hits > 0


def test_commits_have_the_length_that_the_target_uses_next() -> None:
    bench = Bench()
    draft = bench.join([Behaviour.HIT])
    bench.submit([1, 2, 3], 12)
    bench.run()
    assert draft.commits[0].length == LOOKAHEAD
    # Towards the end of the text, fewer tokens are left.
    assert 1 <= draft.commits[-1].length < LOOKAHEAD


def test_a_long_text_gets_another_session_before_the_first_one_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "SESSION_TOKENS", 20)
    bench = Bench()
    draft = bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 60)
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 60, GREEDY)
    openings = [message for message in draft.received if isinstance(message, OpenSession)]
    lengths = [len(message.token_ids) for message in openings]
    assert [message.max_len for message in openings] == [
        min(length + 20, 3 + 60) for length in lengths
    ]
    assert len(openings) > 2
    ends = {message.session: message.max_len for message in openings}
    for commit in draft.commits:
        end = ends[commit.session]
        num_committed = commit.base_len + commit.outcome.accepted + 1
        assert num_committed < end or end == 3 + 60, "a draft refuses a full session"
    assert sink.statistics.hits >= sink.statistics.rounds - 3 * len(openings)


def test_only_links_that_accept_sessions_are_active() -> None:
    bench = Bench()
    for name in ("active", "draining", "suspended"):
        bench.join(SILENT, name=name)
    _, draining, suspended = bench.pool.links()
    bench.pool.drain(draining)
    suspended.circuit_breaker.open(bench.clock.now())
    assert bench.pool.num_active == 1


def test_an_open_session_stays_when_openings_are_closed() -> None:
    bench = Bench(circuit_breaker=False)
    first_alone = [Behaviour.HIT, Behaviour.HIT]
    second_hangs = [Behaviour.SILENT, Behaviour.HIT, Behaviour.SILENT]
    draft = bench.join([*first_alone, *second_hangs, Behaviour.HIT])
    bench.submit([1, 2, 3], 50)
    bench.run_rounds()
    bench.submit([4, 5, 6], 50)
    bench.run_rounds()
    bench.clock.time += opening_seconds(6)
    bench.run_rounds()
    assert draft.openings == [1, 2]
    assert draft.closings == [2]
    assert draft.num_sessions == 1
    bench.run()


def test_without_a_circuit_breaker_an_opening_is_not_repeated_at_once() -> None:
    bench = Bench(circuit_breaker=False)
    draft, _, _ = begun(bench)
    bench.clock.time += opening_seconds(3)
    bench.run_rounds(3)
    assert draft.openings == [1]
    bench.clock.time += 1.0
    bench.run_rounds()
    assert draft.openings == [1, 2]
    bench.run()


class LockWatch:
    """Records whether the lock of the pool was free while closings were sent."""

    def __init__(self, bench: Bench, draft: Any) -> None:
        self._lock = bench.pool._changed
        self._receive = draft.receive
        self.was_free: list[bool] = []

    def __call__(self, message: TargetMessage | bytes) -> None:
        if isinstance(message, CloseSession):
            taker = threading.Thread(target=self._try)
            taker.start()
            taker.join()
        self._receive(message)

    def _try(self) -> None:
        self.was_free.append(self._lock.acquire(blocking=False))
        if self.was_free[-1]:
            self._lock.release()


@pytest.mark.parametrize("script", [[Behaviour.HIT, *SILENT], SILENT])
def test_the_lock_is_free_while_sessions_of_a_suspended_link_are_closed(
    script: list[Behaviour],
) -> None:
    bench = Bench()
    draft = bench.join(script)
    (link,) = bench.pool.links()
    link.send = watch = LockWatch(bench, draft)
    bench.submit([1, 2, 3], 40)
    bench.run_rounds()
    bench.clock.time += opening_seconds(3)
    bench.run_rounds(4)
    assert bench.pool.state(link) is LinkState.QUARANTINED
    assert watch.was_free == [True]
    bench.run()


@pytest.mark.parametrize(
    ("is_answering", "state"), [(True, LinkState.ACTIVE), (False, LinkState.QUARANTINED)]
)
@pytest.mark.parametrize("round_seconds", [0.02, 0.1, 0.3])
def test_a_slow_draft_is_not_suspended_a_silent_one_is(
    *, is_answering: bool, state: LinkState, round_seconds: float
) -> None:
    bench = Bench(deadline_ms=20.0)
    _, link, _ = begun(bench, [Behaviour.HIT, *SILENT])
    for _ in range(6):
        (session,) = link.sessions.values()
        late = tables_frame(1, session.base_len, [5])
        bench.clock.time += round_seconds
        bench.run_rounds()
        if is_answering:
            bench.pool.receive(link, late)
        if bench.pool.state(link) is LinkState.QUARANTINED:
            break
    assert bench.pool.state(link) is state
    bench.run()


@pytest.mark.parametrize("reason", ["max_sessions", "gap", "draining", "of a later version"])
def test_after_a_refusal_the_next_opening_is_a_second_later(reason: str) -> None:
    bench = Bench()
    draft, link, _ = begun(bench, [Behaviour.HIT])
    bench.pool.refuse(link, SessionRefused(1, reason))
    draft.receive(CloseSession(1))
    bench.run_rounds(3)
    assert draft.openings == [1]
    bench.clock.time += 1.0
    bench.run_rounds()
    assert draft.openings == [1, 2]
    bench.run()


@pytest.mark.parametrize("reason", ["length", "not_finite"])
def test_a_sequence_that_a_draft_cannot_serve_is_excluded_there_and_no_other_is(
    reason: str,
) -> None:
    bench = Bench()
    small, link, _ = begun(bench, [Behaviour.HIT], name="small")
    bench.pool.refuse(link, SessionRefused(1, reason))
    small.receive(CloseSession(1))
    bench.submit([4, 5, 6], 20)
    bench.run_rounds(2)
    assert small.openings == [1, 2], "only the sequence that was refused is not offered again"
    large = bench.join([Behaviour.HIT], name="large")
    bench.run_rounds(2)
    assert large.openings == [1]
    bench.run()
    assert small.openings == [1, 2]


@pytest.mark.parametrize("distance", [-1, -2])
def test_a_table_of_another_round_is_dropped_and_counted(distance: int) -> None:
    bench = Bench()
    _, link, session = begun(bench)
    before = stale_frames()
    bench.pool.receive(link, tables_frame(1, session.base_len + distance, [5]))
    assert session.table is None
    assert stale_frames() == before + 1
    bench.pool.receive(link, tables_frame(1, session.base_len, [5]))
    assert session.table is not None


def test_the_first_table_of_a_session_is_not_timed() -> None:
    """Its time includes the prefill of the prompt."""
    bench = Bench()
    _, link, session = begun(bench)
    bench.clock.time += 3.0
    bench.pool.receive(link, tables_frame(1, session.base_len, [5]))
    bench.run_rounds()
    assert link.batch_times.seconds_by_sessions == {}
    bench.clock.time += 0.5
    bench.pool.receive(link, tables_frame(1, session.base_len, [5]))
    bench.run_rounds()
    assert 0.5 < link.batch_times.seconds_by_sessions[1] < 0.7


def test_a_table_with_more_branches_than_agreed_is_rejected() -> None:
    bench = Bench()
    bench.join(SILENT)
    bench.submit([1, 2, 3], 40)
    bench.submit([4, 5, 6], 40)
    bench.run_rounds()
    (link,) = bench.pool.links()
    session, _ = link.sessions.values()
    with pytest.raises(FrameError, match="a table has 3 branches, agreed are 2"):
        bench.pool.receive(link, tables_frame(1, session.base_len, [5, 6, 7]))
    bench.run()


def test_a_frame_with_more_rows_than_the_sessions_allow_is_rejected() -> None:
    bench = Bench()
    bench.join(SILENT)
    (link,) = bench.pool.links()
    with pytest.raises(FrameError, match="allowed are 0 tables: up to 0 rows"):
        bench.pool.receive(link, bytes(frame_bytes(1, LOOKAHEAD)))
    bench.submit([1, 2, 3], 40)
    bench.run_rounds()
    with pytest.raises(FrameError, match="allowed are 1 tables: up to 3 rows"):
        bench.pool.receive(link, bytes(frame_bytes(4, LOOKAHEAD)))
    bench.run()


def test_a_draft_may_send_as_many_tables_as_columns_were_requested() -> None:
    bench = Bench(circuit_breaker=False)
    _, link, session = begun(bench)
    num_stale = LOOKAHEAD  # the columns of the opening; the commit of the round requested as many
    before = stale_frames()
    for _ in range(1 + num_stale):
        bench.pool.receive(link, tables_frame(1, session.base_len, [5]))
    assert stale_frames() == before + num_stale
    with pytest.raises(FrameError, match="more tables than were requested"):
        bench.pool.receive(link, tables_frame(1, session.base_len, [5]))
    bench.run_rounds()
    bench.pool.detach(link, "it broke the rules")
    bench.run()


def test_a_complete_short_table_uses_up_its_request() -> None:
    bench = Bench(circuit_breaker=False)
    _, link, session = begun(bench)
    before = link.num_due_columns
    for depth in (1, 2):
        frame = tables_frame(1, session.base_len, [5], depth=depth, length=2)
        bench.pool.receive(link, frame)
    assert link.num_due_columns == before - LOOKAHEAD
    bench.run()


def test_a_later_frame_adds_columns_to_the_table() -> None:
    bench = Bench(circuit_breaker=False)
    _, link, session = begun(bench)
    before = stale_frames()
    for depth in (1, 3, 2):
        frame = tables_frame(1, session.base_len, [5, 6], depth=depth)
        bench.pool.receive(link, frame)
    assert session.depth == 3
    assert stale_frames() == before + 1, "a table with fewer columns than before is stale"
    assert link.num_due_columns == LOOKAHEAD - 1, "those of the opening, less the stale table"
    bench.run()


def test_a_table_that_contradicts_its_earlier_columns_is_rejected() -> None:
    bench = Bench(circuit_breaker=False)
    _, link, session = begun(bench)
    bench.pool.receive(link, tables_frame(1, session.base_len, [5, 6], depth=1))
    with pytest.raises(FrameError, match="contradicts the columns sent before"):
        bench.pool.receive(link, tables_frame(1, session.base_len, [6, 5], depth=2))
    assert session.table.bonus_N.tolist() == [5, 6]
    bench.run()


@pytest.mark.parametrize("behaviour", [Behaviour.SHALLOW, Behaviour.COLUMNS])
def test_the_columns_that_have_arrived_are_proposed(behaviour: Behaviour) -> None:
    bench = Bench()
    bench.join([behaviour])
    sink = bench.submit([1, 2, 3], 40)
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 40, GREEDY)
    assert sink.statistics.late == sink.statistics.misses == 0
    assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens
    depth = 1 if behaviour is Behaviour.SHALLOW else LOOKAHEAD
    # The first round has no proposal, and the last one may need fewer tokens.
    assert sink.statistics.rounds == 1 + -(-39 // (depth + 1))


def test_a_draft_that_answers_every_round_never_exceeds_its_tables() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT, Behaviour.LATE, Behaviour.MISS, Behaviour.HIT])
    for number in range(1, 20):
        bench.submit([number, 2, 3], 30)
    bench.run()
    (link,) = bench.pool.links()
    assert link.lost_because is None
    assert link.peak_sessions <= 4


def test_a_sequence_that_is_too_long_for_a_draft_is_not_opened_there() -> None:
    bench = Bench()
    short = bench.join([Behaviour.HIT], name="short", max_len=4)
    long = bench.join(SILENT, name="long")
    bench.submit([1, 2, 3, 4, 5], 10)
    bench.run()
    assert short.openings == []
    assert long.openings == [1]
    bench.submit([1, 2], 5)
    bench.run_rounds()
    assert short.openings == [1]
    bench.run()


def test_the_time_between_two_requests_is_not_that_of_a_round() -> None:
    bench = Bench()
    for max_tokens in (3, *[1] * 16):
        bench.submit([1, 2, 3], max_tokens)
        bench.run()
        bench.clock.time += 100.0
    assert bench.pool._pace.plain_seconds < 1.0
