"""The service of requests: bounds, slow readers, hints when to retry."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer
from prometheus_client import REGISTRY
from tests.sequences import make_sequence

from ssd.errors import (
    CancelledError,
    DeadlineError,
    FieldError,
    NotAllowedError,
    NotReadyError,
    OverloadedError,
)
from ssd.rpc.bounds import PromptBounds
from ssd.rpc.codec import GenerateCall
from ssd.testing.clock import FakeClock
from ssd.types import FinishReason, GenerationChunk, SamplingParams
from ssd.v1 import generate_pb2
from ssd_target.decoding.sequence import SequenceRecord
from ssd_target.serving.request_handler import RequestHandler
from ssd_target.serving.request_trace import RequestTrace
from ssd_target.serving.servicer import GenerateServicer, count_failure
from ssd_target.settings import TargetSettings

MAX_SECONDS = 60.0


class FakeHandler:
    """A handler that only reports whether it is open."""

    bounds = PromptBounds(tokens=10, text_bytes=70)

    def __init__(self) -> None:
        self.is_open = True

    def require_open(self) -> None:
        if not self.is_open:
            raise NotReadyError("the target is draining")


def make_servicer(
    handler: FakeHandler, settings: TargetSettings | None = None, clock: FakeClock | None = None
) -> GenerateServicer:
    return GenerateServicer(
        settings or TargetSettings(),
        cast(RequestHandler, handler),
        int,
        NoOpTracer(),
        clock or FakeClock(),
    )


@pytest.fixture
def handler() -> FakeHandler:
    return FakeHandler()


@pytest.fixture
def generate(handler: FakeHandler) -> GenerateServicer:
    return make_servicer(handler)


async def test_a_text_that_is_too_long_is_not_tokenized(generate: GenerateServicer) -> None:
    text = "é" * 35 + "x"
    with pytest.raises(
        FieldError, match=r"text: has 71 bytes, and no text of max_model_len, 10 tokens, has over"
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
        (OverloadedError("the queue is full"), "overloaded"),
        (NotAllowedError("not for clients"), "denied"),
        (NotReadyError("draining"), "unavailable"),
        (DeadlineError("600 s"), "deadline"),
        (TimeoutError(), "deadline"),
        (CancelledError("left"), "cancelled"),
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
    servicer = make_servicer(handler, settings)
    with pytest.raises(DeadlineError, match=r"was not read for 0\.01 s"):
        await servicer._write_all(cast(Any, chunks()), admitted(1), cast(Any, StalledContext()))
    (line,) = caplog.records
    assert (line.getMessage(), line.levelname, line.exc_info) == ("stream_stalled", "INFO", None)


def admitted(count: int) -> RequestTrace:
    """The trace of a request with sequences that have left the queue."""
    trace = RequestTrace(NoOpTracer(), FakeClock(), {})
    record = SequenceRecord(admitted_at=1.0)
    trace.sequences = [make_sequence(record=record) for _ in range(count)]
    return trace


@pytest.mark.parametrize(
    ("num_admitted", "error", "words"),
    [(0, OverloadedError, "did not begin within 0.01 s"), (1, DeadlineError, "ran for 0.01 s")],
)
async def test_a_request_that_only_waited_is_answered_as_by_a_full_queue(
    generate: GenerateServicer,
    handler: FakeHandler,
    num_admitted: int,
    error: type[Exception],
    words: str,
) -> None:
    async def never(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        await asyncio.Event().wait()
        yield GenerationChunk(token_ids=())

    handler.generate = never  # type: ignore[attr-defined]
    handler.num_waiting = 0  # type: ignore[attr-defined]
    generate._settings = TargetSettings(request_timeout_seconds=0.01)
    call = GenerateCall(prompt="x", sampling=SamplingParams())
    with pytest.raises(error, match=words):
        await generate._run(call, "r", admitted(num_admitted), cast(Any, Reader()))


class Reader:
    """A context whose client reads everything."""

    async def write(self, _message: object) -> None:
        return


class Hints:
    """A servicer whose requests a test plays, and the hint of a request that it refuses."""

    def __init__(self, handler: FakeHandler) -> None:
        self.clock = FakeClock()
        self.handler = cast(Any, handler)
        self.handler.num_waiting = 40
        self.servicer = make_servicer(handler, clock=self.clock)

    async def run(self, num_admitted: int, *chunks: GenerationChunk | BaseException) -> None:
        async def generate(*_arguments: object) -> AsyncIterator[GenerationChunk]:
            self.clock.advance(1.0)
            for chunk in chunks:
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk

        self.handler.generate = generate
        reader = cast(Any, Reader())
        await self.servicer._run(cast(Any, None), "", admitted(num_admitted), reader)

    async def seconds(self) -> float:
        with pytest.raises(OverloadedError) as caught:
            await self.run(0, OverloadedError("full"))
        found = caught.value.retry_after_seconds
        assert found is not None
        return found


@pytest.fixture
def hints(handler: FakeHandler) -> Hints:
    return Hints(handler)


def ending(choice: int) -> GenerationChunk:
    return GenerationChunk(token_ids=(1,), choice=choice, finish_reason=FinishReason.LENGTH)


async def test_the_retry_hint_counts_sequences_not_requests(hints: Hints) -> None:
    for _ in range(4):
        await hints.run(4, *map(ending, range(4)))
    # 16 sequences have ended in 4 seconds, so the queue of 40 empties in 10.
    assert 2.5 <= await hints.seconds() <= 10.0


async def test_the_retry_hint_counts_running_sequences_that_are_cancelled(hints: Hints) -> None:
    running = GenerationChunk(token_ids=(1,), choice=0)
    for _ in range(4):
        with pytest.raises(asyncio.CancelledError):
            await hints.run(2, running, ending(1), asyncio.CancelledError())
    # 8 sequences have ended in 4 seconds, so the queue of 40 empties in 20.
    assert 5.0 <= await hints.seconds() <= 20.0


@pytest.mark.parametrize(("num_admitted", "longest"), [(0, 1.0), (1, 40.0)])
async def test_the_retry_hint_counts_cancelled_sequences_that_left_the_queue(
    hints: Hints, num_admitted: int, longest: float
) -> None:
    # The prompt of a request with echo.
    echo = GenerationChunk(token_ids=(1, 2), choice=0)
    for _ in range(4):
        with pytest.raises(asyncio.CancelledError):
            await hints.run(num_admitted, echo, asyncio.CancelledError())
    # Before a sequence has made room, a hint is one second; 4 in 4 seconds empty the queue in 40.
    found = await hints.seconds()
    assert longest / 4 <= found <= longest
    assert (found == 1.0) is (num_admitted == 0)
