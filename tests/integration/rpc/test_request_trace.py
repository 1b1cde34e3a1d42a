"""Spans and the log line of a request, through a real servicer; the step thread is played."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from tests.integration.rpc.target_without_model import MAX_SECONDS, TargetWithoutModel

from ssd.errors import NotReadyError
from ssd.observability.log import JsonFormatter
from ssd.types import (
    FinishReason,
    GenerationChunk,
    LookupResult,
    Mode,
    Round,
    SpeculationStatistics,
    TokenText,
    Usage,
)
from ssd.v1 import generate_pb2, generate_pb2_grpc, types_pb2
from ssd_target.decoding.sequence import Sequence
from ssd_target.settings import TargetSettings

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SECRET = "the secret of the prompt"
ROUND = Round((TokenText(1), TokenText(2)), 1, (TokenText(1), TokenText(3)), LookupResult.HIT)


def ending() -> GenerationChunk:
    return GenerationChunk(
        token_ids=(5,),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=4, completion_tokens=3),
        statistics=SpeculationStatistics(mode=Mode.SPECULATIVE, rounds=2, hits=1),
    )


class Bench(TargetWithoutModel):
    """It exports its spans."""

    def __init__(self, exporter: InMemorySpanExporter | None) -> None:
        provider = None
        if exporter is not None:
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(exporter))
        super().__init__(TargetSettings(model_name="m"), provider, started_at=1000.0)
        self.open()

    async def cancel(self) -> None:
        """Wait for the cancellation of a request."""
        while not any(isinstance(each, int) for each in self.inbox.drain()):
            await asyncio.to_thread(self.inbox.wait, MAX_SECONDS)

    def put(self, arrival: Sequence, chunk: GenerationChunk) -> None:
        arrival.sink.put(chunk)
        self.wakeups.flush()

    def decode(self, arrival: Sequence) -> None:
        """Admit it after 1 s, store its prompt in 2 s, and decode its first token in .5 s."""
        for seconds, phase in ((1.0, "admitted"), (2.0, "decoding"), (0.5, "first_token")):
            self.clock.advance(seconds)
            setattr(arrival.record, f"{phase}_at", self.clock.now())


@asynccontextmanager
async def serving(exporter: InMemorySpanExporter | None) -> AsyncIterator[tuple[Bench, Any]]:
    make: Any = generate_pb2_grpc.GenerateServiceStub
    async with Bench(exporter) as bench, asyncio.timeout(MAX_SECONDS):
        yield bench, make(bench.channel)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """Log lines of the process, as JSON."""
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(JsonFormatter("target").format(record)))

    handler, root = Handler(), logging.getLogger("ssd_target")
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield found
    root.removeHandler(handler)
    root.setLevel(level)


def request(**fields: Any) -> generate_pb2.GenerateRequest:
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=3)
    return generate_pb2.GenerateRequest(text=SECRET, sampling=sampling, **fields)


async def answer(stub: Any, headers: Any = (), **fields: Any) -> list[Any]:
    return [each async for each in stub.Generate(request(**fields), metadata=headers)]


def whole_of(exporter: InMemorySpanExporter) -> Any:
    """The span of the request."""
    (found,) = [each for each in exporter.get_finished_spans() if each.name == "generate"]
    return found


def seconds(span: Any, start: int) -> tuple[float, float]:
    return (span.start_time - start) / 1e9, (span.end_time - start) / 1e9


async def test_a_request_has_a_span_for_each_phase_and_an_event_for_each_round() -> None:
    exporter = InMemorySpanExporter()
    async with serving(exporter) as (bench, stub):
        traced = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("x-request-id", "r-1"))
        asked = asyncio.create_task(answer(stub, traced, metadata={"team": "blue"}))
        arrival = await bench.arrival()
        assert arrival.report_rounds
        bench.decode(arrival)
        bench.put(arrival, GenerationChunk(token_ids=(1, 3), rounds=(ROUND,)))
        bench.clock.advance(4.0)
        bench.put(arrival, ending())
        messages = await asked
        # The client has not asked for the rounds.
        assert not any(message.rounds for message in messages)
    whole = whole_of(exporter)
    spans: dict[str, Any] = {each.name: each for each in exporter.get_finished_spans()}
    assert set(spans) == {"generate", "queue", "prefill", "first_token"}
    assert f"{whole.context.trace_id:032x}" == TRACE_ID
    assert f"{whole.parent.span_id:016x}" == PARENT_ID
    assert whole.kind is SpanKind.SERVER
    assert whole.status.is_unset
    start = whole.start_time
    assert seconds(whole, start) == pytest.approx((0.0, 7.5))
    assert seconds(spans["queue"], start) == pytest.approx((0.0, 1.0))
    assert seconds(spans["prefill"], start) == pytest.approx((1.0, 3.0))
    assert seconds(spans["first_token"], start) == pytest.approx((3.0, 3.5))
    for name in ("queue", "prefill", "first_token"):
        assert spans[name].parent.span_id == whole.context.span_id
    found = whole.attributes
    assert found["ssd.request_id"] == "r-1"
    assert found["ssd.outcome"] == "length"
    assert found["ssd.label.team"] == "blue"
    assert found["gen_ai.usage.input_tokens"] == len(SECRET)
    assert found["gen_ai.usage.output_tokens"] == 3
    assert (found["ssd.rounds"], found["ssd.hits"]) == (2, 1)
    (event,) = whole.events
    assert event.name == "round"
    assert dict(event.attributes) == {
        "ssd.choice": 0,
        "ssd.proposed": 2,
        "ssd.accepted": 1,
        "ssd.tokens": 2,
        "ssd.lookup": "hit",
    }
    assert not any(SECRET in each.to_json() for each in exporter.get_finished_spans())


async def test_a_cancelled_request_ends_its_spans_in_the_phase_that_it_reached(
    lines: list[dict[str, Any]],
) -> None:
    exporter = InMemorySpanExporter()
    async with serving(exporter) as (bench, stub):
        call = stub.Generate(request())
        arrival = await bench.arrival()
        bench.clock.advance(1.0)
        arrival.record.admitted_at = bench.clock.now()
        bench.clock.advance(1.0)
        call.cancel()
        await bench.cancel()
        while not lines:  # noqa: ASYNC110 - the end of a cancelled call is not visible to its client
            await asyncio.sleep(0)
    whole = whole_of(exporter)
    assert whole.status.is_ok
    assert whole.attributes["ssd.outcome"] == "cancelled"
    spans = {each.name: each for each in exporter.get_finished_spans()}
    assert set(spans) == {"generate", "queue", "prefill"}
    assert seconds(spans["prefill"], whole.start_time) == pytest.approx((1.0, 2.0))
    assert lines[-1]["outcome"] == "cancelled"
    assert lines[-1]["first_token_ms"] is None


async def test_a_refused_request_has_one_span_with_its_outcome() -> None:
    exporter = InMemorySpanExporter()
    async with serving(exporter) as (_bench, stub):
        sampling = types_pb2.SamplingParams(max_tokens=60)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(generate_pb2.GenerateRequest(text=SECRET, sampling=sampling)).read()
    only = whole_of(exporter)
    assert only.status.is_ok
    assert only.attributes["ssd.outcome"] == "invalid"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RuntimeError("bug"), "error"), (NotReadyError("it ends"), "unavailable")],
)
async def test_a_request_that_fails_by_a_fault_of_the_target_has_a_span_with_an_error(
    error: Exception, outcome: str
) -> None:
    exporter = InMemorySpanExporter()
    async with serving(exporter) as (bench, stub):
        asked = asyncio.create_task(answer(stub))
        arrival = await bench.arrival()
        arrival.sink.fail(error)
        bench.wakeups.flush()
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
    status = whole_of(exporter).status
    assert (status.is_ok, status.description) == (False, outcome)


async def test_the_log_line_of_a_request_has_its_id_and_times_and_no_text(
    lines: list[dict[str, Any]],
) -> None:
    async with serving(None) as (bench, stub):
        asked = asyncio.create_task(
            answer(stub, (("x-request-id", "r-7"),), metadata={"team": "blue"})
        )
        arrival = await bench.arrival()
        # Without a collector, no round is reported.
        assert not arrival.report_rounds
        bench.decode(arrival)
        bench.put(arrival, ending())
        await asked
    (line,) = [each for each in lines if each["event"] == "request"]
    assert line["request_id"] == "r-7"
    assert (line["outcome"], line["output_tokens"]) == ("length", 1)
    assert (line["queue_ms"], line["first_token_ms"], line["total_ms"]) == (1000, 3500, 3500)
    assert line["labels"] == {"team": "blue"}
    assert "trace_id" not in line
    assert SECRET not in json.dumps(lines)
