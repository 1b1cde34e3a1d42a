"""Two channel ends in one process, which drop, delay, reorder and duplicate on command.

Frames travel as bytes, as on every channel, and are delivered inside ``send``, in the sender's
thread, so that a test needs neither threads nor sleeps.
"""

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from ssd.errors import FrameError, LinkError
from ssd.transport.frame import DEFAULT_LIMITS, Frame, FrameLimits, decode, encode


class Fault(StrEnum):
    """What happens to one frame on its way."""

    NONE = "none"
    """It arrives."""
    DROP = "drop"
    """It is lost, which a real channel never does without being lost itself."""
    DELAY = "delay"
    """It waits for ``release``."""
    REORDER = "reorder"
    """It arrives after the frame that is sent next."""
    DUPLICATE = "duplicate"
    """It arrives twice."""


class InProcessChannel:
    """One end of a ``pair``. Not for two threads at once."""

    transport = "memory"
    """See ``TensorChannel``."""

    def __init__(self, name: str, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._name = name
        self._limits = limits
        self._peer: InProcessChannel | None = None
        self._faults: deque[Fault] = deque()
        self._delayed: list[bytes] = []
        self._overtaken: list[bytes] = []
        self._early: list[bytes] = []
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._closed_because: Exception | None = None
        self._is_told = False

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``TensorChannel``."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        early, self._early = self._early, []
        for payload in early:
            self._arrive(payload, on_frame)
        if self._closed_because is not None:
            self._tell(self._closed_because)

    def send(self, frame: Frame) -> None:
        """See ``TensorChannel``. The next of the faults in the script befalls the frame."""
        payload = encode(frame, self._limits)
        if self._closed_because is not None:
            raise LinkError(f"{self._name} is closed: {self._closed_because}")
        overtaken, self._overtaken = self._overtaken, []
        match self._faults.popleft() if self._faults else Fault.NONE:
            case Fault.NONE:
                self._pass_on(payload)
            case Fault.DROP:
                pass
            case Fault.DELAY:
                self._delayed.append(payload)
            case Fault.REORDER:
                self._overtaken.append(payload)
            case Fault.DUPLICATE:
                self._pass_on(payload)
                self._pass_on(payload)
        for late in overtaken:
            self._pass_on(late)

    def close(self) -> None:
        """See ``TensorChannel``."""
        self._is_told = True
        self._end(LinkError("closed by this end"))
        if self._peer is not None:
            self._peer.lose(LinkError(f"{self._name} closed the channel"))

    def script(self, *faults: Fault) -> None:
        """Say what befalls the next frames sent from this end, one fault each."""
        self._faults.extend(faults)

    def release(self) -> None:
        """Let delayed frames arrive, oldest first."""
        delayed, self._delayed = self._delayed, []
        for payload in delayed:
            self._pass_on(payload)

    def lose(self, error: Exception) -> None:
        """Lose this end, as when the peer dies."""
        if self._closed_because is None:
            self._end(error)
            self._tell(error)

    def deliver(self, payload: bytes) -> None:
        """Let bytes arrive at this end, whatever they are."""
        if self._closed_because is not None:
            return
        if self._on_frame is None:
            self._early.append(payload)
        else:
            self._arrive(payload, self._on_frame)

    def _arrive(self, payload: bytes, on_frame: Callable[[Frame], None]) -> None:
        try:
            frame = decode(payload, self._limits.max_rows, self._limits.max_width)
        except FrameError as error:
            self.lose(error)
            if self._peer is not None:
                self._peer.lose(LinkError(f"{self._name} closed the channel: {error}"))
            return
        on_frame(frame)

    def _pass_on(self, payload: bytes) -> None:
        if self._peer is not None and self._closed_because is None:
            self._peer.deliver(payload)

    def _end(self, error: Exception) -> None:
        if self._closed_because is None:
            self._closed_because = error

    def _tell(self, error: Exception) -> None:
        if self._on_lost is not None and not self._is_told:
            self._is_told = True
            self._on_lost(error)

    def connect(self, peer: "InProcessChannel") -> None:
        """Choose where frames go."""
        self._peer = peer


def pair(limits: FrameLimits = DEFAULT_LIMITS) -> tuple[InProcessChannel, InProcessChannel]:
    """Two connected ends."""
    left, right = InProcessChannel("left", limits), InProcessChannel("right", limits)
    left.connect(right)
    right.connect(left)
    return left, right
