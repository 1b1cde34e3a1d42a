"""Frames as messages of a communicator, beside the gRPC stream of the link.

All buffers of one direction have the size of its largest frame, so that receives can be posted
before the peer sends, into buffers that stay. The header of a frame states how much is used.
The end of the link's stream or of its lease closes the channel; a peer that dies loses it.

*Decision*: ``send`` hands the message to the backend on the caller's thread, and two threads for
each channel wait for what is sent and received. *Because*: a commit then leaves without waiting for
another thread to get the interpreter, and ``close`` never blocks. *Not chosen*: a thread that
sends, which adds up to one switch interval to each commit. *Revisit when* a target has so many
drafts that its threads count.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from ssd.errors import FrameError, LinkError
from ssd.telemetry import BAD_FRAMES_TOTAL, LINK_BYTES_TOTAL, get_logger
from ssd.transport.communicator import Communicator, Slot, Transfer
from ssd.transport.frame import HEADER_WORDS, WORD_BYTES, Frame, FrameLimits, decode, encode

_log = get_logger(__name__)
_SENT_BYTES = LINK_BYTES_TOTAL.labels(direction="out")
_RECEIVED_BYTES = LINK_BYTES_TOTAL.labels(direction="in")
MAX_OUTGOING = 64
"""Maximum number of frames that the peer has not received yet. A round sends one."""
NUM_POSTED = 4
"""Number of receives that are posted in advance."""
MAX_UNDELIVERED = 64
"""Maximum number of frames that wait for the asyncio loop. The peer then waits to send others."""
FLUSH_SECONDS = 0.25
"""Maximum time that ``close`` waits for frames that are being sent."""
CLOSE_SECONDS = 5.0
"""Maximum time that ``wait_closed`` waits for the backend."""


class CollectiveChannel:
    """A ``TensorChannel`` over a communicator, which it owns.

    ``send`` and ``close`` on any thread; everything else, and all callbacks, on the asyncio loop.
    """

    def __init__(
        self, communicator: Communicator, outgoing: FrameLimits, incoming: FrameLimits
    ) -> None:
        """Construct one end, in a running asyncio loop; ``open`` starts it.

        Args:
            communicator: of this link and epoch.
            outgoing: the largest frame that this end sends; ``incoming`` of the peer.
            incoming: the largest frame that the peer sends.
        """
        self._communicator = communicator
        self._outgoing = outgoing
        self._incoming = incoming
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        """Guards the fields from here to ``_undelivered``."""
        self._error: LinkError | None = None
        """Why no more frames are sent."""
        self._is_flushing = False
        """Whether the frames that are being sent may still end."""
        self._free: list[Slot] = []
        self._sending: deque[tuple[Slot, Transfer]] = deque()
        self._num_undelivered = 0
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._closed = asyncio.Event()
        self._receiver = threading.Thread(
            target=self._receive_all, name="collective-in", daemon=True
        )
        self._sender = threading.Thread(
            target=self._reclaim_all, name="collective-out", daemon=True
        )

    @property
    def transport(self) -> str:
        """See ``TensorChannel``."""
        return self._communicator.transport

    def open(self) -> None:
        """Post the receives. Called once, before ``start``."""
        self._receiver.start()
        self._sender.start()

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``TensorChannel``."""
        self._on_frame, self._on_lost = on_frame, on_lost
        self._report_loss()

    def send(self, frame: Frame) -> None:
        """See ``TensorChannel``."""
        payload = encode(frame, self._outgoing)
        with self._changed:
            if self._error is not None:
                raise LinkError(str(self._error))
            if len(self._sending) >= MAX_OUTGOING:
                raise LinkError(f"the channel accepts no frames: {MAX_OUTGOING} wait to be sent")
            slot = self._free.pop() if self._free else self._slot(self._outgoing)
            num_words = len(payload) // WORD_BYTES
            slot.words[:num_words] = np.frombuffer(payload, dtype=np.int32)
            try:
                transfer = self._communicator.send(slot, num_words)
            except LinkError as error:
                self._fail(error)
                raise
            self._sending.append((slot, transfer))
            self._changed.notify_all()
        _SENT_BYTES.inc(len(payload))

    def close(self) -> None:
        """See ``TensorChannel``. Frames that are being sent have ``FLUSH_SECONDS``."""
        self._on_frame = self._on_lost = None
        with self._changed:
            if self._error is not None:
                return
            self._error = LinkError("the channel is closed")
            self._is_flushing = True
            if self._sending:
                timer = threading.Timer(FLUSH_SECONDS, self._communicator.abort)
                timer.daemon = True
                timer.start()
            self._changed.notify_all()

    async def wait_closed(self) -> None:
        """See ``TensorChannel``."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            _log.error("channel_not_closed", seconds=CLOSE_SECONDS, transport=self.transport)

    def _slot(self, limits: FrameLimits) -> Slot:
        return self._communicator.slot(HEADER_WORDS + limits.max_rows * limits.max_width)

    def _receive_all(self) -> None:
        """Deliver frames until the channel ends. The receiver's thread."""
        try:
            slots = deque(self._slot(self._incoming) for _ in range(NUM_POSTED))
            posted = deque((slot, self._communicator.receive(slot)) for slot in slots)
            while True:
                slot, transfer = posted.popleft()
                transfer.wait()
                frame = decode(used_bytes(slot), self._incoming)
                posted.append((slot, self._communicator.receive(slot)))
                self._deliver(frame)
        except LinkError as error:
            self._fail(error)
        finally:
            # A bug must not leave a channel that receives nothing.
            self._fail(LinkError("the channel has no receiver"))

    def _deliver(self, frame: Frame) -> None:
        """Pass a frame to the loop; wait while too many are there.

        Raises:
            LinkError: the channel has ended.
        """
        _RECEIVED_BYTES.inc(WORD_BYTES * (HEADER_WORDS + frame.rows_RW.size))
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._num_undelivered < MAX_UNDELIVERED
            )
            if self._error is not None and not self._is_flushing:
                raise LinkError(str(self._error))
            self._num_undelivered += 1
        self._in_loop(self._take, frame)

    def _take(self, frame: Frame) -> None:
        """Pass a frame to its reader. Asyncio loop."""
        with self._changed:
            self._num_undelivered -= 1
            self._changed.notify_all()
        if self._on_frame is not None:
            self._on_frame(frame)
        elif self._error is None:
            self._fail(FrameError("a frame arrived before the channel was started"))

    def _reclaim_all(self) -> None:
        """Reuse the slots of sent frames; at the end release everything. The sender's thread."""
        try:
            while (oldest := self._oldest()) is not None:
                slot, transfer = oldest
                transfer.wait()
                with self._changed:
                    self._sending.popleft()
                    self._free.append(slot)
        except LinkError as error:
            self._fail(error)
        finally:
            self._fail(LinkError("the channel has no sender"))
            self._receiver.join()
            with self._changed:
                self._sending.clear()
                self._free.clear()
            self._communicator.close()
            self._in_loop(self._closed.set)

    def _oldest(self) -> tuple[Slot, Transfer] | None:
        """Wait for a frame that is being sent; None when the channel has ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._sending) or self._error is not None)
            if self._error is not None and not self._is_flushing:
                return None
            return self._sending[0] if self._sending else None

    def _fail(self, error: LinkError) -> None:
        """End the channel because of an error; the first one is reported. Any thread."""
        with self._changed:
            if self._error is None:
                # Its traceback refers to the transfers of the thread, which hold the connection.
                self._error = error.with_traceback(None)
                if isinstance(error, FrameError):
                    BAD_FRAMES_TOTAL.inc()
                    _log.warning("bad_frame", reason=str(error))
            self._changed.notify_all()
        self._communicator.abort()
        self._in_loop(self._report_loss)

    def _report_loss(self) -> None:
        """Report the end once, if this end did not close the channel. Asyncio loop."""
        on_lost = self._on_lost
        if on_lost is not None and self._error is not None:
            self._on_frame = self._on_lost = None
            on_lost(self._error)

    def _in_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The process stops: the loop is closed, and nothing waits for the frame.
            if not self._loop.is_closed():
                raise


def used_bytes(slot: Slot) -> bytes:
    """Return a copy of the frame in a slot. What is no frame is returned up to the slot's end."""
    num_rows, width = (int(each) for each in slot.words[5:7])
    num_words = HEADER_WORDS + num_rows * width
    is_plausible = num_rows >= 0 and width >= 1 and num_words <= len(slot.words)
    return slot.words[: num_words if is_plausible else None].tobytes()
