"""Which link gets the next session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.transport.inprocess import pair
from ssd.types import Welcome
from ssd_target.drafts.link import DraftLink
from ssd_target.drafts.router import choose_link
from ssd_target.drafts.session_registry import SessionRegistry

NOW = 10.0


def link(name: str = "draft", max_sessions: int = 4, max_len: int = 0, used: int = 0) -> DraftLink:
    welcome = Welcome(epoch=1, max_sessions=max_sessions, lookahead=3, branches=2, max_len=max_len)
    made = DraftLink(name, welcome, pair()[0], lambda _message: None)
    registry = SessionRegistry()
    for sequence_id in range(used):
        registry.add(made, sequence_id, 5, NOW)
    return made


def test_the_link_with_the_smallest_share_in_use_is_chosen() -> None:
    half, quarter = link(max_sessions=2, used=1), link(max_sessions=8, used=2)
    assert choose_link([half, quarter], (), 5, NOW) is quarter


def test_a_full_link_is_not_chosen() -> None:
    assert choose_link([link(max_sessions=2, used=2)], (), 5, NOW) is None


def test_an_excluded_link_is_not_chosen() -> None:
    first, second = link(), link(used=3)
    assert choose_link([first, second], {first}, 5, NOW) is second


@pytest.mark.parametrize(("num_tokens", "has_room"), [(4, True), (5, False)])
def test_sessions_are_shorter_than_the_maximum_length(num_tokens: int, *, has_room: bool) -> None:
    short = link(max_len=5)
    assert (choose_link([short], (), num_tokens, NOW) is short) == has_room


def test_a_link_that_is_suspended_paused_draining_or_lost_is_not_chosen() -> None:
    suspended, paused, draining, lost = link(), link(), link(), link()
    suspended.circuit_breaker.open(NOW)
    paused.no_openings_before = NOW + 0.1
    draining.is_draining = True
    lost.lost_because = "closed"
    assert choose_link([suspended, paused, draining, lost], (), 5, NOW) is None
    assert choose_link([paused], (), 5, NOW + 0.1) is paused


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=5))
def test_no_link_with_room_has_a_smaller_share_than_the_chosen_one(
    shapes: list[tuple[int, int]],
) -> None:
    links = [link(max_sessions=most, used=min(most, used)) for most, used in shapes]
    chosen = choose_link(links, (), 5, NOW)
    with_room = [each for each in links if len(each.sessions) < each.max_sessions]
    shares = [len(each.sessions) / each.max_sessions for each in with_room]
    if chosen is None:
        assert not with_room
    else:
        assert len(chosen.sessions) / chosen.max_sessions == min(shares)
