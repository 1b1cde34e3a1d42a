"""Arrivals and cancellations on their way from the asyncio loop to the step thread."""

import threading
from collections.abc import Callable

from ssd.errors import NotReadyError
from ssd_target.decoding.scheduler import Cancel, Event, queue_full
from ssd_target.decoding.sequence import Arrival


class Inbox:
    """A bounded mailbox of the step thread. ``submit``, ``cancel`` and ``close`` from any thread.

    It holds at most ``capacity`` arrivals; cancellations are always taken, one an arrival at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: list[Event] = []
        self._num_arrivals = 0
        self.num_waiting = 0
        """Requests that wait for a slot, as the step thread last noted."""
        self._filled = threading.Condition()
        self._is_closed = False

    @property
    def num_arrivals(self) -> int:
        """Requests that the step thread has not seen."""
        return self._num_arrivals

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will come."""
        return self._is_closed

    def submit(self, arrival: Arrival) -> None:
        """Queue a request.

        Raises:
            OverloadedError: ``capacity`` requests wait to be seen by the step thread.
            NotReadyError: the step thread is leaving.
        """
        with self._filled:
            if self._is_closed:
                raise NotReadyError("the target is shutting down; ask another one")
            if self._num_arrivals >= self._capacity:
                raise queue_full(self._capacity)
            self._num_arrivals += 1
            self._events.append(arrival)
            self._filled.notify()

    def cancel(self, sequence_id: int) -> None:
        """End a sequence; one that has ended is ignored."""
        with self._filled:
            self._events.append(Cancel(sequence_id))
            self._filled.notify()

    def close(self) -> None:
        """Take no more requests and wake the step thread."""
        with self._filled:
            self._is_closed = True
            self._filled.notify()

    def drain(self) -> list[Event]:
        """Everything that came since the last call, in order. Step thread only."""
        with self._filled:
            events, self._events = self._events, []
            self._num_arrivals = 0
        return events

    def wait(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Sleep until something comes, at most ``seconds``. Step thread only."""
        with self._filled:
            self._filled.wait_for(
                lambda: bool(self._events) or self._is_closed or is_urgent(), seconds
            )
