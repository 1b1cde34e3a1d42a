"""What links say, on its way from the asyncio loop to the step thread."""

import threading
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ssd.types import Commit, SessionOpening
from ssd_draft.sessions import LinkEnd


@dataclass(frozen=True, slots=True)
class Opening:
    """A target asks for a session."""

    link: LinkEnd
    opening: SessionOpening
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Commits:
    """A frame of commits came off a link."""

    link: LinkEnd
    commits: Rows[Commit]
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A sequence has ended."""

    link: LinkEnd
    session: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link is gone, and its sessions with it."""

    link: LinkEnd


Event = Opening | Commits | Closing | LinkLost


class Inbox:
    """The mailbox of the step thread. ``put`` and ``close`` from any thread, and never block.

    Its bound is ``capacity`` events: a target sends one commit frame a round and waits for tables
    between them, so only a peer that floods us reaches it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: list[Event] = []
        self._filled = threading.Condition()
        self._is_closed = False

    def put(self, event: Event) -> bool:
        """Queue an event; False if it was not taken because ``capacity`` events wait already.

        The end of a link is always taken.
        """
        with self._filled:
            if len(self._events) >= self._capacity and not isinstance(event, LinkLost):
                return False
            self._events.append(event)
            self._filled.notify()
            return True

    def close(self) -> None:
        """Let the step thread end."""
        with self._filled:
            self._is_closed = True
            self._filled.notify()

    @property
    def is_closed(self) -> bool:
        """Whether the step thread is to end."""
        return self._is_closed

    def drain(self) -> list[Event]:
        """Everything that came since the last call, in order. Step thread only."""
        with self._filled:
            events, self._events = self._events, []
        return events

    def wait(self) -> None:
        """Sleep until something comes or the inbox is closed. Step thread only."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._events) or self._is_closed)
