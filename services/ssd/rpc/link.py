"""The two ends of a link: typed messages over one bidirectional gRPC stream.

``send`` may be called from any thread, costs microseconds and never blocks: messages wait in a
bounded outbox that a task of the event loop drains in order. A task reads ahead: frames go straight
to whoever asked for them, on the loop's thread and with no hop between, all else waits for
``receive``. A loop is woken only when its outbox was empty.

*Decision*: asyncio gRPC streams, on the loop's thread. *Because*: the round trip of a 1 KiB frame,
from a thread of one process through another and back, took 0.31 to 0.37 ms in the median and 0.5
to 3.8 ms at 99 % (six runs of 2000 on two CPUs shared with other work), and one thread fewer
competes for the interpreter with the step thread. *Not chosen*: synchronous gRPC with two threads a
link; not measured. *Revisit when* the median passes 1 ms.
"""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio

from ssd.errors import FrameError, HandshakeError, LinkError, SSDError
from ssd.rpc.bounds import LARGEST_ID
from ssd.rpc.call_guard import Undecodable
from ssd.rpc.link_codec import (
    draft_message,
    speculate_request,
    speculate_response,
    target_message,
)
from ssd.rpc.link_life import Allowance
from ssd.rpc.status import from_rpc_error
from ssd.telemetry import get_logger
from ssd.types import DraftMessage, TargetMessage
from ssd.v1 import speculation_pb2

_log = get_logger(__name__)
MAX_OUTGOING = 1024
"""Messages that wait to be sent at most."""
MAX_INCOMING = 1024
"""Messages that wait to be read at most."""
MAX_EARLY_BYTES = 1024 * 1024
"""Of frames that came before they were wanted. Peers send none before the handshake is over."""
MESSAGES_PER_SECOND = 2_000.0
"""Messages of 16 KiB that are taken from one peer in the long run, smaller ones count as such: a
third of the event loop's time. Unpacking tables takes 0.16 ms for one of 1.2 KiB and 0.7 ms for 64
of them in a frame, so that an honest draft with 64 sessions is not held up at 300 rounds a second.
"""
BURST_MESSAGES = 4_000.0
"""That many at once."""
UNIT_BYTES = 16 * 1024
WRITE_SECONDS = 5.0
"""A peer that takes no message for so long is given up."""
FLUSH_SECONDS = 0.25
"""How long a close waits for what is queued to leave."""
FAREWELL_SECONDS = 0.5
"""How long a client's close waits for the server to end the call in good order."""

Said = TypeVar("Said")
Heard = TypeVar("Heard")
Wire = TypeVar("Wire")


