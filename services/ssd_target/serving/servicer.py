"""The service of requests of the target: decode messages, delegate, encode the results."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial

from opentelemetry.trace import Tracer

from ssd import __version__
from ssd.errors import DeadlineError, OverloadedError, UnknownModelError
from ssd.observability import log
from ssd.observability.metrics import OUTCOMES, REQUESTS_TOTAL
from ssd.observability.tracing import parent_of
from ssd.ports import Clock
from ssd.rpc import bounds, codec
from ssd.rpc.call_guard import Call, current_request_id
from ssd.rpc.server import RpcServer
from ssd.rpc.status import outcome_of
from ssd.types import FinishReason, GenerationChunk
from ssd.v1 import generate_pb2, generate_pb2_grpc
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.request_trace import RequestTrace
from ssd_target.serving.retry_hint import RetryHint
from ssd_target.settings import TargetSettings

_GENERATE = "/ssd.v1.GenerateService/Generate"
_log = log.get_logger(__name__)


for _outcome in OUTCOMES:
    # Exports each outcome from the start, as 0.
    REQUESTS_TOTAL.labels(outcome=_outcome)


def count_failure(method: str, error: Exception) -> None:
    """Count a failed call of ``Generate`` by its outcome."""
    if method == _GENERATE:
        REQUESTS_TOTAL.labels(outcome=outcome_of(error)).inc()


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """``ssd.v1.GenerateService``. Asyncio loop."""

    def __init__(
        self,
        settings: TargetSettings,
        handler: RequestHandler,
        num_drafts: Callable[[], int],
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._tracer = tracer
        self._clock = clock
        self._handler = handler
        self._num_drafts = num_drafts
        self._retry_hint = RetryHint(clock)

    def add_to(self, server: RpcServer) -> None:
        """Register the service."""
        register = partial(generate_pb2_grpc.add_GenerateServiceServicer_to_server, self)
        server.add("ssd.v1.GenerateService", register)

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.GenerateRequest, context: Call
    ) -> None:
        """Stream the continuation of a prompt. Cancelling the call cancels the request."""
        self._handler.require_open()
        # 10 ms for 128,000 ids. A worker thread would delay the refusal of a full queue, and calls
        # that wait for it would have no bound.
        call = codec.generate_call(
            request, self._handler.tokenizer.vocab_size, self._handler.bounds
        )
        # Frees the prompt, which is not needed while the request waits and runs.
        del request
        model = self._settings.served_name
        if call.model not in {"", model}:
            raise UnknownModelError(f"model {call.model!r} is not served; this is {model!r}")
        request_id = current_request_id()
        log.request_id.set(request_id)
        parent = parent_of(context.invocation_metadata() or ())
        attributes = {"ssd.request_id": request_id, "gen_ai.request.model": model}
        trace = RequestTrace(self._tracer, self._clock, call.metadata, attributes, parent)
        with trace.until_end(context.cancellation_cause):
            trace.outcome = str(await self._run(call, request_id, trace, context))
        REQUESTS_TOTAL.labels(outcome=trace.outcome).inc()

    async def _run(
        self, call: codec.GenerateCall, request_id: str, trace: RequestTrace, context: Call
    ) -> FinishReason:
        """Run a request within its maximum time and write all chunks."""
        try:
            with self._retry_hint.request():
                finish_reason = await self._run_in_time(call, request_id, trace, context)
        except OverloadedError as error:
            error.retry_after_seconds = self._retry_hint.seconds(self._handler.num_waiting)
            raise
        assert finish_reason is not None
        return finish_reason

    async def _run_in_time(
        self, call: codec.GenerateCall, request_id: str, trace: RequestTrace, context: Call
    ) -> FinishReason | None:
        allowed = self._settings.request_timeout_seconds
        try:
            async with (
                asyncio.timeout(allowed),
                contextlib.aclosing(self._handler.generate(call, request_id, trace)) as chunks,
            ):
                return await self._write_all(chunks, trace, context)
        except TimeoutError as error:
            if not trace.num_admitted:
                raise OverloadedError(
                    f"the request did not begin within {allowed:g} s, the maximum of this target "
                    "(request_timeout_seconds)"
                ) from error
            raise DeadlineError(
                f"the request ran for {allowed:g} s, the maximum of this target "
                "(request_timeout_seconds); request fewer tokens"
            ) from error

    async def _write_all(
        self, chunks: AsyncGenerator[GenerationChunk, None], trace: RequestTrace, context: Call
    ) -> FinishReason | None:
        """Write all chunks; fail if the client reads nothing for ``stream_stall_seconds``."""
        finish_reason: FinishReason | None = None
        num_ended = 0
        try:
            async for chunk in chunks:
                finish_reason = chunk.finish_reason
                if finish_reason is not None:
                    num_ended += 1
                    self._retry_hint.add_end()
                await self._write(chunk, context)
        finally:
            # Sequences of a cancelled or failed request make room too, unless they still wait.
            for _ in range(trace.num_admitted - num_ended):
                self._retry_hint.add_end()
        return finish_reason

    async def _write(self, chunk: GenerationChunk, context: Call) -> None:
        stall_seconds = self._settings.stream_stall_seconds
        try:
            async with asyncio.timeout(stall_seconds):
                await context.write(codec.generate_response(chunk))
        except TimeoutError as error:
            _log.info("stream_stalled", seconds=stall_seconds)
            raise DeadlineError(
                f"the stream was not read for {stall_seconds:g} s (stream_stall_seconds)"
            ) from error

    async def Tokenize(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.TokenizeRequest, _context: object
    ) -> generate_pb2.TokenizeResponse:
        """Return the token ids of a text."""
        self._handler.require_open()
        bounds.check_text("text", request.text, bounds=self._handler.bounds)
        token_ids = await self._handler.tokenization.tokenize(request.text)
        return generate_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802 - the rpc's name
        self, request: generate_pb2.DetokenizeRequest, _context: object
    ) -> generate_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        self._handler.require_open()
        num_ids, most = len(request.token_ids), self._handler.bounds.tokens
        bounds.check_count("token_ids", num_ids, "token ids", 0, most)
        text = await self._handler.tokenization.detokenize(request.token_ids)
        return generate_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(  # noqa: N802 - the rpc's name
        self, _request: generate_pb2.GetModelInfoRequest, _context: object
    ) -> generate_pb2.GetModelInfoResponse:
        """Return the served model and its configuration."""
        runner = self._handler.require_open()
        info = codec.ModelInfo(
            model=self._settings.served_name,
            family=runner.model.family,
            num_parameters=runner.num_parameters,
            vocab_size=self._handler.num_token_ids,
            max_model_len=runner.engine.max_model_len,
            dtype=runner.engine.precision,
            dtype_reason=runner.engine.dtype_reason,
            attention_backend=runner.attention_name,
            device=runner.engine.device,
            version=__version__,
            tokenizer_fingerprint=self._handler.tokenizer.fingerprint,
            lookahead=self._settings.lookahead,
            branches=self._settings.branches,
            active_drafts=self._num_drafts(),
            max_num_seqs=runner.engine.max_num_seqs,
            deterministic=runner.engine.deterministic,
            max_text_bytes=self._handler.bounds.text_bytes,
            tool_format=self._handler.tool_format,
        )
        return codec.model_info_response(info)
