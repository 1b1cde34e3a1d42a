"""The two ends of a link: typed messages over one bidirectional gRPC stream.

``send`` may be called from any thread and never blocks. It appends to a bounded queue, which a task
of the event loop writes to the stream in order. A second task reads the stream and queues the
messages for ``receive``. ``send`` wakes the loop only if its queue was empty. Commits and tables
are messages of the type ``bytes``; ``ssd.speculation.table`` defines and checks their contents.

*Decision*: asyncio gRPC streams, on the loop's thread. *Because*: they are fast enough, and fewer
threads compete with the step thread for the interpreter. Measured: the round trip of a frame of
1 KiB between threads of two processes takes 0.31 to 0.37 ms in the median and 0.5 to 3.8 ms at
99 % (six runs of 2,000 frames, two CPUs shared with other work). *Not chosen*: synchronous gRPC
with two threads per link; not measured. *Revisit when* the median passes 1 ms.
"""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio

from ssd.errors import AccessError, FrameError, HandshakeError, LinkError, SSDError
from ssd.observability.log import get_logger
from ssd.observability.metrics import LINK_BYTES_TOTAL
from ssd.rpc.call_guard import Undecodable
from ssd.rpc.link_codec import (
    NO_BOUNDS,
    OpeningBounds,
    draft_message,
    speculate_request,
    speculate_response,
    target_message,
)
from ssd.rpc.status import from_rpc_error
from ssd.tasks import known
from ssd.types import DraftMessage, OpenSession, TargetMessage
from ssd.v1 import speculation_pb2

