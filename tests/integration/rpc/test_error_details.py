"""Errors as a client of any language receives them: code, details and trailers on the wire."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from tests.integration.rpc.target_without_model import (
    MAX_MODEL_LEN,
    MAX_SECONDS,
    TargetWithoutModel,
)

from ssd.types import GenerationChunk
from ssd.v1 import generate_pb2, types_pb2
from ssd_target.serving.streams import TokenStream
from ssd_target.settings import TargetSettings

Code = grpc.StatusCode
Request = generate_pb2.GenerateRequest


class Served(TargetWithoutModel):
    """It calls itself."""

    def start(self, request: Request | bytes, seconds: float | None = None) -> Any:
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        method = self.channel.unary_stream("/ssd.v1.GenerateService/Generate")
        return method(payload, timeout=seconds)

    async def call(self, request: Request | bytes, seconds: float | None = None) -> "Failure":
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.start(request, seconds).read()
        return Failure(caught.value)


class Failure:
    """The status that a client received."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.trailers = dict(cast(Any, error.trailing_metadata()))
        payload = self.trailers.get("grpc-status-details-bin", b"")
        self.status = status_pb2.Status.FromString(cast(bytes, payload))

    def detail(self, kind: Callable[[], Message]) -> Any:
        found = kind()
        assert any(each.Unpack(found) for each in self.status.details), self.status
        return found

    @property
    def fields(self) -> list[str]:
        violations = self.detail(error_details_pb2.BadRequest).field_violations
        assert all(each.description for each in violations)
        return [each.field for each in violations]

    @property
    def reason(self) -> str:
        info = self.detail(error_details_pb2.ErrorInfo)
        assert info.domain == "ssd"
        return str(info.reason)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with Served(TargetSettings(max_queue=2, max_num_seqs=1)) as target:
        target.open(num_token_ids=100)
        yield target


def sampling(**fields: Any) -> Request:
    return Request(text="abc", sampling=types_pb2.SamplingParams(**fields))


INVALID_UTF8 = Request(text="abc").SerializeToString().replace(b"abc", b"a\xffc")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sampling(temperature=3.0), "sampling.temperature"),
        (Request(), "input"),
        (Request(token_ids=types_pb2.TokenIds(ids=[1, 256])), "token_ids.ids[1]"),
        (INVALID_UTF8, "request"),
        (b"\xff\xff\xff", "request"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_a_bad_field_is_an_invalid_argument_that_names_it(
    served: Served, request_: Request | bytes, field: str
) -> None:
    found = await served.call(request_)
    assert found.code is Code.INVALID_ARGUMENT
    assert found.fields == [field]
    assert found.status.message == found.message
    assert found.reason == "FIELD"


async def test_a_prompt_beyond_the_models_length_names_both_numbers(served: Served) -> None:
    request = sampling(max_tokens=70)
    found = await served.call(request)
    assert (found.code, found.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert found.fields == ["text"]
    facts = found.detail(error_details_pb2.ErrorInfo).metadata
    assert (facts["prompt_tokens"], facts["max_tokens"]) == ("3", "70")
    assert facts["max_model_len"] == str(MAX_MODEL_LEN)


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    found = await served.call(Request(text="abc", model="other"))
    assert (found.code, found.reason) == (Code.NOT_FOUND, "UNKNOWN_MODEL")


@pytest.mark.parametrize("state", ["loading", "draining"])
async def test_a_target_that_does_not_serve_is_unavailable_with_its_reason(state: str) -> None:
    async with Served(TargetSettings()) as target:
        if state == "draining":
            target.open()
            target.handler.close()
        found = await target.call(Request(text="abc"))
    assert (found.code, found.reason) == (Code.UNAVAILABLE, "NOT_READY")
    assert state in found.message
    assert found.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0


async def test_a_deadline_that_passes_while_a_request_waits_ends_it(served: Served) -> None:
    calling = asyncio.create_task(served.call(Request(text="abc"), seconds=0.2))
    arrival = await served.arrival()
    assert (await calling).code is Code.DEADLINE_EXCEEDED
    async with asyncio.timeout(MAX_SECONDS):
        await served.handler.wait_until_idle()
    assert cast(TokenStream, arrival.sink).is_abandoned


async def test_a_client_that_reads_nothing_ends_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    # So many tokens can wait that only the stalled write ends the request.
    settings = TargetSettings(stream_stall_seconds=0.2, stream_buffer_tokens=1 << 24)
    async with Served(settings) as target:
        target.open(num_token_ids=100)
        call = target.start(Request(text="abc"))
        stream = cast(TokenStream, (await target.arrival()).sink)
        # More than flow control lets through.
        for _ in range(1000):
            stream.put(GenerationChunk(token_ids=(97,) * 4096))
        target.wakeups.flush()
        async with asyncio.timeout(MAX_SECONDS):
            await target.handler.wait_until_idle()
        assert stream.is_abandoned
        assert "stream_stalled" in caplog.messages
        call.cancel()


async def test_a_bug_returns_only_the_request_id_and_others_continue(served: Served) -> None:
    other = served.start(Request(text="abc"))
    running = await served.arrival()
    failing = asyncio.create_task(served.call(Request(text="abc")))
    (await served.arrival()).sink.fail(RuntimeError("a secret prompt"))
    served.wakeups.flush()
    found = await failing
    assert (found.code, found.reason) == (Code.INTERNAL, "INTERNAL")
    request_id = found.trailers["x-request-id"]
    assert request_id in found.message
    assert "secret" not in str(found.status)
    running.sink.put(GenerationChunk(token_ids=(97,)))
    served.wakeups.flush()
    assert generate_pb2.GenerateResponse.FromString(await other.read()).text == "a"
    other.cancel()
