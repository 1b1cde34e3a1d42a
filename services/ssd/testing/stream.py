"""Two ends of a byte stream in memory, delivered inside ``send``."""

from collections.abc import Callable

from ssd.errors import LinkError


class MemoryStream:
    """Implements ``ports.ByteStream``; make two with ``memory_streams``. One thread."""

    def __init__(self, capacity: int) -> None:
        self.sent: list[bytes] = []
        """All that was sent from this end."""
        self._capacity = capacity
        self._peer: MemoryStream | None = None
        self._waiting: list[bytes] = []
        self._on_payload: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._end: Exception | None = None

    def start(
        self, on_payload: Callable[[bytes], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``ByteStream``; what came earlier is delivered now."""
        self._on_payload, self._on_lost = on_payload, on_lost
        waiting, self._waiting = self._waiting, []
        for payload in waiting:
            on_payload(payload)
        if self._end is not None:
            self._tell(self._end)

    def send(self, payload: bytes) -> None:
        """See ``ByteStream``; a peer that has not started holds ``capacity`` payloads."""
        peer = self._peer
        if self._end is not None or peer is None:
            raise LinkError(f"the stream is closed: {self._end}")
        if peer._on_payload is None and len(peer._waiting) >= self._capacity:  # noqa: SLF001
            raise LinkError(f"{self._capacity} payloads wait to be sent")
        self.sent.append(payload)
        peer._take(payload)  # noqa: SLF001

    def close(self) -> None:
        """See ``ByteStream``."""
        self._on_lost = None
        peer = self._peer
        self._end = self._end or LinkError("closed by this end")
        if peer is not None:
            peer.lose(LinkError("the peer closed the stream"))

    def lose(self, error: Exception) -> None:
        """Lose this end, as when the peer dies."""
        if self._end is None:
            self._end = error
            self._tell(error)

    def connect(self, peer: "MemoryStream") -> None:
        """Choose where payloads go."""
        self._peer = peer

    def _take(self, payload: bytes) -> None:
        if self._on_payload is None:
            self._waiting.append(payload)
        elif self._end is None:
            self._on_payload(payload)

    def _tell(self, error: Exception) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(error)


def memory_streams(capacity: int = 1024) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends."""
    left, right = MemoryStream(capacity), MemoryStream(capacity)
    left.connect(right)
    right.connect(left)
    return left, right