_log = get_logger(__name__)
_SENT_BYTES = LINK_BYTES_TOTAL.labels(direction="out")
_RECEIVED_BYTES = LINK_BYTES_TOTAL.labels(direction="in")
GRPC = "grpc"
"""Name of the channel that every link has: commits and tables are messages of the stream."""
HEARTBEAT_SECONDS = 0.25
"""Pause between two heartbeats of an end."""
LEASE_SECONDS = 1.5
"""A link without a control message from the peer for this long is closed, at the next heartbeat.
Commits and tables do not count."""
HANDSHAKE_SECONDS = 5.0
"""Maximum time that either end waits for Hello or Welcome."""
MAX_OUTGOING = 1024
"""Maximum number of messages that wait to be sent."""
MAX_INCOMING = 1024
"""Maximum number of messages that wait to be read."""
MESSAGES_PER_SECOND = 2_000.0
"""Rate at which the messages of one peer are read; a message counts once for each 16 KiB. The pool
takes 0.22 ms for a frame with one table of 1,400 bytes (1,200 since) and 2.0 ms for one with 64
tables (thread CPU time, a slow shared CPU). This rate takes at most two thirds of the event loop's
time there, and does not delay a draft with 64 sessions at 300 rounds/s."""
BURST_MESSAGES = 4_000.0
"""Number of messages that are read without a pause."""
UNIT_BYTES = 16 * 1024
WRITE_SECONDS = 5.0
"""A link whose peer accepts no message for this long is closed."""
FLUSH_SECONDS = 0.25
"""Maximum time that ``close`` waits for queued messages to be sent."""
REPLACED = "Internal error from Core"
"""Details of the status of a call of which a write has failed."""
SERVER_END_SECONDS = 0.5
"""Maximum time that a client's ``close`` waits for the server to end the call."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class RateLimit:
    """Reads ``burst`` units without a pause, then ``per_second`` units. Pure."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._unit_seconds = 1.0 / per_second
        self._burst_seconds = burst / per_second
        self._busy_until = -float("inf")

    def spend(self, units: float, now: float) -> float:
        """Count a message; returns the seconds to wait before the next one, 0 within the burst."""
        start = max(self._busy_until, now - self._burst_seconds)
        self._busy_until = start + units * self._unit_seconds
        return max(0.0, self._busy_until - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatus:
    """How commits and tables travel on a link."""

    name: str = GRPC
    """``grpc`` or ``collective``."""
    reason: str = ""
    """Why gRPC is used although the target requested a collective channel."""
    transport: str = "tcp"
    """How the bytes travel: ``tcp``, or the path that NCCL reports."""
    round_trip_seconds: float = 0.0
    """Median time of a round trip of 4 KiB over a collective channel."""
    bytes_per_second: float = 0.0
    """Lower bound of the bandwidth of a collective channel."""


class TensorChannel(Protocol):
    """Carries commits and tables beside the stream of a link; see ``ssd.transport``.

    It calls ``deliver`` and ``fail`` of the link.
    """

    def send(self, frame: bytes, num_openings: int) -> None:
        """Queue a frame. Any thread; never blocks.

        Args:
            frame: commits or tables.
            num_openings: openings of this end that precede it. The peer delivers it after them.

        Raises:
            LinkError: the channel is closed, its outbox is full, or the frame is too large.
        """

    def opening_arrived(self) -> None:
        """Deliver the frames that wait for ``num_openings`` of the link."""

    def close(self) -> None:
        """Close the channel at both ends. Idempotent; reports no failure at this end."""

    async def wait_closed(self) -> None:
        """Wait until everything that the channel held is released. After ``close`` or a failure."""


class _Link(ABC, Generic[Sent, Received]):
    """One end of a link. Entering the context starts its tasks, leaving it closes the link.

    Owned by its event loop; other threads call only ``send``, ``ring`` and ``fail``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._outgoing: deque[Sent | bytes] = deque()
        self._is_idle = True
        self._no_send_because = ""
        self._wake = asyncio.Event()
        self.doorbell: Callable[[], None] | None = None
        """What ``send`` calls in other threads, instead of ``ring``."""
        self._incoming: asyncio.Queue[Received | bytes | LinkError | None] = asyncio.Queue()
        self._has_ended = False
        self._rate_limit = RateLimit(MESSAGES_PER_SECOND, BURST_MESSAGES)
        self._channel: TensorChannel | None = None
        self._num_sent_openings = 0
        self.num_openings = 0
        """Number of ``OpenSession`` that have arrived: commits of a session follow its opening."""
        self._control_at = self._loop.time()
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start reading and writing. Called once."""
        assert self._reader is None
        self._reader = self._loop.create_task(self._read_all())
        self._reader.add_done_callback(self._on_reader_done)
        self._writer = self._loop.create_task(self._write_all())

    def send(self, message: Sent | bytes) -> None:
        """Queue a message. Any thread; never blocks. They arrive in order.

        Raises:
            LinkError: the link is closed or lost, or ``MAX_OUTGOING`` messages are queued.
        """
        if isinstance(message, bytes) and self._channel is not None:
            self._channel.send(message, self._num_sent_openings)
            _SENT_BYTES.inc(len(message))
            return
        with self._lock:
            if self._no_send_because:
                raise LinkError(self._no_send_because)
            if len(self._outgoing) >= MAX_OUTGOING:
                raise LinkError(f"{self.name} accepts no messages: {MAX_OUTGOING} wait to be sent")
            self._outgoing.append(message)
            self._num_sent_openings += isinstance(message, OpenSession)
            must_wake, self._is_idle = self._is_idle, False
        if isinstance(message, bytes):
            _SENT_BYTES.inc(len(message))
        if must_wake:
            is_in_loop = threading.get_ident() == self._loop_thread
            (self.ring if is_in_loop or self.doorbell is None else self.doorbell)()

    def ring(self) -> None:
        """Wake the task that writes. Any thread."""
        self._call_in_loop(self._wake.set)

    async def receive(self) -> Received | bytes | None:
        """Return the next message, or None after either end closed the link.

        Cancelling it loses no message. One reader at a time.

        Raises:
            HandshakeError: the peer refused the handshake, or its first message is out of bounds.
            FrameError: the peer sent a malformed message.
            LinkError: the connection is lost; names the peer.
        """
        message = await self._incoming.get()
        if message is None or isinstance(message, LinkError):
            self._incoming.put_nowait(message)
            if message is not None:
                try:
                    raise message
                finally:
                    # Its traceback refers to this frame, and the frame to this link.
                    del message
        return message

    def use(self, channel: TensorChannel) -> None:
        """Send commits and tables over another channel from now on. The link closes it."""
        self._channel = channel

    def deliver(self, frame: bytes) -> None:
        """Queue commits or tables of the peer for ``receive``. Loop's thread.

        Raises:
            FrameError: too many messages were not read.
        """
        _RECEIVED_BYTES.inc(len(frame))
        self._put(frame)

    def fail(self, error: LinkError) -> None:
        """End the link; ``receive`` raises the error. Any thread. The first error counts."""
        with contextlib.suppress(LinkError):
            self._call_in_loop(lambda: self._end(error, keeps_outgoing=True))

    def renew_lease(self) -> None:
        """Count the silence of the peer from now on."""
        self._control_at = self._loop.time()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the newest control message."""
        return self._loop.time() - self._control_at

    async def close(self) -> None:
        """Send the queued messages within ``FLUSH_SECONDS`` and end the link. Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    @abstractmethod
    async def _read(self) -> tuple[Received | bytes | None, int]:
        """Read the next message or frame, None at an orderly end, and its size in bytes."""

    @abstractmethod
    async def _write(self, message: Sent | bytes) -> None:
        """Write a message to the stream."""

    @abstractmethod
    async def _end_call(self, reader: "asyncio.Task[None]") -> None:
        """End the call, in an orderly way if the peer allows it."""

    async def _close(self) -> None:
        with self._lock:
            self._no_send_because = self._no_send_because or f"the link to {self.name} is closed"
        if self._channel is not None:
            self._channel.close()
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            self._end(None)
            return
        if (self._outgoing or not self._has_ended) and not writer.done():
            self._wake.set()
            await asyncio.wait({writer}, timeout=FLUSH_SECONDS)
        writer.cancel()
        await self._end_call(reader)
        reader.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
        self._end(None)
        if self._channel is not None:
            await self._channel.wait_closed()
            self._channel = None
        # Without cycles of references, the sockets close now and not when garbage is collected.
        # The traceback of an error that was raised refers to this link.
        self._incoming = asyncio.Queue()
        self._incoming.put_nowait(None)

    async def _read_all(self) -> None:
        try:
            while True:
                message, num_bytes = await self._read()
                if message is None:
                    break
                if isinstance(message, bytes):
                    self.deliver(message)
                else:
                    self._put(message)
                    self.renew_lease()
                    if isinstance(message, OpenSession):
                        self.num_openings += 1
                        if self._channel is not None:
                            self._channel.opening_arrived()
                # Flow control makes the peer wait. Meanwhile the loop reads the other links.
                units = max(1.0, num_bytes / UNIT_BYTES)
                if pause := self._rate_limit.spend(units, self._loop.time()):
                    await asyncio.sleep(pause)
            self._end(None)
        except LinkError as error:
            self._end(error)
        except grpc.aio.AioRpcError as error:
            self._end(_named_error(from_rpc_error(error, self.name), self.name))
        except grpc.aio.BaseError as error:
            self._end(LinkError(f"the connection to {self.name} is lost: {error}"))

    async def _write_all(self) -> None:
        try:
            while True:
                while (message := self._pop()) is not None:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await self._write(message)
                if self._no_send_because:
                    return
                await self._wake.wait()
                self._wake.clear()
        except TimeoutError:
            self._end(LinkError(f"{self.name} accepted no message for {WRITE_SECONDS:g} s"))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            # The reader receives the cause. Until then ``send`` accepts no more messages.
            with self._lock:
                problem = f"{self.name}: cannot send: {error}"
                self._no_send_because = self._no_send_because or problem
                self._outgoing.clear()

    def _pop(self) -> Sent | bytes | None:
        with self._lock:
            if self._outgoing:
                return self._outgoing.popleft()
            self._is_idle = True
            return None

    def _put(self, message: Received | bytes) -> None:
        if self._incoming.qsize() >= MAX_INCOMING:
            raise FrameError(f"{self.name} sent {MAX_INCOMING} messages that were not read")
        self._incoming.put_nowait(message)

    def _end(self, error: LinkError | None, *, keeps_outgoing: bool = False) -> None:
        """End the link; the first cause is reported. ``close`` sends what is kept."""
        if self._has_ended:
            return
        self._has_ended = True
        with self._lock:
            self._no_send_because = self._no_send_because or str(
                error or f"{self.name} closed the link"
            )
            if not keeps_outgoing:
                self._outgoing.clear()
        self._wake.set()
        self._incoming.put_nowait(error)

    def _on_reader_done(self, reader: "asyncio.Task[None]") -> None:
        """End the link if the reader failed because of a bug, or the call was cancelled."""
        crash = None if reader.cancelled() else reader.exception()
        if crash is not None:
            _log.error("link_failed", peer=self.name, error=repr(crash))
        self._end(LinkError(f"the link to {self.name} failed"))

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self._loop_thread:
            callback()
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError as error:
            raise LinkError(f"the link to {self.name} has no event loop: it is closed") from error


class LinkCall(_Link[TargetMessage, DraftMessage]):
    """The target's end of a link, created by ``DraftClient.open_link``."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[speculation_pb2.SpeculateRequest, speculation_pb2.SpeculateResponse]",  # noqa: E501
        name: str,
    ) -> None:
        super().__init__(name)
        self._call = call
        self._status: tuple[grpc.StatusCode, grpc.aio.Metadata, grpc.aio.Metadata, str] | None = (
            None
        )
        call.add_done_callback(self._keep_status)

    async def _read(self) -> tuple[DraftMessage | bytes | None, int]:
        try:
            message: object = await self._call.read()
        except grpc.aio.AioRpcError as error:
            if self._status is None:
                raise
            if self._status[0] is grpc.StatusCode.OK:
                return None, 0
            # Kept in parts: an error that was raised refers to this link.
            raise grpc.aio.AioRpcError(*self._status, None) from error
        _refuse_undecodable(message, self.name)
        if not isinstance(message, speculation_pb2.SpeculateResponse):
            return None, 0
        return draft_message(message), message.ByteSize()

    async def _write(self, message: TargetMessage | bytes) -> None:
        await self._call.write(speculate_request(message))

    def _keep_status(self, call: "grpc.aio.Call") -> None:
        """Keep the status that the draft sent: gRPC calls this as soon as it has arrived.

        A write that fails replaces the status by INTERNAL, ``REPLACED``, often before the reader
        receives it (grpc issue 36066).
        """
        details = known(call.details())
        if details != REPLACED:
            trailers = known(call.trailing_metadata())
            self._status = known(call.code()), grpc.aio.Metadata(), trailers, details

    async def _end_call(self, reader: "asyncio.Task[None]") -> None:
        if not self._call.done():
            ended = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
            with contextlib.suppress(*ended, TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._call.done_writing()
            await asyncio.wait({reader}, timeout=SERVER_END_SECONDS)
        self._call.cancel()


class LinkServerCall(_Link[DraftMessage, TargetMessage]):
    """The draft's end of a link, created by its servicer: ``async with LinkServerCall(context)``.

    The handler is a coroutine that yields nothing. If the connection is lost, gRPC cancels the
    handler, so the handler cleans up in ``finally``.
    """

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[speculation_pb2.SpeculateRequest, speculation_pb2.SpeculateResponse]",  # noqa: E501
        bounds: OpeningBounds = NO_BOUNDS,
    ) -> None:
        """Prepare the link of a call; ``bounds`` are those of its openings."""
        super().__init__(context.peer())
        self._context = context
        self._bounds = bounds

    async def _read(self) -> tuple[TargetMessage | bytes | None, int]:
        message: object = await self._context.read()
        _refuse_undecodable(message, self.name)
        if not isinstance(message, speculation_pb2.SpeculateRequest):
            return None, 0
        return target_message(message, self._bounds), message.ByteSize()

    async def _write(self, message: DraftMessage | bytes) -> None:
        await self._context.write(speculate_response(message))

    async def _end_call(self, reader: "asyncio.Task[None]") -> None:
        """GRPC ends the call when the handler returns."""


def _named_error(error: SSDError, name: str) -> LinkError:
    if isinstance(error, FrameError | HandshakeError):
        return error
    if isinstance(error, AccessError):
        return HandshakeError("credentials", str(error))
    text = str(error)
    return LinkError(text if name in text else f"{name}: {text}")


def _refuse_undecodable(message: object, name: str) -> None:
    if isinstance(message, Undecodable):
        raise FrameError(f"{name}: {message.reason}")
