"""The bounds of the step thread's inbox."""

from dataclasses import dataclass

import pytest

from ssd.types import CloseSession, Commit, OpenSession, Outcome
from ssd_draft.inbox import (
    EVENT_BYTES,
    EVENTS_PER_STEP,
    ID_BYTES,
    Event,
    Inbox,
    LinkChange,
    enough_bytes,
)
from ssd_draft.sessions import LinkEnd


@dataclass(frozen=True)
class NoLink:
    """A link of which only the number is used."""

    number: int


LINK: LinkEnd = NoLink(1)  # type: ignore[assignment]
OTHER: LinkEnd = NoLink(2)  # type: ignore[assignment]


def opening(num_tokens: int) -> Event:
    message = OpenSession(session=1, token_ids=(1,) * num_tokens, seed=1, temperature=0, max_len=9)
    return Event(LINK, message)


def closing(session: int, link: LinkEnd = LINK) -> Event:
    return Event(link, CloseSession(session))


def test_events_are_bounded_by_number() -> None:
    inbox = Inbox(2, 1 << 20)
    assert inbox.put(closing(1))
    assert inbox.put(closing(2))
    assert not inbox.put(closing(3))
    assert inbox.drain() == [closing(1), closing(2)]
    assert inbox.put(closing(3))


@pytest.mark.parametrize(
    "event",
    [
        opening(100),
        Event(LINK, [Commit(1, 5, Outcome(0, 1))] * (100 * ID_BYTES // EVENT_BYTES)),
    ],
    ids=["opening", "commits"],
)
def test_events_are_bounded_by_their_size(event: Event) -> None:
    inbox = Inbox(1000, 2 * (EVENT_BYTES + 100 * ID_BYTES))
    assert inbox.put(event)
    assert inbox.put(event)
    assert not inbox.put(event)
    inbox.drain()
    assert inbox.put(event)


def test_the_start_and_end_of_a_link_are_always_queued() -> None:
    inbox = Inbox(1, 1)
    assert not inbox.put(opening(1))
    assert inbox.put(Event(LINK, LinkChange.UP))
    assert inbox.put(Event(LINK, LinkChange.LOST))


def test_correct_targets_reach_no_bound() -> None:
    inbox = Inbox(100, enough_bytes(4, 1000, 100))
    assert all(inbox.put(opening(1000)) for _ in range(8))
    assert all(inbox.put(closing(number)) for number in range(92))


def test_a_link_with_too_many_events_does_not_delay_others() -> None:
    inbox = Inbox(1000, 1 << 20)
    while inbox.put(closing(1)):
        pass
    assert inbox.put(closing(2, OTHER))
    events = inbox.drain()
    assert [event.link for event in events] == [LINK] * EVENTS_PER_STEP + [OTHER]
    inbox.wait()  # what is left wakes the step thread
    assert len(inbox.drain()) == EVENTS_PER_STEP


def test_events_of_a_lost_link_are_dropped() -> None:
    inbox = Inbox(1000, 1 << 20)
    for number in range(900):
        inbox.put(closing(number))
    inbox.put(Event(LINK, LinkChange.LOST))
    assert inbox.drain() == [Event(LINK, LinkChange.LOST)]
    assert inbox.drain() == []
