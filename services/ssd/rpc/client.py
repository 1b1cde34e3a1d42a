"""Clients of a target and of a draft. Every failed call raises an ``SSDError``.

- ``AccessError``: the server refuses the credentials, or the client the server's certificate.
- ``NotReadyError``: the server cannot be reached or has stopped; the message names it.
- ``DeadlineError``: the deadline of the call passed.
- An error that the server raised is raised again with its class and fields.
- ``ssd.errors.CancelledError``: the server cancelled the call, or the client was closed during it.
- ``asyncio.CancelledError``: the caller cancelled its own task.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.errors import (
    AbandonedTextError,
    CancelledError,
    FieldError,
    IncompleteTextError,
    NotReadyError,
    SSDError,
    UnknownHostError,
)
from ssd.observability import log
from ssd.rpc.bounds import MAX_ADMIN_BYTES, MAX_MESSAGE_BYTES
from ssd.rpc.call_guard import tolerant
from ssd.rpc.codec import (
    Conversation,
    GenerateCall,
    ModelInfo,
    SpeculationChange,
    generate_request,
    generation_chunk,
    model_info,
    set_speculation_request,
)
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials, Pem
from ssd.rpc.link import LinkCall
from ssd.rpc.pool_codec import DraftStatus, PoolStatus, draft_status, pool_status
from ssd.rpc.status import REQUEST_ID_KEY, from_rpc_error, is_answer
from ssd.types import FinishReason, GenerationChunk, Mode, SamplingParams, TokenId
from ssd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    speculation_pb2,
    speculation_pb2_grpc,
)

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "ssd.v1.AdminService"}],
            "maxResponseMessageBytes": MAX_ADMIN_BYTES,
        }
    ]
}
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
"""Each client has its own channel, so clients do not share the backoff of an unreachable peer.
``min_reconnect_backoff_ms`` is the maximum time of a connect: on a busy machine it can take over a
second. The other two values set the pause after a failed connect. A connection whose peer does not
answer a ping ends after ``ping_timeout_ms``, whose default is 60 s."""
TARGET_OPTIONS = (*OPTIONS, ("grpc.lb_policy_name", "round_robin"))
"""Requests rotate over the addresses of a name that are reachable."""
CALL_SECONDS = 30.0
"""Deadline of calls with a single response."""
READY_SECONDS = 30.0
"""Default of the maximum time that a request waits for a ready target."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
"""Pauses between attempts of a request; each pause is twice the previous one."""
_PROBE_SECONDS = 0.05
"""Pause between two health checks in ``wait_ready``."""

Prompt = str | Sequence[TokenId] | Conversation


