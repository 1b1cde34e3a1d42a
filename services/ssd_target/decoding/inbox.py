"""The queue of arrivals and cancellations from the asyncio loop to the step thread."""

import threading

from ssd.errors import NotReadyError
from ssd.types import SequenceId
from ssd_target.decoding.scheduler import Event
from ssd_target.decoding.sequence import Sequence


class Inbox:
    """The input queue of the step thread. ``submit``, ``cancel`` and ``close`` from any thread.

    ``RequestHandler`` bounds the arrivals.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.num_arrivals = 0
        """Sequences that the step thread has not taken yet."""
        self.num_waiting = 0
        """Sequences that wait for a slot. The step thread updates it."""
        self.num_new = 0
        """Those of them that have not run yet. The step thread updates it."""
        self._filled = threading.Condition()
        self.is_closed = False
        """Whether no more requests are accepted."""

    def submit(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            NotReadyError: the inbox is closed.
        """
        with self._filled:
            if self.is_closed:
                raise NotReadyError("the target has stopped and accepts no requests")
            self.num_arrivals += 1
            self._events.append(sequence)
            self._filled.notify()

    def cancel(self, sequence_id: SequenceId) -> None:
        """End a sequence. A sequence that has ended is ignored."""
        with self._filled:
            self._events.append(sequence_id)
            self._filled.notify()

    def close(self) -> None:
        """Refuse requests from now on and wake the step thread."""
        with self._filled:
            self.is_closed = True
            self._filled.notify()

    def drain(self) -> list[Event]:
        """Return all events since the last call, in order. Step thread only."""
        if not self._events:
            return []
        with self._filled:
            events, self._events = self._events, []
            self.num_arrivals = 0
        return events

    def wait(self, seconds: float) -> None:
        """Wait for an event or ``close``, at most ``seconds``. Step thread only."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._events) or self.is_closed, seconds)
