"""Frames as bytes inside the gRPC stream of a link. Every link can use this channel."""

from collections.abc import Callable

from ssd.errors import FrameError
from ssd.ports import ByteStream
from ssd.telemetry import BAD_FRAMES_TOTAL, LINK_BYTES_TOTAL, get_logger
from ssd.transport.frame import DEFAULT_LIMITS, Frame, FrameLimits, decode, encode

_log = get_logger(__name__)
_SENT_BYTES = LINK_BYTES_TOTAL.labels(direction="out")
_RECEIVED_BYTES = LINK_BYTES_TOTAL.labels(direction="in")


class GrpcChannel:
    """A ``TensorChannel`` over a ``ByteStream``.

    ``send`` runs on any thread. Frames are decoded and delivered on the thread of the stream.
    """

    transport = "tcp"
    """See ``TensorChannel``."""

    def __init__(self, stream: ByteStream, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._stream = stream
        self._limits = limits
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``TensorChannel``."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._stream.start(self._receive, self._lose)

    def send(self, frame: Frame) -> None:
        """See ``TensorChannel``."""
        payload = encode(frame, self._limits)
        self._stream.send(payload)
        _SENT_BYTES.inc(len(payload))

    def close(self) -> None:
        """See ``TensorChannel``."""
        self._on_frame = None
        self._on_lost = None
        self._stream.close()

    async def wait_closed(self) -> None:
        """See ``TensorChannel``. The link holds everything."""

    def _receive(self, payload: bytes) -> None:
        on_frame = self._on_frame
        if on_frame is None:
            return
        _RECEIVED_BYTES.inc(len(payload))
        try:
            frame = decode(payload, self._limits)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", reason=str(error))
            self._stream.close()
            self._lose(error)
            return
        on_frame(frame)

    def _lose(self, error: Exception) -> None:
        on_lost, self._on_lost, self._on_frame = self._on_lost, None, None
        if on_lost is not None:
            on_lost(error)
