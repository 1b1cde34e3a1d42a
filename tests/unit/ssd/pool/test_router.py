"""Which link gets the next session."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd.pool import links as bench
from tests.unit.ssd.pool.links import sequence

from ssd.pool.link import DraftLink, Session
from ssd.pool.router import MIN_REMAINING_TOKENS, choose_link, session_to_move
from ssd.speculation.table import OutcomeTable

NOW = 10.0


def link(max_sessions: int = 4, max_len: int = 0, used: int = 0) -> DraftLink:
    made = bench.link(max_sessions=max_sessions, max_len=max_len)
    for _ in range(used):
        made.add_session(sequence(), NOW)
    return made


def opens(made: DraftLink, session: Session) -> None:
    nothing = np.zeros((0,), dtype=np.int32)
    tokens = np.zeros((0, 3), dtype=np.int32)
    made.receive([OutcomeTable(session.number, session.base_len, nothing, nothing, tokens, 3)], NOW)


def test_after_a_refusal_sessions_open_one_by_one_then_more_at_a_time() -> None:
    made = link(max_sessions=8)
    made.pause_openings(NOW)
    later = NOW + 1.0
    (first,) = open_all(made, later)
    opens(made, first)
    second, third = open_all(made, later)
    opens(made, second)
    opens(made, third)
    assert len(open_all(made, later)) == 4


def open_all(made: DraftLink, now: float) -> list[Session]:
    """Open as many sessions as the link has room for."""
    opened = []
    while choose_link([made], new := sequence(), now):
        opened.append(made.add_session(new, now))
    return opened


def test_an_excluded_link_is_not_chosen() -> None:
    first, second = link(), link(used=3)
    chosen = sequence()
    chosen.excluded_links.add(first)
    assert choose_link([first, second], chosen, NOW) is second


@pytest.mark.parametrize(("num_tokens", "has_room"), [(4, True), (5, False)])
def test_sessions_are_shorter_than_the_maximum_length(num_tokens: int, *, has_room: bool) -> None:
    short = link(max_len=5)
    assert (choose_link([short], sequence(num_tokens), NOW) is short) == has_room


def test_a_link_that_is_suspended_paused_draining_or_lost_is_not_chosen() -> None:
    suspended, paused, draining, lost = link(), link(), link(), link()
    suspended.circuit_breaker.open(NOW)
    paused.no_openings_before = NOW + 0.1
    draining.is_draining = True
    lost.lost_because = "closed"
    assert choose_link([suspended, paused, draining, lost], sequence(), NOW) is None
    assert choose_link([paused], sequence(), NOW + 0.1) is paused


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=5))
def test_the_link_with_room_and_the_smallest_share_in_use_is_chosen(
    shapes: list[tuple[int, int]],
) -> None:
    links = [link(max_sessions=most, used=min(most, used)) for most, used in shapes]
    chosen = choose_link(links, sequence(), NOW)
    with_room = [each for each in links if len(each.sessions) < each.max_sessions]
    shares = [len(each.sessions) / each.max_sessions for each in with_room]
    if chosen is None:
        assert not with_room
    else:
        assert len(chosen.sessions) / chosen.max_sessions == min(shares)


def add(to: DraftLink, base_len: int = 100, remaining: int = 100, *, is_open: bool = True) -> None:
    to.add_session(sequence(base_len, remaining), NOW).is_open = is_open


def with_sessions(
    count: int, max_sessions: int = 16, base_len: int = 100, remaining: int = 100
) -> DraftLink:
    made = link(max_sessions=max_sessions)
    for _ in range(count):
        add(made, base_len, remaining)
    return made


def moved(links: Iterable[DraftLink], sustainable: int = 0) -> Session | None:
    return session_to_move(links, lambda _: sustainable, NOW)


@pytest.mark.parametrize(("many", "few", "is_moved"), [(2, 0, True), (5, 3, True), (4, 3, False)])
def test_a_session_moves_if_the_numbers_differ_by_two(
    many: int, few: int, *, is_moved: bool
) -> None:
    source, other = with_sessions(many), with_sessions(few)
    session = moved([source, other])
    assert (session is not None) is is_moved
    assert session is None or session.link is source


def test_no_session_moves_from_a_draft_that_completes_its_tables() -> None:
    links = [with_sessions(8), with_sessions(0)]
    assert moved(links, sustainable=8) is None
    assert moved(links, sustainable=7) is not None


@pytest.mark.parametrize(
    ("base_len", "remaining", "is_moved"),
    [
        (10, MIN_REMAINING_TOKENS, True),
        (10, MIN_REMAINING_TOKENS - 1, False),
        (4000, 1000, True),
        (4000, 999, False),
    ],
)
def test_a_sequence_that_soon_ends_does_not_move(
    base_len: int, remaining: int, *, is_moved: bool
) -> None:
    source = with_sessions(4, base_len=base_len, remaining=remaining)
    assert (moved([source, with_sessions(0)]) is not None) is is_moved


def test_the_sequence_with_most_tokens_to_go_moves() -> None:
    source = with_sessions(3)
    add(source, remaining=500)
    session = moved([source, with_sessions(0)])
    assert session is not None
    assert session.sequence.num_remaining == 500


def test_sessions_move_one_at_a_time() -> None:
    source, other = with_sessions(8), with_sessions(1)
    add(other, is_open=False)
    assert moved([source, other]) is None


def test_no_session_moves_to_a_link_that_would_not_get_it() -> None:
    source, other = with_sessions(8), with_sessions(0)
    sequences = [each.sequence for each in source.sessions.values()]
    for each in sequences:
        each.excluded_links.add(other)
    assert moved([source, other]) is None
    sequences[0].excluded_links.clear()
    other.no_moves_before = NOW + 1
    assert moved([source, other]) is None
    other.no_moves_before = NOW
    session = moved([source, other])
    assert session is not None
    assert session.sequence is sequences[0]
    assert moved([source, link(max_len=100)]) is None


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=2, max_size=4))
def test_moves_end_and_leave_no_link_with_two_more_sessions(shapes: list[tuple[int, int]]) -> None:
    links = [with_sessions(min(most, used), most) for most, used in shapes]
    num_moves = 0
    while (session := moved(links)) is not None:
        session.remove()
        chosen = choose_link(links, session.sequence, NOW)
        assert chosen is not None
        assert chosen is not session.link
        add(chosen)
        num_moves += 1
    assert num_moves <= sum(used for _, used in shapes)
    for one, other in itertools.permutations(links, 2):
        if one.max_sessions == other.max_sessions:
            assert len(one.sessions) < len(other.sessions) + 2
