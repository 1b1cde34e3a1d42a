"""Clients of a target and of a draft. Whatever goes wrong is an ``SSDError``.

A server that cannot be reached, or goes away, is a ``NotReadyError`` that names it, a deadline a
``DeadlineError``, a call that the server cancelled for a reason a ``CancelledError``, and an error
that the server raised is raised here again, class and fields included.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.errors import FieldError, NotReadyError, SSDError
from ssd.rpc.bounds import MAX_MESSAGE_BYTES
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

OPTIONS: tuple[tuple[str, int], ...] = (
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
CALL_SECONDS = 30.0
"""Deadline of calls that ask a question."""
_PROBE_SECONDS = 0.05
"""Between two questions whether a server is ready."""

Answer = TypeVar("Answer")
Prompt = str | Sequence[TokenId] | Conversation


class _Client:
    """A lazily made channel to one endpoint. Asyncio loop; use ``async with`` or ``close``."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._opened: grpc.aio.Channel | None = None

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
        """Cancel what runs and close the channel. Idempotent."""
        channel, self._opened = self._opened, None
        if channel is not None:
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
        stub = self._stub(health_pb2_grpc.HealthStub)
        answer = await self._ask(stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._opened is None:
            self._opened = grpc.aio.insecure_channel(self.endpoint, options=OPTIONS)
        return self._opened

    def _stub(self, kind: Callable[[grpc.aio.Channel], Any]) -> Any:
        return kind(self._channel)

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        with _told_as_ours(self.endpoint):
            return await call


class TargetClient(_Client):
    """Speaks to a target."""

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
        first chunk; otherwise all of it is said, the seed included. A ``GenerateCall`` as prompt
        says everything itself.

        Raises:
            SSDError: see the module.
        """
        if isinstance(prompt, GenerateCall):
            request = generate_request(prompt)
        else:
            request = _request(prompt, sampling, mode)
        stub = self._stub(generate_pb2_grpc.GenerateServiceStub)
        call = stub.Generate(request, timeout=timeout_seconds)
        try:
            with _told_as_ours(self.endpoint):
                async for message in call:
                    yield generation_chunk(message)
        finally:
            call.cancel()

    async def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Text to token ids."""
        stub = self._stub(generate_pb2_grpc.GenerateServiceStub)
        try:
            request = generate_pb2.TokenizeRequest(text=text)
        except ValueError as error:
            raise FieldError("text", f"is not UTF-8: {error}") from error
        answer = await self._ask(stub.Tokenize(request, timeout=CALL_SECONDS))
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str:
        """Token ids to text."""
        stub = self._stub(generate_pb2_grpc.GenerateServiceStub)
        try:
            request = generate_pb2.DetokenizeRequest(token_ids=token_ids)
        except ValueError as error:
            raise FieldError("token_ids", str(error)) from error
        answer = await self._ask(stub.Detokenize(request, timeout=CALL_SECONDS))
        return str(answer.text)

    async def model_info(self) -> ModelInfo:
        """The model that is served and how."""
        stub = self._stub(generate_pb2_grpc.GenerateServiceStub)
        request = generate_pb2.GetModelInfoRequest()
        return model_info(await self._ask(stub.GetModelInfo(request, timeout=CALL_SECONDS)))

    async def pool_status(self) -> PoolStatus:
        """Links, sessions, hit rates."""
        stub = self._stub(admin_pb2_grpc.AdminServiceStub)
        request = admin_pb2.GetPoolStatusRequest()
        return pool_status(await self._ask(stub.GetPoolStatus(request, timeout=CALL_SECONDS)))

    async def watch_pool(self) -> AsyncGenerator[PoolStatus, None]:
        """The pool now and whenever it has changed, until the target stops or this is closed."""
        call = self._stub(admin_pb2_grpc.AdminServiceStub).WatchPool(admin_pb2.WatchPoolRequest())
        try:
            with _told_as_ours(self.endpoint):
                async for message in call:
                    yield pool_status(message.pool)
        finally:
            call.cancel()

    async def drain(self, deadline_ms: int) -> int:
        """Ask it to leave; returns the requests that were running or waiting."""
        stub = self._stub(admin_pb2_grpc.AdminServiceStub)
        request = admin_pb2.DrainTargetRequest(deadline_ms=deadline_ms)
        answer = await self._ask(stub.Drain(request, timeout=CALL_SECONDS))
        return int(answer.requests)


class DraftClient(_Client):
    """Speaks to a draft."""

    async def open_link(self, max_outgoing: int = MAX_OUTGOING) -> LinkCall:
        """Dial; the first ``receive`` tells whether the draft is there. Close it when done."""
        stub = self._stub(speculation_pb2_grpc.SpeculationServiceStub)
        link = LinkCall(stub.Speculate(), self.endpoint, max_outgoing)
        link.start()
        return link

    async def get_status(self) -> DraftStatus:
        """What the draft is doing."""
        stub = self._stub(speculation_pb2_grpc.SpeculationServiceStub)
        request = speculation_pb2.GetStatusRequest()
        return draft_status(await self._ask(stub.GetStatus(request, timeout=CALL_SECONDS)))

    async def drain(self, deadline_ms: int) -> int:
        """Ask it to leave; returns the sessions that were open."""
        stub = self._stub(speculation_pb2_grpc.SpeculationServiceStub)
        request = speculation_pb2.DrainDraftRequest(deadline_ms=deadline_ms)
        answer = await self._ask(stub.Drain(request, timeout=CALL_SECONDS))
        return int(answer.sessions)


@contextlib.contextmanager
def _told_as_ours(endpoint: str) -> Iterator[None]:
    """Turn what gRPC raises into an ``SSDError``."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, endpoint) from error
    except grpc.aio.UsageError as error:
        raise NotReadyError(f"the client of {endpoint} is closed") from error


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
