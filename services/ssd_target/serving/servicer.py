"""Messages to calls and back: where a request enters and where its tokens leave."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import NoReturn

import grpc.aio

from ssd import __version__, telemetry
from ssd.errors import DeadlineError, FieldError, UnknownModelError, UnsupportedError
from ssd.rpc import bounds, codec
from ssd.rpc.call_guard import current_request_id
from ssd.rpc.pool_codec import PoolStatus, pool_status_response
from ssd.rpc.server import RpcServer
from ssd.rpc.status import outcome_of
from ssd.telemetry import OUTCOMES, REQUESTS_TOTAL
from ssd.types import FinishReason, GenerationChunk
from ssd.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc
from ssd_target.drafts.pool import DraftPool
from ssd_target.drafts.status import is_news
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.settings import TargetSettings

WATCH_SECONDS = 1.0
"""Between two looks at a pool that is watched."""
LONGEST_DRAIN_MS = 3_600_000
_GENERATE = "/ssd.v1.GenerateService/Generate"
_log = telemetry.get_logger(__name__)
GenerateContext = grpc.aio.ServicerContext[
    generate_pb2.GenerateRequest, generate_pb2.GenerateResponse
]


for _outcome in OUTCOMES:
    # So that each of them is exported from the start, as 0.
    REQUESTS_TOTAL.labels(outcome=_outcome)


def count_failure(method: str, error: Exception) -> None:
    """Count a request that ended with an error, wherever it was found."""
    if method == _GENERATE:
        REQUESTS_TOTAL.labels(outcome=outcome_of(error)).inc()


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """``ssd.v1.GenerateService``. Asyncio loop."""

    def __init__(self, settings: TargetSettings, handler: RequestHandler, pool: DraftPool) -> None:
        self._settings = settings
        self._handler = handler
        self._pool = pool

    def add_to(self, server: RpcServer) -> None:
        """Have this service served."""
        register = partial(generate_pb2_grpc.add_GenerateServiceServicer_to_server, self)
        server.add("ssd.v1.GenerateService", register)

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """Continue a prompt; leaving the call, for whatever reason, frees all that it holds."""
        self._handler.require_open()
        call = codec.generate_call(
            request, self._handler.tokenizer.vocab_size, self._handler.bounds
        )
        # Not needed for as long as the request waits and runs.
        del request
        if call.model not in {"", self._settings.served_name}:
            raise UnknownModelError(
                f"model {call.model!r} is not served; this is {self._settings.served_name!r}"
            )
        request_id = current_request_id()
        telemetry.request_id.set(request_id)
        allowed = self._settings.request_timeout_seconds
        try:
            async with (
                asyncio.timeout(allowed),
                contextlib.aclosing(self._handler.generate(call, request_id)) as chunks,
            ):
                finish_reason = await self._write_all(chunks, context)
        except TimeoutError as error:
            raise DeadlineError(
                f"the request ran for {allowed:g} s, the longest this target allows "
                "(request_timeout_seconds); ask for fewer tokens"
            ) from error
        assert finish_reason is not None
        REQUESTS_TOTAL.labels(outcome=str(finish_reason)).inc()

    async def _write_all(
        self, chunks: AsyncGenerator[GenerationChunk, None], context: GenerateContext
    ) -> FinishReason | None:
        """Write until the end, or until the reader has taken nothing for too long."""
        stall_seconds = self._settings.stream_stall_seconds
        finish_reason: FinishReason | None = None
        async for chunk in chunks:
            finish_reason = chunk.finish_reason
            try:
                async with asyncio.timeout(stall_seconds):
                    await context.write(codec.generate_response(chunk))
            except TimeoutError as error:
                _log.info("stream_stalled", seconds=stall_seconds)
                raise DeadlineError(
                    f"the stream was not read for {stall_seconds:g} s (stream_stall_seconds)"
                ) from error
        return finish_reason

    async def Tokenize(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.TokenizeRequest, _context: object
    ) -> generate_pb2.TokenizeResponse:
        """Text to token ids."""
        self._handler.require_open()
        bounds.check_text("text", request.text, bounds=self._handler.bounds)
        return generate_pb2.TokenizeResponse(token_ids=await self._handler.encode(request.text))

    async def Detokenize(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.DetokenizeRequest, _context: object
    ) -> generate_pb2.DetokenizeResponse:
        """Token ids to text."""
        self._handler.require_open()
        bounds.check_length("token_ids", request.token_ids, self._handler.bounds)
        return generate_pb2.DetokenizeResponse(text=await self._handler.decode(request.token_ids))

    async def GetModelInfo(  # noqa: N802 - the rpc's name
        self, _request: generate_pb2.GetModelInfoRequest, _context: object
    ) -> generate_pb2.GetModelInfoResponse:
        """The model that is served and how."""
        runner = self._handler.require_open()
        info = codec.ModelInfo(
            model=self._settings.served_name,
            family=runner.model.family,
            num_parameters=runner.num_parameters,
            vocab_size=self._handler.num_token_ids,
            max_model_len=runner.engine.max_model_len,
            dtype=runner.engine.dtype,
            dtype_reason=runner.engine.dtype_reason,
            attention_backend=runner.attention_name,
            device=runner.engine.device,
            version=__version__,
            tokenizer_fingerprint=self._handler.tokenizer.fingerprint,
            lookahead=self._settings.lookahead,
            branches=self._settings.branches,
            active_drafts=self._pool.num_active,
            max_num_seqs=runner.engine.max_num_seqs,
            deterministic=runner.engine.deterministic,
        )
        return codec.model_info_response(info)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """``ssd.v1.AdminService``: the pool can be seen, and the target sent away. Asyncio loop."""

    def __init__(
        self,
        status: Callable[[], PoolStatus],
        *,
        drain: Callable[[float], int],
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self._status = status
        self._drain = drain
        self._watch_seconds = watch_seconds
        self._closing = asyncio.Event()

    def add_to(self, server: RpcServer) -> None:
        """Have this service served."""
        register = partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, self)
        server.add("ssd.v1.AdminService", register)

    def close(self) -> None:
        """End all streams of ``WatchPool``: the server is about to stop."""
        self._closing.set()

    async def GetPoolStatus(  # noqa: N802 - the rpc's name
        self, _request: admin_pb2.GetPoolStatusRequest, _context: object
    ) -> admin_pb2.GetPoolStatusResponse:
        """Links, sessions, hit rates, as measured."""
        return pool_status_response(self._status())

    async def WatchPool(  # noqa: N802 - the rpc's name
        self, _request: admin_pb2.WatchPoolRequest, _context: object
    ) -> AsyncIterator[admin_pb2.WatchPoolResponse]:
        """The pool now, then whenever it has changed, until the server stops."""
        told: PoolStatus | None = None
        while not self._closing.is_set():
            status = self._status()
            if told is None or is_news(status, told):
                told = status
                yield admin_pb2.WatchPoolResponse(pool=pool_status_response(status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch_seconds):
                    await self._closing.wait()

    async def SetSpeculation(self, *_call: object) -> NoReturn:  # noqa: N802 - the rpc's name
        """Not served yet."""
        raise UnsupportedError("AdminService.SetSpeculation")

    async def Drain(  # noqa: N802 - the rpc's name
        self, request: admin_pb2.DrainTargetRequest, _context: object
    ) -> admin_pb2.DrainTargetResponse:
        """Begin to leave."""
        if request.deadline_ms > LONGEST_DRAIN_MS:
            raise FieldError("deadline_ms", f"is {request.deadline_ms}, at most {LONGEST_DRAIN_MS}")
        return admin_pb2.DrainTargetResponse(requests=self._drain(request.deadline_ms / 1000))
