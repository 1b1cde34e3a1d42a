"""What links say, on its way from the asyncio loop to the step thread."""

import threading
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from ssd.ports import Clock
from ssd.types import Commit, SessionOpening
from ssd_draft.sessions import LinkEnd

EVENT_BYTES = 512
"""Of an event without the ids of an opening; a frame of commits holds that much for each."""
ID_BYTES = 36
"""Of one token id of an opening: an int and the reference to it."""
EVENTS_PER_STEP = 64
"""Events of one link that a step takes. A round of a target is one; opening a session takes the
step thread a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link has shaken hands."""

    link: LinkEnd


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


Event = LinkUp | Opening | Commits | Closing | LinkLost


@dataclass(slots=True)
class _Queue:
    """What one link has sent."""

    events: deque[Event] = field(default_factory=deque)
    num_bytes: int = 0


class Inbox:
    """The mailbox of the step thread. ``put`` and ``close`` from any thread, and never block.

    Each link has a queue of its own, of ``capacity`` events of ``max_bytes`` together at most, and
    a step takes a few events of each: a target that floods its draft fills no other's queue and
    delays no other's events. A target sends one commit frame a round and waits for tables between
    them, so only a peer that floods us reaches either bound.
    """

    def __init__(self, capacity: int, max_bytes: int, clock: Clock) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._clock = clock
        self._queues: dict[int, _Queue] = {}
        """By number of the link; those that hold something."""
        self._waiting_since: float | None = None
        self._filled = threading.Condition()
        self._is_closed = False

    def put(self, event: Event) -> bool:
        """Queue an event; False if it was not taken because its link is over the bounds.

        That a link comes or goes is always taken. What a lost link sent before counts no more.
        """
        num_bytes = size_of(event)
        with self._filled:
            queue = self._queues.get(event.link.number) or _Queue()
            if isinstance(event, LinkLost):
                queue = _Queue()
            is_full = (
                len(queue.events) >= self._capacity or queue.num_bytes + num_bytes > self._max_bytes
            )
            if is_full and not isinstance(event, LinkUp | LinkLost):
                return False
            if self._waiting_since is None:
                self._waiting_since = self._clock.now()
            queue.events.append(event)
            queue.num_bytes += num_bytes
            self._queues[event.link.number] = queue
            self._filled.notify()
            return True

    def waiting_seconds(self, now: float) -> float:
        """How long the step thread has not come for what is here; 0 if nothing is. Any thread.

        Every step begins with ``drain``: this is the step thread's heartbeat.
        """
        since = self._waiting_since
        return 0.0 if since is None else now - since

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
        """The next events of each link, ``EVENTS_PER_STEP`` at most, in order. Step thread only."""
        events: list[Event] = []
        with self._filled:
            for number, queue in list(self._queues.items()):
                for _ in range(min(EVENTS_PER_STEP, len(queue.events))):
                    events.append(queue.events.popleft())
                    queue.num_bytes -= size_of(events[-1])
                if not queue.events:
                    del self._queues[number]
            self._waiting_since = self._clock.now() if self._queues else None
        return events

    def wait(self) -> None:
        """Sleep until something comes or the inbox is closed. Step thread only."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._queues) or self._is_closed)


def size_of(event: Event) -> int:
    """Bytes that an event holds, roughly."""
    match event:
        case Opening():
            return EVENT_BYTES + ID_BYTES * len(event.opening.token_ids)
        case Commits():
            return EVENT_BYTES * (1 + len(event.commits))
    return EVENT_BYTES


def enough_bytes(max_sessions: int, max_len: int, capacity: int) -> int:
    """A bound that no honest target reaches: all sessions opened twice, and the rest."""
    return 2 * max_sessions * max_len * ID_BYTES + 2 * capacity * EVENT_BYTES
