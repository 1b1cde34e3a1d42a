"""The bounds of the step thread's inbox, and the time since it was read."""

from dataclasses import dataclass

import pytest

from ssd.testing.clock import FakeClock
from ssd.types import Commit, OpenSession, Outcome
from ssd_draft.inbox import (
    EVENT_BYTES,
    EVENTS_PER_STEP,
    ID_BYTES,
    Closing,
    Commits,
    Event,
    Inbox,
    LinkLost,
    LinkUp,
    Opening,
    enough_bytes,
)
from ssd_draft.sessions import LinkEnd


@dataclass(frozen=True)
class NoLink:
    """A link of which only the number is used."""

    number: int


LINK: LinkEnd = NoLink(1)  # type: ignore[assignment]
OTHER: LinkEnd = NoLink(2)  # type: ignore[assignment]


def opening(num_tokens: int) -> Opening:
    message = OpenSession(session=1, token_ids=(1,) * num_tokens, seed=1, temperature=0, max_len=9)
    return Opening(LINK, message, 0.0)


def test_events_are_bounded_by_number() -> None:
    inbox = Inbox(2, 1 << 20, FakeClock())
    assert inbox.put(Closing(LINK, 1))
    assert inbox.put(Closing(LINK, 2))
    assert not inbox.put(Closing(LINK, 3))
    assert [event.session for event in inbox.drain() if isinstance(event, Closing)] == [1, 2]
    assert inbox.put(Closing(LINK, 3))


@pytest.mark.parametrize(
    "event",
    [
        opening(100),
        Commits(LINK, [Commit(1, 5, Outcome(0, 1))] * (100 * ID_BYTES // EVENT_BYTES), 0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_are_bounded_by_their_size(event: Event) -> None:
    inbox = Inbox(1000, 2 * (EVENT_BYTES + 100 * ID_BYTES), FakeClock())
    assert inbox.put(event)
    assert inbox.put(event)
    assert not inbox.put(event)
    inbox.drain()
    assert inbox.put(event)


def test_the_start_and_end_of_a_link_are_always_queued() -> None:
    inbox = Inbox(1, 1, FakeClock())
    assert not inbox.put(opening(1))
    assert inbox.put(LinkUp(LINK))
    assert inbox.put(LinkLost(LINK))


def test_correct_targets_reach_no_bound() -> None:
    inbox = Inbox(100, enough_bytes(4, 1000, 100), FakeClock())
    assert all(inbox.put(opening(1000)) for _ in range(8))
    assert all(inbox.put(Closing(LINK, number)) for number in range(92))


def test_the_inbox_reports_how_long_the_step_thread_has_not_read_it() -> None:
    clock = FakeClock()
    inbox = Inbox(10, 1 << 20, clock)
    clock.advance(100.0)
    assert inbox.waiting_seconds(clock.now()) == 0.0, "nothing waits in an empty inbox"
    inbox.put(Closing(LINK, 1))
    clock.advance(2.0)
    inbox.put(Closing(LINK, 2))
    clock.advance(1.0)
    assert inbox.waiting_seconds(clock.now()) == 3.0
    inbox.drain()
    assert inbox.waiting_seconds(clock.now()) == 0.0


def test_a_link_with_too_many_events_does_not_delay_others() -> None:
    inbox = Inbox(1000, 1 << 20, FakeClock())
    while inbox.put(Closing(LINK, 1)):
        pass
    assert inbox.put(Closing(OTHER, 2))
    events = inbox.drain()
    assert [event.link for event in events] == [LINK] * EVENTS_PER_STEP + [OTHER]
    inbox.wait()  # what is left wakes the step thread
    assert len(inbox.drain()) == EVENTS_PER_STEP


def test_events_of_a_lost_link_are_dropped() -> None:
    inbox = Inbox(1000, 1 << 20, FakeClock())
    for number in range(900):
        inbox.put(Closing(LINK, number))
    inbox.put(LinkLost(LINK))
    assert inbox.drain() == [LinkLost(LINK)]
    assert inbox.drain() == []


def test_a_step_thread_that_reads_some_events_is_not_stuck() -> None:
    clock = FakeClock()
    inbox = Inbox(1000, 1 << 20, clock)
    for number in range(2 * EVENTS_PER_STEP):
        inbox.put(Closing(LINK, number))
    clock.advance(5.0)
    inbox.drain()
    clock.advance(1.0)
    assert inbox.waiting_seconds(clock.now()) == 1.0
