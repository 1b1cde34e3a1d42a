"""A byte stream in memory with two ends. It delivers inside ``send``."""

from collections.abc import Callable

from ssd.errors import FrameError, LinkError


class MemoryStream:
    """Implements ``ports.ByteStream``; ``memory_streams`` makes a connected pair.

    One thread for both ends.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        """All payloads sent from this end."""
        self._peer: MemoryStream | None = None
        self._on_payload: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._end: Exception | None = None

    def start(
        self, on_payload: Callable[[bytes], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``ByteStream``."""
        self._on_payload, self._on_lost = on_payload, on_lost
        if self._end is not None:
            self._report_loss(self._end)

    def send(self, payload: bytes) -> None:
        """See ``ByteStream``."""
        peer = self._peer
        if self._end is not None or peer is None:
            raise LinkError(f"the stream is closed: {self._end}")
        self.sent.append(payload)
        peer._receive(payload)  # noqa: SLF001

    def close(self) -> None:
        """See ``ByteStream``."""
        self._on_lost = None
        peer = self._peer
        self._end = self._end or LinkError("closed by this end")
        if peer is not None:
            peer.lose(LinkError("the peer closed the stream"))

    def lose(self, error: Exception) -> None:
        """Lose this end, as when the peer fails."""
        if self._end is None:
            self._end = error
            self._report_loss(error)

    def connect(self, peer: "MemoryStream") -> None:
        """Set the end that receives the payloads."""
        self._peer = peer

    def _receive(self, payload: bytes) -> None:
        if self._on_payload is None:
            self.lose(FrameError("a payload arrived before the start"))
            if self._peer is not None:
                self._peer.lose(LinkError("the peer closed the stream"))
        elif self._end is None:
            self._on_payload(payload)

    def _report_loss(self, error: Exception) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(error)


def memory_streams() -> tuple[MemoryStream, MemoryStream]:
    """Return two connected ends."""
    left, right = MemoryStream(), MemoryStream()
    left.connect(right)
    right.connect(left)
    return left, right
