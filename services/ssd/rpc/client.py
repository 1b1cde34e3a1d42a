"""Clients of a target and of a draft. Whatever goes wrong is an ``SSDError``.

A server that cannot be reached, or goes away, is a ``NotReadyError`` that names it, a deadline a
``DeadlineError``, and an error that the server raised is raised here again, class and fields
included. Three kinds of cancellation differ: a caller that cancels its task gets
``asyncio.CancelledError``; a call that the server cancels for a reason, or that ends because its
client is closed, is a ``CancelledError`` of ours that names which.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.errors import CancelledError, FieldError, IncompleteTextError, NotReadyError, SSDError
from ssd.rpc.bounds import MAX_MESSAGE_BYTES
from ssd.rpc.call_guard import tolerant
from ssd.rpc.codec import (
    Conversation,
    GenerateCall,
    ModelInfo,
    generate_request,
    generation_chunk,
    model_info,
)
from ssd.rpc.link import MAX_OUTGOING, LinkCall
from ssd.rpc.pool_codec import DraftStatus, PoolStatus, draft_status, pool_status
from ssd.rpc.status import from_rpc_error
from ssd.types import GenerationChunk, Mode, SamplingParams, TokenId
from ssd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    speculation_pb2,
    speculation_pb2_grpc,
)

OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
"""A channel of its own for each client, so that one dead peer's backoff is never another's.
``min_reconnect_backoff_ms`` is how long a connect may take: a server on a busy machine needs over a
second for it at times. The pause after a connect that failed is given by the other two."""
TARGET_OPTIONS = (*OPTIONS, ("grpc.lb_policy_name", "round_robin"))
"""Of the addresses of a name, those that answer take turns."""
CALL_SECONDS = 30.0
"""Deadline of calls that ask a question."""
READY_SECONDS = 30.0
"""How long a request waits for a target that is ready, unless its client has another bound."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
"""Between two attempts of a request; each pause is twice the one before."""
_PROBE_SECONDS = 0.05
"""Between two questions whether a server is ready."""

Prompt = str | Sequence[TokenId] | Conversation


