"""Frames as messages of a communicator, beside the gRPC stream of the link.

A message is a header of two words, the bytes of the frame and the number of openings that
precede it, and the frame. All buffers of one direction have the size of its largest frame. The end
of the link's stream or of its lease closes the channel; a peer that dies loses it. Two threads for
each channel wait for the backend, so ``send`` and ``close`` never block.
"""

import asyncio
import queue
import threading
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
"""Pause between two checks of an idle connection."""
FLUSH_SECONDS = 0.25
"""Maximum time that ``wait_closed`` waits for frames that are being sent."""
CLOSE_SECONDS = 5.0
"""Maximum time that ``wait_closed`` then waits for the backend."""


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
        self._outgoing: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        """Frames with the number of openings before them; None ends the sender."""
        self._waiting: deque[tuple[bytes, int]] = deque()
        """Frames that wait for openings."""
        self._room = threading.Semaphore(MAX_UNDELIVERED)
        self._error: LinkError | None = None
        """Why no more frames are sent."""
        self._closed = asyncio.Event()
        self._receiver = self._thread(self._receive_all, "receiver")
        self._sender = self._thread(self._send_all, "sender")

    def open(self) -> None:
        """Start to send and to receive. Called once."""
        self._receiver.start()
        self._sender.start()
        threading.Thread(target=self._release, name="collective-end", daemon=True).start()

    def send(self, frame: bytes, num_openings: int) -> None:
        """See ``TensorChannel``."""
        if len(frame) > self._outgoing_bytes:
            raise FrameError(f"a frame has {len(frame)} bytes, allowed are {self._outgoing_bytes}")
        if self._error is not None:
            raise LinkError(str(self._error))
        if self._outgoing.qsize() >= MAX_OUTGOING:
            raise LinkError(f"the channel accepts no frames: {MAX_OUTGOING} wait to be sent")
        self._outgoing.put((frame, num_openings))

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
        self._error = self._error or LinkError("the channel is closed")
        self._outgoing.put(None)

    async def wait_closed(self) -> None:
        """See ``TensorChannel``."""
        for seconds in (FLUSH_SECONDS, CLOSE_SECONDS):
            try:
                async with asyncio.timeout(seconds):
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

    def _buffer(self, num_bytes: int) -> Buffer:
        return self._communicator.buffer(HEADER_WORDS + num_bytes // WORD_BYTES)

    def _send_all(self) -> None:
        """Send frames until the channel ends. The sender's thread."""
        buffer = self._buffer(self._outgoing_bytes)
        while True:
            try:
                message = self._outgoing.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self._communicator.check()
                continue
            if message is None:
                return
            frame, num_openings = message
            num_words = HEADER_WORDS + len(frame) // WORD_BYTES
            buffer.words[:HEADER_WORDS] = len(frame), num_openings
            buffer.words[HEADER_WORDS:num_words] = np.frombuffer(frame, dtype=np.int32)
            self._communicator.send(buffer, num_words)

    def _receive_all(self) -> None:
        """Pass frames to the loop until the channel ends. The receiver's thread."""
        buffer = self._buffer(self._incoming_bytes)
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
        """End the channel; its first error ends the link. Any thread."""
        if self._error is None:
            # Its traceback refers to the message of a thread, which holds the connection.
            self._error = error.with_traceback(None)
            self._link.fail(self._error)
        self._communicator.abort()
        self._outgoing.put(None)
        self._room.release()

    def _release(self) -> None:
        """Wait for the two threads, then release what the channel holds."""
        self._sender.join()
        self._receiver.join()
        self._communicator.close()
        post(self._loop, self._closed.set)
