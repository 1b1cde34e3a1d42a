"""The store through which the two ends of a communicator find each other.

*Decision*: entries travel as control messages of the link. *Because*: the stream of the link
connects the two processes and ends with them; an entry can reach no communicator of another link or
epoch. *Not chosen*: c10d's ``TCPStore``, which opens one more port for each target, on all
addresses. *Revisit when* a backend needs more than a few entries.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from ssd.errors import FrameError, LinkError

MAX_ENTRIES = 64
"""Maximum number of entries of a peer. gloo needs one for each rank, NCCL two in total, and the
measurement of the stream nine."""


class LinkStore(Store):
    """A c10d store of two processes. Any thread.

    Each process has a copy. ``set`` sends an entry to the peer, which adds it with ``put``.
    """

    def __init__(self, send: Callable[[str, bytes], None], seconds: float) -> None:
        """Construct an empty store.

        Args:
            send: sends an entry to the peer.
            seconds: maximum time that ``get`` waits for an entry.
        """
        super().__init__()
        self._send = send
        self._seconds = seconds
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed_because = ""
        self._abort: Callable[[], None] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        """Add an entry here and at the peer."""
        entry = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, entry)
        self._send(key, entry)

    def put(self, key: str, value: bytes) -> None:
        """Add an entry of the peer.

        Raises:
            FrameError: there are too many entries.
        """
        with self._changed:
            if len(self._entries) >= 2 * MAX_ENTRIES:
                raise FrameError(f"a rendezvous has more than {MAX_ENTRIES} entries for each end")
            self._entries[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return an entry; wait until it is there.

        Raises:
            LinkError: it did not arrive in time, or the store is closed.
        """
        with self._changed:
            self._wait(lambda: key in self._entries, self._seconds)
            if key not in self._entries:
                raise LinkError(f"no rendezvous entry {key!r} within {self._seconds:g} s")
            return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all entries are there; see ``get``, whose time limit holds."""
        del timeout
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all entries are there."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def pause(self, seconds: float) -> None:
        """Wait. Raises a ``LinkError`` if the store is closed."""
        with self._changed:
            self._wait(lambda: False, seconds)

    def aborts(self, abort: Callable[[], None]) -> None:
        """Call ``abort`` when the store is closed. Raises a ``LinkError`` if it is closed."""
        with self._changed:
            self._abort = abort
            self._wait(lambda: True, 0.0)

    def close(self, reason: str) -> None:
        """End all calls of the store and the communicator with an error. Idempotent; any thread."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()
            abort, self._abort = self._abort, None
        if abort is not None:
            abort()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        self._changed.wait_for(lambda: condition() or bool(self._closed_because), seconds)
        if self._closed_because:
            raise LinkError(self._closed_because)
