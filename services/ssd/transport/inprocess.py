"""A pair of channel ends in one process, for tests: it can drop, delay, reorder and repeat frames.

Frames are bytes, as on every channel. They are delivered inside ``send``, on the sender's
thread, so a test needs neither threads nor sleeps.
"""

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from ssd.errors import FrameError, LinkError
from ssd.transport.frame import DEFAULT_LIMITS, Frame, FrameLimits, decode, encode


class Fault(StrEnum):
    """The fault that is applied to one frame."""

    NONE = "none"
    """The frame arrives."""
    DROP = "drop"
    """The frame is lost. A real channel loses frames only when it is lost itself."""
    DELAY = "delay"
    """The frame waits for ``release``."""
    REORDER = "reorder"
    """The frame arrives after the next frame."""
    DUPLICATE = "duplicate"
    """The frame arrives twice."""


class InProcessChannel:
    """One end of a ``pair``.

    One thread for both ends.
    """

    transport = "memory"
    """See ``TensorChannel``."""

    def __init__(self, name: str, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._name = name
        self._limits = limits
        self._peer: InProcessChannel | None = None
        self._faults: deque[Fault] = deque()
        self._delayed: list[bytes] = []
        self._reordered: list[bytes] = []
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._closed_because: Exception | None = None
        self._is_loss_reported = False

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``TensorChannel``."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        if self._closed_because is not None:
            self._report_loss(self._closed_because)

    def send(self, frame: Frame) -> None:
        """See ``TensorChannel``. Applies the next fault of the script to the frame."""
        payload = encode(frame, self._limits)
        if self._closed_because is not None:
            raise LinkError(f"{self._name} is closed: {self._closed_because}")
        reordered, self._reordered = self._reordered, []
        match self._faults.popleft() if self._faults else Fault.NONE:
            case Fault.NONE:
                self._transfer(payload)
            case Fault.DROP:
                pass
            case Fault.DELAY:
                self._delayed.append(payload)
            case Fault.REORDER:
                self._reordered.append(payload)
            case Fault.DUPLICATE:
                self._transfer(payload)
                self._transfer(payload)
        for earlier in reordered:
            self._transfer(earlier)

    def close(self) -> None:
        """See ``TensorChannel``."""
        self._is_loss_reported = True
        self._end(LinkError("closed by this end"))
        if self._peer is not None:
            self._peer.lose(LinkError(f"{self._name} closed the channel"))

    async def wait_closed(self) -> None:
        """See ``TensorChannel``. It holds nothing."""

    def script(self, *faults: Fault) -> None:
        """Set the faults of the next frames from this end, one for each frame."""
        self._faults.extend(faults)

    def release(self) -> None:
        """Deliver the delayed frames, oldest first."""
        delayed, self._delayed = self._delayed, []
        for payload in delayed:
            self._transfer(payload)

    def lose(self, error: Exception) -> None:
        """Lose this end, as when the peer fails."""
        if self._closed_because is None:
            self._end(error)
            self._report_loss(error)

    def deliver(self, payload: bytes) -> None:
        """Deliver any bytes at this end."""
        if self._closed_because is not None:
            return
        if self._on_frame is None:
            self._refuse(FrameError(f"a frame arrived before {self._name} was started"))
        else:
            self._receive(payload, self._on_frame)

    def connect(self, peer: "InProcessChannel") -> None:
        """Set the end that receives the frames."""
        self._peer = peer

    def _receive(self, payload: bytes, on_frame: Callable[[Frame], None]) -> None:
        try:
            frame = decode(payload, self._limits)
        except FrameError as error:
            self._refuse(error)
            return
        on_frame(frame)

    def _refuse(self, error: FrameError) -> None:
        self.lose(error)
        if self._peer is not None:
            self._peer.lose(LinkError(f"{self._name} closed the channel: {error}"))

    def _transfer(self, payload: bytes) -> None:
        if self._peer is not None and self._closed_because is None:
            self._peer.deliver(payload)

    def _end(self, error: Exception) -> None:
        if self._closed_because is None:
            self._closed_because = error

    def _report_loss(self, error: Exception) -> None:
        if self._on_lost is not None and not self._is_loss_reported:
            self._is_loss_reported = True
            self._on_lost(error)


def pair(limits: FrameLimits = DEFAULT_LIMITS) -> tuple[InProcessChannel, InProcessChannel]:
    """Return two connected ends."""
    left, right = InProcessChannel("left", limits), InProcessChannel("right", limits)
    left.connect(right)
    right.connect(left)
    return left, right
