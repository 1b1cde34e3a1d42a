"""What a link measures from the tables that it receives."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.ssd.pool import links
from tests.unit.ssd.pool.links import LOOKAHEAD, sequence

from ssd.pool.link import DraftLink, Session
from ssd.pool.rounds import Lookup
from ssd.pool.table_deadline import opening_seconds
from ssd.speculation.sources import Candidates
from ssd.speculation.table import OutcomeTable
from ssd.types import LookupResult

ONE_COLUMN = Lookup(LookupResult.HIT, (3,), num_from_table=1)


def opened(num_sessions: int) -> tuple[DraftLink, list[Session]]:
    """Sessions whose first tables, of base length 5, have arrived."""
    link = links.link()
    sessions = [link.add_session(sequence(), 0.0) for _ in range(num_sessions)]
    for _ in sessions:
        link.request_table()
    link.receive([table(each, 5) for each in sessions], 1.0)
    return link, sessions


def table(
    session: Session, base_len: int, depth: int = LOOKAHEAD, length: int = LOOKAHEAD
) -> OutcomeTable:
    one = np.zeros(1, dtype=np.int32)
    tokens_NK = np.full((1, LOOKAHEAD), -1, dtype=np.int32)
    tokens_NK[:, :depth] = 3
    return OutcomeTable(session.number, base_len, one, one, tokens_NK, length)


def commit(session: Session, base_len: int, at: float, *, is_branch: bool = False) -> None:
    session.begin_round(base_len, at, is_branch=is_branch)


def first_seconds(link: DraftLink, *, is_branch: bool = False) -> float:
    return link.column_times.first[is_branch].seconds


def test_the_first_table_of_a_session_measures_no_commit() -> None:
    link, _ = opened(1)
    assert first_seconds(link) == 0.0


def test_a_table_that_arrives_after_its_round_is_measured() -> None:
    link, (session,) = opened(1)
    commit(session, 6, 2.0)
    commit(session, 7, 2.1)
    link.receive([table(session, 6)], 2.25)
    assert first_seconds(link) == pytest.approx(0.25)
    # The draft could begin with this one when it had sent the other one.
    link.receive([table(session, 7)], 2.35)
    assert 0.1 < first_seconds(link) < 0.25
    assert session.table is not None


def test_commits_that_continue_a_branch_have_their_own_times() -> None:
    link, (session,) = opened(1)
    commit(session, 6, 2.0)
    link.receive([table(session, 6)], 2.2)
    commit(session, 9, 3.0, is_branch=True)
    link.receive([table(session, 9)], 3.1)
    assert first_seconds(link) == pytest.approx(0.2)
    assert first_seconds(link, is_branch=True) == pytest.approx(0.1)


@pytest.mark.parametrize(("length", "num_columns"), [(LOOKAHEAD, 1), (1, 0)])
def test_no_round_waits_for_columns_that_a_table_will_not_have(
    length: int, num_columns: int
) -> None:
    link, (session,) = opened(1)
    commit(session, 6, 2.0)
    link.receive([table(session, 6, 1, length)], 2.25)
    assert session.prospect(ONE_COLUMN, LOOKAHEAD).num_columns == num_columns
    expected = 0.25 * length
    assert session.table_seconds(9.0) == pytest.approx(expected), "of all its columns"
    before = link.column_times.seconds
    session.add_late(9.0)
    assert (link.column_times.seconds > before) == bool(num_columns)


@pytest.mark.parametrize("repeats", [False, True])
def test_a_round_knows_whether_the_text_of_a_session_repeats_itself(*, repeats: bool) -> None:
    link, (session,) = opened(1)
    candidates = Candidates((), (1, 2), repeats=repeats)
    hit = replace(ONE_COLUMN, candidates=candidates)
    late = Lookup(LookupResult.LATE, (1, 2), candidates=candidates)
    assert session.prospect(late, LOOKAHEAD).repeats == repeats
    commit(session, 6, 2.0)
    assert session.prospect(late, LOOKAHEAD).repeats == repeats
    link.receive([table(session, 6, 1)], 2.25)
    assert session.prospect(hit, LOOKAHEAD).repeats == repeats


def test_a_frame_counts_once_however_many_sessions_it_has() -> None:
    alone, together = opened(1), opened(8)
    for link, sessions in (alone, together):
        for at, seconds in ((2.0, 0.1), (3.0, 0.5)):
            for session in sessions:
                commit(session, session.base_len + 1, at)
            link.receive([table(each, each.base_len) for each in sessions], at + seconds)
    assert first_seconds(alone[0]) == first_seconds(together[0])


def test_a_draft_begins_with_a_commit_after_the_table_before() -> None:
    link, (session,) = opened(1)
    commit(session, 6, 2.0)
    link.receive([table(session, 6)], 2.3)
    commit(session, 7, 3.0)
    assert session.prospect(Lookup(), LOOKAHEAD).next_at == pytest.approx(3.3)
    commit(session, 8, 3.1)
    assert session.prospect(Lookup(), LOOKAHEAD).next_at == pytest.approx(3.6)


def test_a_column_that_does_not_arrive_is_expected_later_next_time() -> None:
    link, (session,) = opened(1)
    commit(session, 6, 2.0)
    link.receive([table(session, 6, depth=1)], 2.1)
    assert session.prospect(ONE_COLUMN, LOOKAHEAD).next_at == pytest.approx(2.2)
    link.add_round([session], 2.6)
    assert session.prospect(ONE_COLUMN, LOOKAHEAD).next_at == pytest.approx(2.6)


def test_an_opening_has_time_for_the_prompts_before_it() -> None:
    link = links.link()
    first, second = link.add_session(sequence(100), 7.0), link.add_session(sequence(50), 7.0)
    assert first.open_by == 7.0 + opening_seconds(100)
    assert second.open_by == 7.0 + opening_seconds(150)
    first.is_open = True
    assert link.add_session(sequence(10), 7.0).open_by == 7.0 + opening_seconds(60)


def test_a_session_that_moves_has_another_number_and_ends_no_later_one() -> None:
    link, moving = links.link(), sequence()
    old = link.add_session(moving, 0.0)
    old.remove()
    assert (link.sessions, moving.session) == ({}, None)
    new = link.add_session(moving, 0.0)
    old.remove()
    assert (moving.session, link.sessions) == (new, {new.number: new})
    assert new.number != old.number
