"""Events of links on their way from the asyncio loop to the step thread."""

import threading
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from enum import Enum

from ssd.types import CloseSession, Commit, OpenSession
from ssd_draft.sessions import LinkEnd

EVENT_BYTES = 512
"""Size of an event without the ids of an opening, and of each commit of a frame."""
ID_BYTES = 36
"""Size of one token id of an opening: an int and the reference to it."""
EVENTS_PER_STEP = 64
"""Largest number of events of one link that a step reads. A round of a target is one event; opening
a session takes the step thread a tenth of a millisecond, and 3 ms if it has 32,000 tokens."""


class LinkChange(Enum):
    """Start or end of a link."""

    UP = "up"
    """The handshake is complete."""
    LOST = "lost"
    """The link has ended, and its sessions with it."""


@dataclass(frozen=True, slots=True)
class Event:
    """What has arrived on a link: a message, the commits of a frame, or a change of the link."""

    link: LinkEnd
    content: OpenSession | CloseSession | Rows[Commit] | LinkChange
    arrived_at: float = 0.0
    """Arrival time of an opening or of commits; 0 for other events."""


@dataclass(slots=True)
class _Queue:
    """Events of one link."""

    events: deque[Event] = field(default_factory=deque)
    num_bytes: int = 0


class Inbox:
    """The inbox of the step thread. Any thread may call ``put`` and ``close``, which do not wait.

    Each link has its own queue of at most ``capacity`` events and ``max_bytes``. A step reads a few
    events of each queue, so a target that sends too much neither fills the queue of another one nor
    delays it. A target sends one frame of commits per round and waits for tables in between, so a
    correct target reaches neither bound.
    """

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._queues: dict[int, _Queue] = {}
        """Queues that are not empty, by number of the link."""
        self._filled = threading.Condition()
        self._is_closed = False

    def put(self, event: Event) -> bool:
        """Queue an event; returns False if its link is over a bound and the event is dropped.

        The start and the end of a link are always queued. The end replaces all events of its link.
        """
        num_bytes = size_of(event)
        with self._filled:
            queue = self._queues.get(event.link.number) or _Queue()
            if event.content is LinkChange.LOST:
                queue = _Queue()
            is_full = (
                len(queue.events) >= self._capacity or queue.num_bytes + num_bytes > self._max_bytes
            )
            if is_full and not isinstance(event.content, LinkChange):
                return False
            queue.events.append(event)
            queue.num_bytes += num_bytes
            self._queues[event.link.number] = queue
            self._filled.notify()
            return True

    def close(self) -> None:
        """End the step thread."""
        with self._filled:
            self._is_closed = True
            self._filled.notify()

    @property
    def is_closed(self) -> bool:
        """Whether the step thread ends."""
        return self._is_closed

    def drain(self) -> list[Event]:
        """Return up to ``EVENTS_PER_STEP`` events of each link, in order. Step thread only."""
        events: list[Event] = []
        with self._filled:
            for number, queue in list(self._queues.items()):
                for _ in range(min(EVENTS_PER_STEP, len(queue.events))):
                    events.append(queue.events.popleft())
                    queue.num_bytes -= size_of(events[-1])
                if not queue.events:
                    del self._queues[number]
        return events

    def wait(self, seconds: float | None = None) -> None:
        """Wait for an event, until the inbox is closed or for a time. Step thread only."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._queues) or self._is_closed, seconds)


def size_of(event: Event) -> int:
    """Return the approximate size of an event in bytes."""
    match event.content:
        case OpenSession(token_ids=token_ids):
            return EVENT_BYTES + ID_BYTES * len(token_ids)
        case CloseSession() | LinkChange():
            return EVENT_BYTES
        case commits:
            return EVENT_BYTES * (1 + len(commits))


def enough_bytes(max_sessions: int, max_len: int, capacity: int) -> int:
    """Return a bound that no correct target reaches: all sessions opened twice, other events."""
    return 2 * max_sessions * max_len * ID_BYTES + 2 * capacity * EVENT_BYTES