class _Link(ABC, Generic[Said, Heard]):
    """One end. Belongs to its event loop; only ``send`` and ``close_soon`` may come from elsewhere.

    Enter it to start its tasks, leave it to close it.
    """

    def __init__(self, name: str, max_outgoing: int) -> None:
        self.name = name
        self._max_outgoing = max_outgoing
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._outgoing: deque[Said | bytes] = deque()
        self._is_idle = True
        self._refusal: LinkError | None = None
        self._wake = asyncio.Event()
        self._incoming: asyncio.Queue[Heard | LinkError | None] = asyncio.Queue()
        self._has_ended = False
        self._early: list[bytes] = []
        self._allowance = Allowance(MESSAGES_PER_SECOND, BURST_MESSAGES)
        self._on_payload: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to read and write; once."""
        assert self._reader is None
        self._reader = self._loop.create_task(self._read_all())
        self._reader.add_done_callback(self._notice_crash)
        self._writer = self._loop.create_task(self._write_all())

    def send(self, message: Said | bytes) -> None:
        """Queue a control message or the bytes of a frame, in order. Any thread; never blocks.

        Raises:
            LinkError: the link is closed or lost, or ``max_outgoing`` messages wait already.
        """
        with self._lock:
            if self._refusal is not None:
                raise LinkError(str(self._refusal))
            if len(self._outgoing) >= self._max_outgoing:
                raise LinkError(
                    f"{self.name} takes nothing: {self._max_outgoing} messages wait to be sent"
                )
            self._outgoing.append(message)
            must_wake, self._is_idle = self._is_idle, False
        if must_wake:
            self._call_in_loop(self._wake.set)

    async def receive(self) -> Heard | None:
        """The next message that is not a frame; None once the peer or this end has said goodbye.

        May be cancelled without loss. For one reader at a time.

        Raises:
            HandshakeError: the peer refused, or greeted with nonsense.
            FrameError: the peer sent a malformed message.
            LinkError: the peer is gone; names it.
        """
        found = await self._incoming.get()
        if found is None or isinstance(found, LinkError):
            self._incoming.put_nowait(found)
            if found is not None:
                raise found
        return found

    def hear_frames(
        self, on_payload: Callable[[bytes], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Deliver frames from now on, those that came early first; ``on_lost`` is called once."""
        self._on_payload, self._on_lost = on_payload, on_lost
        early, self._early = self._early, []
        for payload in early:
            on_payload(payload)
        if self._has_ended:
            self._tell_lost(self._refusal or LinkError(f"{self.name} has ended"))

    def ignore_frames(self) -> None:
        """Drop frames from now on, and tell nobody of the end."""
        self._on_payload, self._on_lost = _drop, None

    async def close(self) -> None:
        """Send what is queued, within bounds, and end the link. Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    def close_soon(self) -> None:
        """Begin to close; from any thread."""
        with self._lock:
            self._refusal = self._refusal or LinkError(f"the link to {self.name} is closed")
        with contextlib.suppress(LinkError):
            self._call_in_loop(self._begin_close)

    @abstractmethod
    async def _read(self) -> tuple[Heard | bytes | None, int]:
        """The next message or frame and its bytes on the wire; None at an orderly end."""

    @abstractmethod
    async def _write(self, message: Said | bytes) -> None:
        """Put a message on the wire."""

    @abstractmethod
    async def _say_goodbye(self, reader: "asyncio.Task[None]") -> None:
        """End the call, in good order if it can be had."""

    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        self._on_lost = None
        with self._lock:
            self._refusal = self._refusal or LinkError(f"the link to {self.name} is closed")
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            self._end(None)
            return
        if not self._has_ended and not writer.done():
            self._wake.set()
            await asyncio.wait({writer}, timeout=FLUSH_SECONDS)
        writer.cancel()
        await self._say_goodbye(reader)
        reader.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
        self._end(None)

    async def _read_all(self) -> None:
        try:
            while True:
                message, num_bytes = await self._read()
                if message is None:
                    break
                if isinstance(message, bytes):
                    self._deliver(message)
                elif self._incoming.qsize() < MAX_INCOMING:
                    self._incoming.put_nowait(message)
                else:
                    raise FrameError(f"{self.name} sent {MAX_INCOMING} messages that nobody read")
                # The peer waits, by flow control; what is read in the meantime is that of others.
                units = max(1.0, num_bytes / UNIT_BYTES)
                if pause := self._allowance.spend(units, self._loop.time()):
                    await asyncio.sleep(pause)
            self._end(None)
        except LinkError as error:
            self._end(error)
        except grpc.aio.AioRpcError as error:
            self._end(_as_link_error(from_rpc_error(error, self.name), self.name))
        except grpc.aio.BaseError as error:
            self._end(LinkError(f"{self.name} is gone: {error}"))

    async def _write_all(self) -> None:
        try:
            while True:
                while (message := self._pop()) is not None:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await self._write(message)
                if self._refusal is not None:
                    return
                await self._wake.wait()
                self._wake.clear()
        except TimeoutError:
            self._end(LinkError(f"{self.name} took no message for {WRITE_SECONDS:g} s"))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            # The reader learns why; until it has, nothing more is taken.
            with self._lock:
                self._refusal = self._refusal or LinkError(f"{self.name}: cannot send: {error}")
                self._outgoing.clear()

    def _pop(self) -> Said | bytes | None:
        with self._lock:
            if self._outgoing:
                return self._outgoing.popleft()
            self._is_idle = True
            return None

    def _deliver(self, payload: bytes) -> None:
        if self._on_payload is not None:
            self._on_payload(payload)
        elif sum(map(len, self._early)) + len(payload) <= MAX_EARLY_BYTES:
            self._early.append(payload)
        else:
            raise FrameError(f"{self.name} sent frames of {MAX_EARLY_BYTES} bytes too early")

    def _end(self, error: LinkError | None) -> None:
        """The link is over, by whatever cause; the first one counts."""
        if self._has_ended:
            return
        self._has_ended = True
        with self._lock:
            self._refusal = self._refusal or error or LinkError(f"{self.name} closed the link")
            self._outgoing.clear()
        self._wake.set()
        self._incoming.put_nowait(error)
        self._tell_lost(error or LinkError(f"{self.name} closed the link"))

    def _tell_lost(self, error: Exception) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(error)

    def _notice_crash(self, reader: "asyncio.Task[None]") -> None:
        """Whoever took a frame failed, or the call was cancelled: the link is over either way."""
        crash = None if reader.cancelled() else reader.exception()
        if crash is not None:
            _log.error("link_failed", peer=self.name, error=repr(crash))
        self._end(LinkError(f"the link to {self.name} broke"))

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self._loop_thread:
            callback()
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError as error:
            raise LinkError(f"the link to {self.name} has no event loop any more") from error


class LinkCall(_Link[TargetMessage, DraftMessage]):
    """The target's end. Made by ``DraftClient.open_link``."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[speculation_pb2.SpeculateRequest, speculation_pb2.SpeculateResponse]",  # noqa: E501
        name: str,
        max_outgoing: int = MAX_OUTGOING,
    ) -> None:
        super().__init__(name, max_outgoing)
        self._call = call

    async def _read(self) -> tuple[DraftMessage | bytes | None, int]:
        message: object = await self._call.read()
        _refuse_undecodable(message, self.name)
        if not isinstance(message, speculation_pb2.SpeculateResponse):
            return None, 0
        return draft_message(message), message.ByteSize()

    async def _write(self, message: TargetMessage | bytes) -> None:
        await self._call.write(speculate_request(message))

    async def _say_goodbye(self, reader: "asyncio.Task[None]") -> None:
        if not self._call.done():
            gone = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
            with contextlib.suppress(*gone, TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._call.done_writing()
            await asyncio.wait({reader}, timeout=FAREWELL_SECONDS)
        self._call.cancel()


class LinkServerCall(_Link[DraftMessage, TargetMessage]):
    """The draft's end, made by its servicer: ``async with LinkServerCall(context) as call``.

    The handler must be a coroutine that yields nothing. When the target vanishes without a goodbye,
    whoever listens for frames is told at once and gRPC cancels the handler, so clean up in
    ``finally``.
    """

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[speculation_pb2.SpeculateRequest, speculation_pb2.SpeculateResponse]",  # noqa: E501
        max_outgoing: int = MAX_OUTGOING,
        *,
        max_tokens: int = LARGEST_ID,
    ) -> None:
        """Take a call; ``max_tokens`` bounds openings, see ``target_message``."""
        super().__init__(context.peer(), max_outgoing)
        self._context = context
        self._max_tokens = max_tokens

    async def _read(self) -> tuple[TargetMessage | bytes | None, int]:
        message: object = await self._context.read()
        _refuse_undecodable(message, self.name)
        if not isinstance(message, speculation_pb2.SpeculateRequest):
            return None, 0
        return target_message(message, self._max_tokens), message.ByteSize()

    async def _write(self, message: DraftMessage | bytes) -> None:
        await self._context.write(speculate_response(message))

    async def _say_goodbye(self, reader: "asyncio.Task[None]") -> None:
        """The handler's return is the goodbye."""


class LinkFrames:
    """The frames of a link as a ``ByteStream``, for ``GrpcChannel``. Closing it closes the link."""

    def __init__(self, call: LinkCall | LinkServerCall) -> None:
        self._call = call

    def start(
        self, on_payload: Callable[[bytes], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See ``ByteStream``. Loop's thread."""
        self._call.hear_frames(on_payload, on_lost)

    def send(self, payload: bytes) -> None:
        """See ``ByteStream``."""
        self._call.send(payload)

    def close(self) -> None:
        """See ``ByteStream``."""
        self._call.ignore_frames()
        self._call.close_soon()


def _as_link_error(error: SSDError, name: str) -> LinkError:
    if isinstance(error, FrameError | HandshakeError):
        return error
    text = str(error)
    return LinkError(text if name in text else f"{name}: {text}")


def _refuse_undecodable(message: object, name: str) -> None:
    if isinstance(message, Undecodable):
        raise FrameError(f"{name}: {message.reason}")


def _drop(_payload: bytes) -> None:
    """Take a frame that nobody wants."""
