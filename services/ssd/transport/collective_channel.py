"""Frames as messages of a communicator, beside the gRPC stream of the link.

A message is a header of two words, the bytes of the frame and the number of openings that
precede it, and the frame. All buffers of one direction have the size of its largest frame, so that
receives can be posted before the peer sends, into buffers that stay. The end of the link's stream
or of its lease closes the channel; a peer that dies loses it.

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
from ssd.observability.log import get_logger
from ssd.rpc.link import LEASE_SECONDS, LinkCall, LinkServerCall
from ssd.transport.communicator import Communicator, Slot, Transfer

_log = get_logger(__name__)
HEADER_WORDS = 2
WORD_BYTES = 4
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

    ``send`` and ``close`` on any thread; everything else, and all calls of the link, on the asyncio
    loop.
    """

    def __init__(
        self,
        communicator: Communicator,
        link: LinkCall | LinkServerCall,
        outgoing_bytes: int,
        incoming_bytes: int,
    ) -> None:
        """Construct one end, in a running asyncio loop; ``open`` starts it.

        Args:
            communicator: of this link and epoch.
            link: receives the frames.
            outgoing_bytes: size of the largest frame that this end sends.
            incoming_bytes: size of the largest frame that the peer sends.
        """
        self._communicator = communicator
        self._link = link
        self._outgoing_bytes = outgoing_bytes
        self._incoming_bytes = incoming_bytes
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
        self._is_closed = False
        """Whether this end has closed the channel."""
        self._closed = asyncio.Event()
        self._receiver = threading.Thread(
            target=self._receive_all, name="collective-in", daemon=True
        )
        self._sender = threading.Thread(
            target=self._reclaim_all, name="collective-out", daemon=True
        )

    def open(self) -> None:
        """Post the receives. Called once."""
        self._receiver.start()
        self._sender.start()

    def send(self, frame: bytes, num_openings: int) -> None:
        """See ``TensorChannel``."""
        if len(frame) > self._outgoing_bytes:
            raise FrameError(f"a frame has {len(frame)} bytes, allowed are {self._outgoing_bytes}")
        with self._changed:
            if self._error is not None:
                raise LinkError(str(self._error))
            if len(self._sending) >= MAX_OUTGOING:
                raise LinkError(f"the channel accepts no frames: {MAX_OUTGOING} wait to be sent")
            slot = self._free.pop() if self._free else self._slot(self._outgoing_bytes)
            num_words = HEADER_WORDS + len(frame) // WORD_BYTES
            slot.words[:HEADER_WORDS] = len(frame), num_openings
            slot.words[HEADER_WORDS:num_words] = np.frombuffer(frame, dtype=np.int32)
            try:
                transfer = self._communicator.send(slot, num_words)
            except LinkError as error:
                self._fail(error)
                raise
            self._sending.append((slot, transfer))
            self._changed.notify_all()

    def opening_arrived(self) -> None:
        """See ``TensorChannel``."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """See ``TensorChannel``. Frames that are being sent have ``FLUSH_SECONDS``."""
        self._is_closed = True
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
            _log.error("channel_not_closed", seconds=CLOSE_SECONDS, peer=self._link.name)

    def _slot(self, num_bytes: int) -> Slot:
        return self._communicator.slot(HEADER_WORDS + num_bytes // WORD_BYTES)

    def _receive_all(self) -> None:
        """Deliver frames until the channel ends. The receiver's thread."""
        try:
            slots = deque(self._slot(self._incoming_bytes) for _ in range(NUM_POSTED))
            posted = deque((slot, self._communicator.receive(slot)) for slot in slots)
            while True:
                slot, transfer = posted.popleft()
                transfer.wait()
                # Before the slot is posted again, which takes time: others are posted already.
                self._deliver(*self._content(slot))
                posted.append((slot, self._communicator.receive(slot)))
        except LinkError as error:
            self._fail(error)
        finally:
            # A bug must not leave a channel that receives nothing.
            self._fail(LinkError("the channel has no receiver"))

    def _content(self, slot: Slot) -> tuple[bytes, int]:
        """Return a copy of the frame in a slot, and the number of openings before it."""
        num_bytes, num_openings = (int(each) for each in slot.words[:HEADER_WORDS])
        if not 0 <= num_bytes <= self._incoming_bytes or num_bytes % WORD_BYTES or num_openings < 0:
            raise FrameError(
                f"a frame has {num_bytes} bytes after {num_openings} openings, allowed are words "
                f"of {WORD_BYTES} bytes up to {self._incoming_bytes}"
            )
        return slot.words[HEADER_WORDS:][: num_bytes // WORD_BYTES].tobytes(), num_openings

    def _deliver(self, frame: bytes, num_openings: int) -> None:
        """Pass a frame to the loop; wait while too many are there, or messages are missing.

        Raises:
            LinkError: the channel has ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._num_undelivered < MAX_UNDELIVERED
            )
            self._changed.wait_for(
                lambda: self._error is not None or self._link.num_openings >= num_openings,
                timeout=LEASE_SECONDS,
            )
            if self._error is not None and not self._is_flushing:
                raise LinkError(str(self._error))
            if self._link.num_openings < num_openings:
                raise FrameError(
                    f"a frame follows {num_openings} openings, {self._link.num_openings} arrived "
                    f"within {LEASE_SECONDS:g} s"
                )
            self._num_undelivered += 1
        self._in_loop(self._take, frame)

    def _take(self, frame: bytes) -> None:
        """Pass a frame to the link. Asyncio loop."""
        with self._changed:
            self._num_undelivered -= 1
            self._changed.notify_all()
        try:
            self._link.deliver(frame)
        except FrameError as error:
            self._fail(error)

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
            self._changed.notify_all()
        self._communicator.abort()
        self._in_loop(self._report_loss)

    def _report_loss(self) -> None:
        """End the link, if this end did not close the channel. Asyncio loop."""
        if self._error is not None and not self._is_closed:
            self._link.fail(self._error)

    def _in_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The process stops: the loop is closed, and nothing waits for the frame.
            if not self._loop.is_closed():
                raise
