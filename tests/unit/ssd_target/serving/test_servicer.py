"""The service of requests: bounds, slow readers, hints when to retry."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from opentelemetry.trace import INVALID_SPAN, NoOpTracerProvider
from prometheus_client import REGISTRY

from ssd.errors import (
    AccessError,
    CancelledError,
    DeadlineError,
    FieldError,
    InternalError,
    NotAllowedError,
    NotReadyError,
    OverloadedError,
    UnknownModelError,
    UnsupportedError,
)
from ssd.rpc.bounds import PromptBounds
from ssd.testing.clock import FakeClock
from ssd.testing.sink import ListSink
from ssd.types import FinishReason, GenerationChunk, Request, SamplingParams
from ssd.v1 import generate_pb2
from ssd_target.decoding.sequence import Arrival
from ssd_target.serving import servicer as servicer_module
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.request_trace import RequestTrace, RequestTraces
from ssd_target.serving.servicer import (
    GenerateServicer,
    count_failure,
)
from ssd_target.settings import TargetSettings

MAX_SECONDS = 60.0
UNTRACED = RequestTraces(NoOpTracerProvider(), FakeClock(), "m")


class FakeHandler:
    """A handler that only reports whether it is open."""

    bounds = PromptBounds(tokens=10, text_bytes=70)

    def __init__(self) -> None:
        self.is_open = True

    def require_open(self) -> None:
        if not self.is_open:
            raise NotReadyError("the target is draining")


@pytest.fixture
def handler() -> FakeHandler:
    return FakeHandler()


@pytest.fixture
def generate(handler: FakeHandler) -> GenerateServicer:
    return GenerateServicer(TargetSettings(), cast(RequestHandler, handler), int, UNTRACED)


async def test_a_text_that_is_too_long_is_not_tokenized(generate: GenerateServicer) -> None:
    text = "é" * 35 + "x"
    with pytest.raises(
        FieldError, match=r"text: has 71 bytes, must have 0\.\.70: max_model_len is 10 tokens"
    ):
        await generate.Tokenize(generate_pb2.TokenizeRequest(text=text), None)


async def test_a_list_that_is_too_long_is_not_detokenized(generate: GenerateServicer) -> None:
    request = generate_pb2.DetokenizeRequest(token_ids=[0] * 11)
    with pytest.raises(FieldError, match=r"token_ids: has 11 token ids, must have 0\.\.10"):
        await generate.Detokenize(request, None)


async def test_a_draining_target_refuses_tokenize_and_detokenize(
    generate: GenerateServicer, handler: FakeHandler
) -> None:
    handler.is_open = False
    with pytest.raises(NotReadyError):
        await generate.Tokenize(generate_pb2.TokenizeRequest(text="x"), None)
    with pytest.raises(NotReadyError):
        await generate.Detokenize(generate_pb2.DetokenizeRequest(token_ids=[1]), None)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (FieldError("text", "is empty"), "invalid"),
        (UnknownModelError("no such model"), "invalid"),
        (UnsupportedError("sampling.n"), "invalid"),
        (OverloadedError("the queue is full"), "overloaded"),
        (AccessError("no token"), "denied"),
        (NotAllowedError("not for clients"), "denied"),
        (NotReadyError("draining"), "unavailable"),
        (DeadlineError("600 s"), "deadline"),
        (TimeoutError(), "deadline"),
        (CancelledError("left"), "cancelled"),
        (InternalError("not finite"), "error"),
        (ZeroDivisionError("a bug"), "error"),
    ],
)
def test_a_failed_request_is_counted_by_its_outcome(error: Exception, outcome: str) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("ssd_requests_total", {"outcome": outcome}) or 0.0

    before = count()
    count_failure("/ssd.v1.GenerateService/Generate", error)
    count_failure("/ssd.v1.GenerateService/Tokenize", error)
    assert count() == before + 1


class StalledContext:
    """A context whose client reads nothing."""

    async def write(self, _message: object) -> None:
        await asyncio.Event().wait()


async def test_a_stalled_stream_is_logged_without_a_stack(
    handler: FakeHandler, caplog: pytest.LogCaptureFixture
) -> None:
    async def chunks() -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(token_ids=(1,))

    caplog.set_level("INFO")
    settings = TargetSettings(stream_stall_seconds=0.01)
    servicer = GenerateServicer(settings, cast(RequestHandler, handler), int, UNTRACED)
    with pytest.raises(DeadlineError, match=r"was not read for 0\.01 s"):
        await servicer._write_all(cast(Any, chunks()), admitted(1), cast(Any, StalledContext()))
    (line,) = caplog.records
    assert (line.getMessage(), line.levelname, line.exc_info) == ("stream_stalled", "INFO", None)


def admitted(count: int) -> RequestTrace:
    """The trace of a request with sequences that have left the queue."""
    clock = FakeClock()
    trace = RequestTrace(INVALID_SPAN, NoOpTracerProvider().get_tracer(""), clock, {})
    for _ in range(count):
        arrival = Arrival(
            sequence_id=1,
            request=Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams()),
            eos_token_ids=frozenset(),
            sink=ListSink(),
        )
        arrival.times.admitted_at = 1.0
        trace.admit(arrival)
    return trace


class Reader:
    """A context whose client reads everything."""

    async def write(self, _message: object) -> None:
        return


async def test_the_retry_hint_counts_sequences_not_requests(
    handler: FakeHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_continuations, num_waiting = 4, 40

    async def chunks(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        for choice in range(num_continuations):
            clock.advance(1.0)
            yield GenerationChunk(token_ids=(), choice=choice, finish_reason=FinishReason.LENGTH)

    def refuse(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        raise OverloadedError("full")

    clock = FakeClock()
    monkeypatch.setattr(servicer_module, "SystemClock", lambda: clock)
    servicer = GenerateServicer(TargetSettings(), cast(RequestHandler, handler), int, UNTRACED)
    fake = cast(Any, handler)
    fake.num_requests, fake.num_waiting, fake.generate = 1, num_waiting, chunks
    await servicer._run(cast(Any, None), "", admitted(num_continuations), cast(Any, Reader()))
    fake.generate = refuse
    with pytest.raises(OverloadedError) as caught:
        await servicer._run(cast(Any, None), "", admitted(0), cast(Any, Reader()))
    # One sequence ends in about a second; a quarter of the queue's time is the shortest hint.
    assert 7.0 < caught.value.retry_after_seconds <= num_waiting


async def test_the_retry_hint_counts_running_sequences_that_are_cancelled(
    handler: FakeHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chunks(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        clock.advance(1.0)
        yield GenerationChunk(token_ids=(1,), choice=0)
        yield GenerationChunk(token_ids=(1,), choice=1, finish_reason=FinishReason.STOP)
        raise asyncio.CancelledError

    def refuse(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        raise OverloadedError("full")

    clock = FakeClock()
    monkeypatch.setattr(servicer_module, "SystemClock", lambda: clock)
    servicer = GenerateServicer(TargetSettings(), cast(RequestHandler, handler), int, UNTRACED)
    fake = cast(Any, handler)
    fake.num_waiting, fake.generate = 40, chunks
    for _ in range(4):
        with pytest.raises(asyncio.CancelledError):
            await servicer._run(cast(Any, None), "", admitted(2), cast(Any, Reader()))
    fake.generate = refuse
    with pytest.raises(OverloadedError) as caught:
        await servicer._run(cast(Any, None), "", admitted(0), cast(Any, Reader()))
    # 8 sequences have ended within 3 seconds, so the queue of 40 empties in 15.
    assert 3.75 <= caught.value.retry_after_seconds <= 15.0


@pytest.mark.parametrize(("num_admitted", "longest"), [(0, 1.0), (1, 30.0)])
async def test_the_retry_hint_counts_cancelled_sequences_that_left_the_queue(
    handler: FakeHandler, monkeypatch: pytest.MonkeyPatch, num_admitted: int, longest: float
) -> None:
    async def chunks(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        clock.advance(1.0)
        # The prompt of a request with echo, which is sent while its sequence waits or is stored.
        yield GenerationChunk(token_ids=(1, 2), choice=0)
        raise asyncio.CancelledError

    def refuse(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        raise OverloadedError("full")

    clock = FakeClock()
    monkeypatch.setattr(servicer_module, "SystemClock", lambda: clock)
    servicer = GenerateServicer(TargetSettings(), cast(RequestHandler, handler), int, UNTRACED)
    fake = cast(Any, handler)
    fake.num_waiting, fake.generate = 40, chunks
    for _ in range(4):
        with pytest.raises(asyncio.CancelledError):
            await servicer._run(cast(Any, None), "", admitted(num_admitted), cast(Any, Reader()))
    fake.generate = refuse
    with pytest.raises(OverloadedError) as caught:
        await servicer._run(cast(Any, None), "", admitted(0), cast(Any, Reader()))
    # Before a sequence has made room, a hint is one second; 4 in 3 seconds empty the queue in 30.
    assert longest / 4 <= caught.value.retry_after_seconds <= longest
    assert (caught.value.retry_after_seconds == 1.0) is (num_admitted == 0)
