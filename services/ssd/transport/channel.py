"""Frames as messages of a communicator, beside the gRPC stream of the link.

A message is a header of two words, the bytes of the frame and the number of openings that
precede it, and the frame. All buffers of one direction have the size of its largest frame. The end
of the link's stream or of its lease closes the channel; a peer that dies loses it. Three threads
wait for what is sent, for what is received, and for their end, so ``send`` and ``close`` never
block.

*Decision*: ``send`` starts the message on the caller's thread, unless another one is being sent.
*Because*: a round sends one frame, and a thread that sends it must first get the interpreter.
Beside a busy thread, a round trip between two channels took 470 to 590 us, and 2.2 to 5.6 ms with
every message on a thread of its own (medians, gloo, 1 KiB, both ends in one process). *Not chosen*:
several buffers, for messages in flight at the same time. *Revisit when* a round sends several
frames.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ssd.errors import FrameError, LinkError
from ssd.observability.log import get_logger
from ssd.rpc.link import LEASE_SECONDS, LinkCall, LinkServerCall
from ssd.runtime.threads import post
from ssd.transport.communicator import WORD_BYTES, Buffer, Communicator

_log = get_logger(__name__)
HEADER_WORDS = 2
MAX_OUTGOING = 64
"""Maximum number of frames that wait to be sent. A round sends one."""
MAX_UNDELIVERED = 64
"""Maximum number of frames that wait for the asyncio loop. The peer then waits to send others."""
CHECK_SECONDS = 0.25
"""Pause between two checks for errors of the network."""
FLUSH_SECONDS = 0.25
"""Maximum time for which frames are still sent after ``close``."""
CLOSE_SECONDS = 5.0
"""Maximum time that the backend then takes to end."""


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
        """Guards the fields from here to ``_error``."""
        self._buffer: Buffer | None = None
        """Of the message that is being sent, also between two of them."""
        self._is_sending = False
        self._outgoing: deque[tuple[bytes, int]] = deque()
        """Frames that wait to be sent, with the number of openings before them."""
        self._error: LinkError | None = None
        """Why no more frames are sent."""
        self._ended_at = 0.0
        self._waiting: deque[tuple[bytes, int]] = deque()
        """Frames that wait for openings."""
        self._room = threading.Semaphore(MAX_UNDELIVERED)
        self._closed = asyncio.Event()
        self._receiver = self._thread(self._receive_all, "receiver")
        self._sender = self._thread(self._send_all, "sender")

    def open(self) -> None:
        """Start to send and to receive. Called once."""
        for thread in (self._receiver, self._sender):
            thread.start()
        threading.Thread(target=self._supervise, name="collective-end", daemon=True).start()

    def send(self, frame: bytes, num_openings: int) -> None:
        """See ``TensorChannel``."""
        if len(frame) > self._outgoing_bytes:
            raise FrameError(f"a frame has {len(frame)} bytes, allowed are {self._outgoing_bytes}")
        if len(frame) % WORD_BYTES:
            raise FrameError(f"a frame has {len(frame)} bytes, not words of {WORD_BYTES}")
        with self._changed:
            if self._error is not None:
                raise LinkError(str(self._error))
            if len(self._outgoing) >= MAX_OUTGOING:
                raise LinkError(f"the channel accepts no frames: {MAX_OUTGOING} wait to be sent")
            self._outgoing.append((frame, num_openings))
            if self._is_sending:
                return
            try:
                self._start_next()
            except LinkError as error:
                self._fail(error)
                raise
            self._changed.notify_all()

    def opening_arrived(self) -> None:
        """See ``TensorChannel``."""
        while self._waiting and self._waiting[0][1] <= self._link.num_openings:
            frame, _ = self._waiting.popleft()
            self._room.release()
            try:
                self._link.deliver(frame)
            except FrameError as error:
                self._fail(error)

    def close(self) -> None:
        """See ``TensorChannel``. The queued frames are sent within ``FLUSH_SECONDS``."""
        with self._changed:
            self._end(LinkError("the channel is closed"))

    async def wait_closed(self) -> None:
        """See ``TensorChannel``."""
        for end in (FLUSH_SECONDS, FLUSH_SECONDS + CLOSE_SECONDS):
            try:
                async with asyncio.timeout(self._ended_at + end - time.monotonic()):
                    await self._closed.wait()
                return
            except TimeoutError:
                self._communicator.abort()
        _log.error("channel_not_closed", seconds=CLOSE_SECONDS, peer=self._link.name)

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except LinkError as error:
                self._fail(error)
            finally:
                # The other thread ends too. A bug must not leave a channel with one direction.
                self._fail(LinkError(f"the channel has no {name}"))

        return threading.Thread(target=run, name=f"collective-{name}", daemon=True)

    def _new_buffer(self, num_bytes: int) -> Buffer:
        return self._communicator.buffer(HEADER_WORDS + num_bytes // WORD_BYTES)

    def _start_next(self) -> None:
        """Start to send the oldest frame. The caller holds ``_changed``."""
        frame, num_openings = self._outgoing.popleft()
        if self._buffer is None:
            self._buffer = self._new_buffer(self._outgoing_bytes)
        num_words = HEADER_WORDS + len(frame) // WORD_BYTES
        self._buffer.words[:HEADER_WORDS] = len(frame), num_openings
        self._buffer.words[HEADER_WORDS:num_words] = np.frombuffer(frame, dtype=np.int32)
        self._communicator.start_send(self._buffer, num_words)
        self._is_sending = True

    def _send_all(self) -> None:
        """Wait for messages that are being sent, until the channel ends. The sender's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_sending or self._error is not None)
                if not self._is_sending:
                    return
            self._communicator.end_send()
            with self._changed:
                self._is_sending = False
                if self._outgoing:
                    self._start_next()

    def _receive_all(self) -> None:
        """Pass frames to the loop until the channel ends. The receiver's thread."""
        buffer = self._new_buffer(self._incoming_bytes)
        while True:
            self._communicator.receive(buffer)
            frame, num_openings = self._content(buffer.words)
            self._room.acquire()
            post(self._loop, self._take, frame, num_openings)

    def _content(self, words: npt.NDArray[np.int32]) -> tuple[bytes, int]:
        """Return a copy of the frame of a message, and the number of openings before it."""
        num_bytes, num_openings = (int(each) for each in words[:HEADER_WORDS])
        if not 0 <= num_bytes <= self._incoming_bytes or num_bytes % WORD_BYTES or num_openings < 0:
            raise FrameError(
                f"a frame has {num_bytes} bytes after {num_openings} openings, allowed are words "
                f"of {WORD_BYTES} bytes up to {self._incoming_bytes}"
            )
        return words[HEADER_WORDS:][: num_bytes // WORD_BYTES].tobytes(), num_openings

    def _take(self, frame: bytes, num_openings: int) -> None:
        """Deliver a frame now, or after the openings that precede it. Asyncio loop."""
        self._waiting.append((frame, num_openings))
        self.opening_arrived()
        if self._waiting:
            self._loop.call_later(LEASE_SECONDS, self._check_openings, num_openings)

    def _check_openings(self, expected: int) -> None:
        if (arrived := self._link.num_openings) < expected:
            self._fail(
                FrameError(
                    f"a frame follows {expected} openings, {arrived} arrived within "
                    f"{LEASE_SECONDS:g} s"
                )
            )

    def _fail(self, error: LinkError) -> None:
        """End the channel; its first error ends the link, unless this end closed it. Any thread."""
        with self._changed:
            if self._error is None:
                # Its traceback refers to a message, which holds the connection.
                self._link.fail(error.with_traceback(None))
            self._end(error)
            self._outgoing.clear()
        self._communicator.abort()
        self._room.release()

    def _end(self, error: LinkError) -> None:
        """Send no other frames; the first cause counts. The caller holds ``_changed``."""
        if self._error is None:
            self._error, self._ended_at = error, time.monotonic()
        self._changed.notify_all()

    def _supervise(self) -> None:
        """Look for errors of the network until both threads have ended; then release all."""
        while self._sender.is_alive():
            self._sender.join(CHECK_SECONDS)
            try:
                self._communicator.check()
            except LinkError as error:
                self._fail(error)
        self._receiver.join()
        try:
            self._communicator.close()
        except RuntimeError as error:
            _log.error("channel_not_released", peer=self._link.name, error=str(error))
        finally:
            post(self._loop, self._closed.set)
