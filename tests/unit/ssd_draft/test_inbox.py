"""What the mailbox of the step thread takes, and what it tells of the one who empties it."""

import pytest

from ssd.testing.clock import FakeClock
from ssd.types import Commit, Explicit, Outcome, SessionOpening
from ssd_draft.inbox import (
    EVENT_BYTES,
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


class NoLink:
    """Only its identity counts."""


LINK: LinkEnd = NoLink()  # type: ignore[assignment]


def opening(num_tokens: int) -> Opening:
    asked = SessionOpening(session=1, token_ids=(1,) * num_tokens, seed=1, temperature=0, max_len=9)
    return Opening(LINK, asked, 0.0)


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
        Commits(
            LINK, [Commit(1, 5, Outcome(0, 1), Explicit())] * (100 * ID_BYTES // EVENT_BYTES), 0
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_are_bounded_by_what_they_hold(event: Event) -> None:
    inbox = Inbox(1000, 2 * (EVENT_BYTES + 100 * ID_BYTES), FakeClock())
    assert inbox.put(event)
    assert inbox.put(event)
    assert not inbox.put(event)
    inbox.drain()
    assert inbox.put(event)


def test_that_a_link_comes_or_goes_is_always_taken() -> None:
    inbox = Inbox(1, 1, FakeClock())
    assert not inbox.put(opening(1))
    assert inbox.put(LinkUp(LINK))
    assert inbox.put(LinkLost(LINK))


def test_honest_targets_reach_no_bound() -> None:
    inbox = Inbox(100, enough_bytes(4, 1000, 100), FakeClock())
    assert all(inbox.put(opening(1000)) for _ in range(8))
    assert all(inbox.put(Closing(LINK, number)) for number in range(92))


def test_what_lies_here_tells_how_long_the_step_thread_has_not_come() -> None:
    clock = FakeClock()
    inbox = Inbox(10, 1 << 20, clock)
    clock.advance(100.0)
    assert inbox.waiting_seconds(clock.now()) == 0.0, "an empty inbox waits for nobody"
    inbox.put(Closing(LINK, 1))
    clock.advance(2.0)
    inbox.put(Closing(LINK, 2))
    clock.advance(1.0)
    assert inbox.waiting_seconds(clock.now()) == 3.0
    inbox.drain()
    assert inbox.waiting_seconds(clock.now()) == 0.0