class _Client:
    """A lazily made channel to one endpoint. Asyncio loop; use ``async with`` or ``close``."""

    _options = OPTIONS

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._is_closed = False
        self._opened: grpc.aio.Channel | None = None
        self._num_calls: Counter[grpc.aio.Channel] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and close all channels; no call begins after it. Idempotent."""
        self._is_closed = True
        channels = {*self._num_calls, *filter(None, [self._opened])}
        self._opened = None
        for channel in channels:
            await channel.close(None)

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Wait until the server says over ``grpc.health.v1`` that it serves.

        Raises:
            NotReadyError: it does not within the time; names the endpoint and what it last said.
        """
        heard = "nothing was heard"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while True:
                    try:
                        if await self._is_serving():
                            return
                        heard = "it is up and does not serve yet"
                    except SSDError as error:
                        heard = str(error)
                    await asyncio.sleep(_PROBE_SECONDS)
        raise NotReadyError(f"{self.endpoint} is not ready after {timeout_seconds:g} s: {heard}")

    async def _is_serving(self) -> bool:
        answer = await self._ask(
            health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest()
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._is_closed:
            raise CancelledError(f"the client of {self.endpoint} is closed")
        if self._opened is None:
            self._opened = grpc.aio.insecure_channel(self.endpoint, options=self._options)
        return self._opened

    async def _leave(self, channel: grpc.aio.Channel) -> None:
        """Resolve and connect anew for the next call; calls that run keep this channel."""
        if self._opened is channel:
            self._opened = None
            if channel not in self._num_calls:
                await channel.close(None)

    def _calling(self, make_stub: Callable[[grpc.aio.Channel], Any]) -> "_Calling":
        """A stub of the channel, which stays open inside; to be entered at once."""
        channel = self._channel
        stub = make_stub(channel)
        self._num_calls[channel] += 1
        return _Calling(self.endpoint, stub, partial(self._end_call, channel))

    async def _end_call(self, channel: grpc.aio.Channel) -> None:
        self._num_calls[channel] -= 1
        if not self._num_calls[channel]:
            del self._num_calls[channel]
            if channel is not self._opened:
                await channel.close(None)

    async def _ask(self, stub: Callable[[grpc.aio.Channel], Any], method: str, request: Any) -> Any:
        async with self._calling(stub) as ready:
            return await getattr(ready, method)(request, timeout=CALL_SECONDS)


class TargetClient(_Client):
    """Speaks to a target.

    A request of which no token has arrived is sent again if its target refuses it as not ready or
    the connection is lost: to another address of the endpoint, or to the same one once it is ready.
    A target may have computed on it already; that has no effect but the time. After its first token
    nothing is repeated.
    """

    _options = TARGET_OPTIONS

    def __init__(
        self,
        endpoint: str,
        *,
        ready_seconds: float = READY_SECONDS,
        on_wait: Callable[[NotReadyError], None] = lambda _error: None,
    ) -> None:
        """Prepare the client.

        Args:
            endpoint: ``host:port``, or ``dns:///host:port`` for all addresses of a name.
            ready_seconds: how long ``generate`` waits for a target that is ready; 0: not at all.
            on_wait: called with the reason when a request begins to wait.
        """
        super().__init__(endpoint)
        self._ready_seconds = ready_seconds
        self._on_wait = on_wait

    async def generate(
        self,
        prompt: Prompt | GenerateCall,
        sampling: SamplingParams | None = None,
        mode: Mode = Mode.AUTO,
        *,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Continue a prompt; ``aclose`` before the end cancels the call and frees what it holds.

        ``sampling`` None leaves everything to the server, which draws a seed and returns it in the
        first chunk; otherwise all of it is sent, the seed included. A ``GenerateCall`` as prompt
        holds everything itself. ``timeout_seconds`` bounds all attempts together.

        Raises:
            NotReadyError: no target was ready within ``ready_seconds`` or the time-out.
            IncompleteTextError: the target went away after the first chunk.
            SSDError: see the module.
        """
        if isinstance(prompt, GenerateCall):
            request = generate_request(prompt)
        else:
            request = _request(prompt, sampling, mode)
        loop = asyncio.get_running_loop()
        started_at, pause_seconds = loop.time(), 0.0
        wait_seconds = self._ready_seconds
        if timeout_seconds is not None:
            wait_seconds = min(wait_seconds, timeout_seconds)
        while True:
            spent_seconds = loop.time() - started_at
            left_seconds = None if timeout_seconds is None else timeout_seconds - spent_seconds
            has_begun, num_tokens, channel = False, 0, self._channel
            try:
                async with self._calling(generate_pb2_grpc.GenerateServiceStub) as stub:
                    call = stub.Generate(request, timeout=left_seconds)
                    try:
                        async for message in call:
                            has_begun, chunk = True, generation_chunk(message)
                            num_tokens += len(chunk.token_ids)
                            yield chunk
                    finally:
                        call.cancel()
                return
            except NotReadyError as error:
                if has_begun:
                    raise _incomplete(self.endpoint, num_tokens, error) from error
                spent_seconds = loop.time() - started_at
                is_first, pause_seconds = pause_seconds == 0, _next_pause(pause_seconds)
                if spent_seconds + pause_seconds > wait_seconds:
                    raise
                if is_first:
                    self._on_wait(error)
            # A connection through a virtual address stays with one target, even if that drains.
            await self._leave(channel)
            await asyncio.sleep(pause_seconds)

    async def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Text to token ids."""
        try:
            request = generate_pb2.TokenizeRequest(text=text)
        except ValueError as error:
            raise FieldError("text", f"is not UTF-8: {error}") from error
        answer = await self._ask(generate_pb2_grpc.GenerateServiceStub, "Tokenize", request)
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str:
        """Token ids to text."""
        try:
            request = generate_pb2.DetokenizeRequest(token_ids=token_ids)
        except ValueError as error:
            raise FieldError("token_ids", str(error)) from error
        answer = await self._ask(generate_pb2_grpc.GenerateServiceStub, "Detokenize", request)
        return str(answer.text)

    async def model_info(self) -> ModelInfo:
        """The model that is served and how."""
        request = generate_pb2.GetModelInfoRequest()
        stub = generate_pb2_grpc.GenerateServiceStub
        return model_info(await self._ask(stub, "GetModelInfo", request))

    async def pool_status(self) -> PoolStatus:
        """Links, sessions, hit rates."""
        request = admin_pb2.GetPoolStatusRequest()
        return pool_status(
            await self._ask(admin_pb2_grpc.AdminServiceStub, "GetPoolStatus", request)
        )

    async def watch_pool(self) -> AsyncGenerator[PoolStatus, None]:
        """The pool now and whenever it has changed, until the target stops or this is closed."""
        async with self._calling(admin_pb2_grpc.AdminServiceStub) as stub:
            call = stub.WatchPool(admin_pb2.WatchPoolRequest())
            try:
                async for message in call:
                    yield pool_status(message.pool)
            finally:
                call.cancel()

    async def drain(self, deadline_ms: int) -> int:
        """Ask it to leave; returns the requests that were running or waiting."""
        request = admin_pb2.DrainTargetRequest(deadline_ms=deadline_ms)
        answer = await self._ask(admin_pb2_grpc.AdminServiceStub, "Drain", request)
        return int(answer.requests)


class DraftClient(_Client):
    """Speaks to a draft."""

    async def open_link(self, max_outgoing: int = MAX_OUTGOING) -> LinkCall:
        """Dial; the first ``receive`` tells whether the draft is there. Close it when done."""
        # Not the stub's: gRPC logs a stack for each message that cannot be decoded.
        speculate: Any = self._channel.stream_stream(
            "/ssd.v1.SpeculationService/Speculate",
            request_serializer=speculation_pb2.SpeculateRequest.SerializeToString,
            response_deserializer=tolerant(speculation_pb2.SpeculateResponse.FromString),
        )
        link = LinkCall(speculate(), self.endpoint, max_outgoing)
        link.start()
        return link

    async def get_status(self) -> DraftStatus:
        """What the draft is doing."""
        request = speculation_pb2.GetStatusRequest()
        stub = speculation_pb2_grpc.SpeculationServiceStub
        return draft_status(await self._ask(stub, "GetStatus", request))

    async def drain(self, deadline_ms: int) -> int:
        """Ask it to leave; returns the sessions that were open."""
        request = speculation_pb2.DrainDraftRequest(deadline_ms=deadline_ms)
        answer = await self._ask(speculation_pb2_grpc.SpeculationServiceStub, "Drain", request)
        return int(answer.sessions)


class _Calling(contextlib.AbstractAsyncContextManager[Any, None]):
    """A stub while calls are made; what gRPC raises inside becomes an ``SSDError``.

    Not a generator: a loop that ends closes the generators that are left in any order, so that an
    inner one could be closed before the one that uses it.
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
        ours = _as_ours(error, self._endpoint)
        await self._on_exit()
        if ours is not None:
            raise ours from error


def _incomplete(endpoint: str, num_tokens: int, error: NotReadyError) -> IncompleteTextError:
    cause = error.__cause__
    reason = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else str(error)
    return IncompleteTextError(
        f"the connection to {endpoint} was lost after {num_tokens} tokens, "
        f"the text is incomplete: {reason}"
    )


def _as_ours(error: BaseException | None, endpoint: str) -> SSDError | None:
    """What gRPC raised as an error of ours; None for anything else."""
    match error:
        case grpc.aio.AioRpcError():
            return from_rpc_error(error, endpoint)
        case grpc.aio.UsageError():
            return CancelledError(f"the client of {endpoint} is closed")
        case asyncio.CancelledError():
            task = asyncio.current_task()
            # gRPC raises it also where its own call was cancelled and this task was not.
            if task is not None and not task.cancelling():
                return CancelledError(f"the client of {endpoint} was closed during the call")
    return None


def _next_pause(pause_seconds: float) -> float:
    return min(max(_FIRST_PAUSE_SECONDS, 2 * pause_seconds), _LONGEST_PAUSE_SECONDS)


def _request(
    prompt: Prompt, sampling: SamplingParams | None, mode: Mode
) -> generate_pb2.GenerateRequest:
    whole = prompt if isinstance(prompt, str | Conversation) else tuple(prompt)
    if sampling is None:
        request = generate_request(GenerateCall(prompt=whole, mode=mode))
        request.ClearField("sampling")
        return request
    return generate_request(
        GenerateCall(
            prompt=whole,
            sampling=sampling,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            mode=mode,
        )
    )