class _Client:
    """A channel to one endpoint, opened at the first call. Asyncio loop; ``close`` ends it.

    After a change of the certificates, new calls use a new channel; running calls keep theirs.
    """

    _options = OPTIONS

    def __init__(self, endpoint: str, credentials: ClientCredentials = NO_CREDENTIALS) -> None:
        """Construct.

        Raises:
            SettingsError: the token would be sent to another machine in plain text.
        """
        credentials.check(endpoint)
        self.endpoint = endpoint
        self._credentials = credentials
        self._certificates: Pem | None = None
        """Certificates of the channel that is open."""
        self._is_closed = False
        self._opened: grpc.aio.Channel | None = None
        self._num_calls: Counter[grpc.aio.Channel] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running calls and close all channels; later calls fail. Idempotent."""
        self._is_closed = True
        channels = {*self._num_calls, *filter(None, [self._opened])}
        self._opened = None
        for channel in channels:
            await channel.close(None)

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Wait until ``grpc.health.v1`` of the server returns SERVING.

        Raises:
            NotReadyError: the time passed; names the endpoint and its last response.
        """
        last = "no response"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while True:
                    try:
                        if await self._is_serving():
                            return
                        last = "it runs, but does not serve yet"
                    except SSDError as error:
                        last = str(error)
                    await asyncio.sleep(_PROBE_SECONDS)
        raise NotReadyError(f"{self.endpoint} is not ready after {timeout_seconds:g} s: {last}")

    async def _is_serving(self) -> bool:
        answer = await self._call(
            health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest()
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._is_closed:
            raise CancelledError(f"the client of {self.endpoint} is closed")
        certificates = self._credentials.certificates()
        if self._opened is None or certificates is not self._certificates:
            if self._opened is not None:
                # Closed with the next call that ends, or with its own last one.
                self._num_calls[self._opened] += 0
            self._certificates = certificates
            self._opened = self._credentials.open_channel(self.endpoint, self._options)
        return self._opened

    async def _abandon(self, channel: grpc.aio.Channel) -> None:
        """Use a new channel for the next call; running calls keep the old one."""
        if self._opened is channel:
            self._opened = None
            if channel not in self._num_calls:
                await channel.close(None)

    async def _leave(self, channel: grpc.aio.Channel, error: NotReadyError) -> None:
        """Abandon a channel whose server is not ready.

        Behind a virtual address, a connection stays with its target even while that drains. A
        channel without a connection is kept, so that gRPC pauses between its attempts.
        """
        if is_answer(error.__cause__):
            await self._abandon(channel)

    def _in_call(self, make_stub: Callable[[grpc.aio.Channel], Any]) -> "_CallContext":
        """Return the context of a call: a stub whose channel stays open. Enter it at once."""
        channel = self._channel
        stub = make_stub(channel)
        self._num_calls[channel] += 1
        return _CallContext(self.endpoint, stub, partial(self._end_call, channel))

    async def _end_call(self, channel: grpc.aio.Channel) -> None:
        self._num_calls[channel] -= 1
        for unused in [other for other, calls in self._num_calls.items() if not calls]:
            del self._num_calls[unused]
            if unused is not self._opened:
                await unused.close(None)

    async def _call(
        self, stub: Callable[[grpc.aio.Channel], Any], method: str, request: Any
    ) -> Any:
        async with self._in_call(stub) as ready:
            return await getattr(ready, method)(
                request, timeout=CALL_SECONDS, metadata=self._credentials.metadata()
            )


class TargetClient(_Client):
    """Client of a target.

    A request is sent again if the target is not ready or the connection is lost before the first
    token arrives: to another address of the endpoint, or to the same address when it is ready. The
    only effect is the lost time. After its first token a request is not sent again.
    """

    _options = TARGET_OPTIONS

    def __init__(
        self,
        endpoint: str,
        *,
        credentials: ClientCredentials = NO_CREDENTIALS,
        ready_seconds: float = READY_SECONDS,
        on_wait: Callable[[NotReadyError], None] = lambda _error: None,
    ) -> None:
        """Prepare the client.

        Args:
            endpoint: ``host:port``, or ``dns:///host:port`` for all addresses of a name.
            credentials: certificates and token; plain text without a token by default.
            ready_seconds: maximum time that ``generate`` waits for a ready target; 0: no wait.
            on_wait: called with the cause when a request starts to wait.
        """
        super().__init__(endpoint, credentials)
        self._ready_seconds = ready_seconds
        self._is_known = False
        """Whether the name of the server has had an address."""
        self._on_wait = on_wait

    async def generate(
        self,
        prompt: Prompt | GenerateCall,
        sampling: SamplingParams | None = None,
        mode: Mode = Mode.AUTO,
        *,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Continue a prompt. ``aclose`` before the end cancels the call.

        Args:
            prompt: text, token ids or a conversation; or a ``GenerateCall``, which replaces
                ``sampling`` and ``mode``.
            sampling: parameters; None takes the defaults.
            mode: how rounds run.
            timeout_seconds: maximum time of all attempts together.
            request_id: id in the target's log and errors; empty: the target draws one.

        Raises:
            UnknownHostError: the name of the server never had an address.
            NotReadyError: no target was ready within ``ready_seconds`` or ``timeout_seconds``.
            IncompleteTextError: the connection was lost after the first chunk, or the target, which
                stops, cancelled the request.
            SSDError: see the module.
        """
        if not isinstance(prompt, GenerateCall):
            content = prompt if isinstance(prompt, str | Conversation) else tuple(prompt)
            prompt = GenerateCall(prompt=content, sampling=sampling or SamplingParams(), mode=mode)
        request = generate_request(prompt)
        of_request = ((REQUEST_ID_KEY, request_id),) if request_id else ()
        metadata = (*of_request, *log.trace_headers.get())
        loop = asyncio.get_running_loop()
        started_at, pause_seconds = loop.time(), 0.0
        wait_seconds = self._ready_seconds
        if timeout_seconds is not None:
            wait_seconds = min(wait_seconds, timeout_seconds)
        while True:
            left_seconds = (
                None if timeout_seconds is None else timeout_seconds + started_at - loop.time()
            )
            has_begun, num_tokens, channel = False, 0, self._channel
            try:
                async with self._in_call(generate_pb2_grpc.GenerateServiceStub) as stub:
                    call = stub.Generate(
                        request,
                        timeout=left_seconds,
                        metadata=(*metadata, *self._credentials.metadata()),
                    )
                    try:
                        async for message in call:
                            chunk = generation_chunk(message)
                            _check_start(chunk, has_begun=has_begun)
                            has_begun = self._is_known = True
                            num_tokens += len(chunk.token_ids)
                            yield _without_cancellation(chunk)
                            _check_end(chunk)
                    finally:
                        call.cancel()
                return
            except NotReadyError as error:
                if has_begun:
                    raise _incomplete(self.endpoint, num_tokens, error) from error
                is_first, pause_seconds = pause_seconds == 0, _next_pause(pause_seconds)
                next_seconds = loop.time() - started_at + pause_seconds
                if self._has_no_server(error) or next_seconds > wait_seconds:
                    await self._leave(channel, error)
                    raise
                if is_first:
                    self._on_wait(error)
            await self._abandon(channel)
            await asyncio.sleep(pause_seconds)

    def _has_no_server(self, error: NotReadyError) -> bool:
        """Whether the host is unknown; a server that restarts may have no address for a while."""
        self._is_known |= not isinstance(error, UnknownHostError)
        return not self._is_known

    async def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Convert text to token ids."""
        try:
            request = generate_pb2.TokenizeRequest(text=text)
        except ValueError as error:
            raise FieldError("text", f"is not UTF-8: {error}") from error
        answer = await self._call(generate_pb2_grpc.GenerateServiceStub, "Tokenize", request)
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str:
        """Convert token ids to text."""
        try:
            request = generate_pb2.DetokenizeRequest(token_ids=token_ids)
        except ValueError as error:
            raise FieldError("token_ids", str(error)) from error
        answer = await self._call(generate_pb2_grpc.GenerateServiceStub, "Detokenize", request)
        return str(answer.text)

    async def model_info(self) -> ModelInfo:
        """Return the served model and its settings."""
        request = generate_pb2.GetModelInfoRequest()
        stub, channel = generate_pb2_grpc.GenerateServiceStub, self._channel
        try:
            answer = await self._call(stub, "GetModelInfo", request)
        except NotReadyError as error:
            await self._leave(channel, error)
            raise
        return model_info(answer)

    async def pool_status(self) -> PoolStatus:
        """Return the state of the pool: links, sessions, hit rates."""
        request = admin_pb2.GetPoolStatusRequest()
        return pool_status(
            await self._call(admin_pb2_grpc.AdminServiceStub, "GetPoolStatus", request)
        )

    async def watch_pool(self) -> AsyncGenerator[PoolStatus, None]:
        """Return the state of the pool now and after each change, until the target stops."""
        async with self._in_call(admin_pb2_grpc.AdminServiceStub) as stub:
            call = stub.WatchPool(
                admin_pb2.WatchPoolRequest(), metadata=self._credentials.metadata()
            )
            try:
                async for message in call:
                    yield pool_status(message.pool)
            finally:
                call.cancel()

    async def set_speculation(self, change: SpeculationChange) -> None:
        """Change how the target speculates, until it restarts."""
        request = set_speculation_request(change)
        await self._call(admin_pb2_grpc.AdminServiceStub, "SetSpeculation", request)

    async def drain(self, deadline_ms: int) -> int:
        """Start a drain; return the number of running and waiting requests."""
        request = admin_pb2.DrainTargetRequest(deadline_ms=deadline_ms)
        answer = await self._call(admin_pb2_grpc.AdminServiceStub, "Drain", request)
        return int(answer.requests)


class DraftClient(_Client):
    """Client of a draft."""

    async def open_link(self) -> LinkCall:
        """Open a link, which the caller closes. ``receive`` raises if the draft is unreachable."""
        # The stub's deserializer would make gRPC log a stack trace for each undecodable message.
        speculate: Any = self._channel.stream_stream(
            "/ssd.v1.SpeculationService/Speculate",
            request_serializer=speculation_pb2.SpeculateRequest.SerializeToString,
            response_deserializer=tolerant(speculation_pb2.SpeculateResponse.FromString),
        )
        link = LinkCall(speculate(metadata=self._credentials.metadata()), self.endpoint)
        link.start()
        return link

    async def get_status(self) -> DraftStatus:
        """Return the state of the draft."""
        request = speculation_pb2.GetStatusRequest()
        stub = speculation_pb2_grpc.SpeculationServiceStub
        return draft_status(await self._call(stub, "GetStatus", request))

    async def drain(self, deadline_ms: int) -> int:
        """Start a drain; return the number of open sessions."""
        request = speculation_pb2.DrainDraftRequest(deadline_ms=deadline_ms)
        answer = await self._call(speculation_pb2_grpc.SpeculationServiceStub, "Drain", request)
        return int(answer.sessions)


class _CallContext(contextlib.AbstractAsyncContextManager[Any, None]):
    """The context of a call; converts exceptions of gRPC to an ``SSDError``.

    It is not a generator, because an ending event loop closes open generators in any order: an
    inner one before the one that uses it.
    """

    def __init__(self, endpoint: str, stub: Any, on_exit: Callable[[], Awaitable[None]]) -> None:
        self._endpoint = endpoint
        self._stub = stub
        self._on_exit = on_exit

    async def __aenter__(self) -> Any:
        return self._stub

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        converted = _as_ssd_error(error, self._endpoint)
        await self._on_exit()
        task = asyncio.current_task()
        if converted is not None and task is not None and task.cancelling():
            # The caller's own cancellation may also arrive as the status of its call.
            raise asyncio.CancelledError from error
        if converted is not None:
            raise converted from error


def _without_cancellation(chunk: GenerationChunk) -> GenerationChunk:
    is_cancelled = chunk.finish_reason is FinishReason.CANCELLED
    return replace(chunk, finish_reason=None) if is_cancelled else chunk


def _check_start(chunk: GenerationChunk, *, has_begun: bool) -> None:
    """Raise ``NotReadyError`` if the target cancelled the request while it waited."""
    is_waiting = not (has_begun or chunk.token_ids or chunk.text)
    if is_waiting and chunk.finish_reason is FinishReason.CANCELLED:
        raise NotReadyError("the target stops; it cancelled the request before the first token")


def _check_end(chunk: GenerationChunk) -> None:
    """Raise ``NotReadyError`` if the target cancelled the request: a drain passed its deadline."""
    if chunk.finish_reason is FinishReason.CANCELLED:
        raise NotReadyError(
            "the target cancelled the request, because it stops or its tokens were read too late; "
            "the text is incomplete"
        )


def _incomplete(endpoint: str, num_tokens: int, error: NotReadyError) -> IncompleteTextError:
    cause = error.__cause__
    if cause is None:
        return AbandonedTextError(str(error))
    reason = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else str(error)
    return IncompleteTextError(
        f"the connection to {endpoint} was lost after {num_tokens} tokens, "
        f"the text is incomplete: {reason}"
    )


def _as_ssd_error(error: BaseException | None, endpoint: str) -> SSDError | None:
    """Convert an exception of gRPC; None for any other."""
    match error:
        case grpc.aio.AioRpcError():
            return from_rpc_error(error, endpoint)
        case grpc.aio.UsageError():
            return CancelledError(f"the client of {endpoint} is closed")
        case asyncio.CancelledError():
            task = asyncio.current_task()
            # gRPC raises it also if only its call was cancelled, not this task.
            if task is not None and not task.cancelling():
                return CancelledError(f"the client of {endpoint} was closed during the call")
    return None


def _next_pause(pause_seconds: float) -> float:
    return min(max(_FIRST_PAUSE_SECONDS, 2 * pause_seconds), _LONGEST_PAUSE_SECONDS)
