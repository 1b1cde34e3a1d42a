"""The API with the official client, in front of scripted targets on real ports."""

import asyncio
import contextlib
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.gateway import HELLO, Front, ScriptedTarget, fronting, spells

from ssd.errors import ContextLengthError, FieldError, NotReadyError, OverloadedError
from ssd.rpc.codec import Conversation, GenerateCall
from ssd.types import (
    ChatTurn,
    GenerationChunk,
    Mode,
)
from ssd_gateway import http_server

NOTHING: tuple[GenerationChunk, ...] = ()
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def raw(
    front: Front, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of a request without the client library."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        names.setdefault("content-type", "application/json")
    request = urllib.request.Request(front.base + path, data=body, headers=names)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return (
                answer.status,
                {k.lower(): v for k, v in answer.headers.items()},
                answer.read().decode(),
            )
    except urllib.error.HTTPError as refusal:
        with refusal:
            found = {k.lower(): v for k, v in refusal.headers.items()}
            return refusal.code, found, refusal.read().decode()


async def get(front: Front, path: str, body: bytes | None = None, **headers: str) -> Any:
    return await asyncio.to_thread(raw, front, path, body, **headers)


async def test_a_chat_reaches_the_target_and_returns_its_text_and_counts() -> None:
    target = ScriptedTarget()
    async with fronting(target) as front, front.client() as client:
        answer = await client.chat.completions.create(
            model="demo",
            messages=[
                {"role": "developer", "content": "be short"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
                },
            ],
            temperature=0.5,
            seed=-1,
            stop=["x", "y"],
            max_completion_tokens=9,
            extra_body={"mode": "autoregressive", "ignore_eos": True},
            extra_headers={"x-request-id": "abc"},
        )
    assert answer.choices[0].message.content == "a b c"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert answer.model == "demo"
    (call,) = target.calls
    assert call.prompt == Conversation((ChatTurn("system", "be short"), ChatTurn("user", "hello")))
    assert call.sampling.temperature == 0.5
    assert call.sampling.stop == ("x", "y")
    assert call.sampling.ignore_eos
    assert (call.seed, call.max_tokens, call.mode) == (2**64 - 1, 9, Mode.AUTOREGRESSIVE)
    assert target.request_ids == ["abc"]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", False),
        ("not a trace", False),
    ],
)
async def test_a_target_receives_the_trace_of_the_caller(given: str, *, sent: bool) -> None:
    target = ScriptedTarget()
    async with fronting(target) as front, front.client() as client:
        await client.chat.completions.create(
            model="demo", messages=HELLO, extra_headers={"traceparent": given}
        )
    assert target.traces == [given if sent else ""]


async def test_a_stream_has_the_text_in_parts_then_the_counts() -> None:
    async with fronting(ScriptedTarget()) as front, front.client() as client:
        stream = await client.chat.completions.create(
            model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas[1:]] == ["a ", "b ", "c"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_prompts_are_choices_of_one_completion() -> None:
    async def reads(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        async for chunk in spells(call, (f"<{call.prompt}>",)):
            yield chunk

    async with fronting(ScriptedTarget(reads)) as front, front.client() as client:
        answer = await client.completions.create(model="demo", prompt=["one", "two", "three"])
        stream = await client.completions.create(model="demo", prompt=[[1], [2]], stream=True)
        found = {chunk.choices[0].index: chunk.choices[0].text async for chunk in stream}
    assert [choice.text for choice in answer.choices] == ["<one>", "<two>", "<three>"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 15
    assert found == {0: "<(1,)>", 1: "<(2,)>"}


async def test_the_time_to_the_first_token_is_not_that_of_an_echoed_prompt() -> None:
    async def echoes(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        for choice in range(call.sampling.n):
            yield GenerationChunk(token_ids=(9,), text="prompt", choice=choice)
        await asyncio.Event().wait()

    async def num_measured(front: Front) -> str:
        text: str = (await get(front, "/metrics"))[2]
        return text.partition("ssd_gateway_time_to_first_token_seconds_count ")[2].split()[0]

    async with fronting(ScriptedTarget(echoes)) as front, front.client() as client:
        before = await num_measured(front)
        stream = await client.completions.create(
            model="demo", prompt=["prompt"] * 2, n=2, echo=True, stream=True
        )
        parts = aiter(stream)
        for _ in range(4):
            await anext(parts)
        assert await num_measured(front) == before
        await stream.close()


@pytest.mark.parametrize(
    ("error", "raised", "code", "param"),
    [
        (
            FieldError("sampling.temperature", "is 9"),
            openai.BadRequestError,
            "invalid_value",
            "temperature",
        ),
        (ContextLengthError(60, 9, 64), openai.BadRequestError, "context_length_exceeded", None),
        (OverloadedError("full", 2.5), openai.RateLimitError, "rate_limit_exceeded", None),
        (NotReadyError("draining"), openai.InternalServerError, "service_unavailable", None),
        (RuntimeError("secret"), openai.InternalServerError, None, None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_errors_of_a_target_are_openai_errors(
    error: Exception, raised: type[openai.APIStatusError], code: str | None, param: str | None
) -> None:
    async def fails(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        for chunk in NOTHING:
            yield chunk
        raise error

    async with fronting(ScriptedTarget(fails)) as front, front.client() as client:
        for stream in (False, True):
            with pytest.raises(raised) as caught:
                await client.chat.completions.create(model="demo", messages=HELLO, stream=stream)
            assert (caught.value.code, caught.value.param) == (code, param)
            assert "secret" not in caught.value.message
            assert caught.value.request_id
            pauses = {OverloadedError: "3", NotReadyError: "1"}
            pause = caught.value.response.headers.get("retry-after")
            assert pause == pauses.get(type(error))


REFUSED: list[tuple[Any, str | None, str]] = [
    ({"prompt": "x", "temprature": 1}, "temprature", "unrecognized"),
    ({"prompt": "x", "temperature": "1"}, "temperature", "valid number"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater"),
    ({"prompt": "x", "max_tokens": 2**40}, "max_tokens", "less"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
    ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": []}, "prompt", "1..32"),
    ({"prompt": 7}, "prompt", ""),
    ({}, "prompt", "required"),
    ([], None, "JSON object"),
    ({"messages": [], "model": "demo"}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tools"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "image_url",
    ),
]


async def test_a_request_that_is_not_valid_is_refused_with_its_field() -> None:
    target = ScriptedTarget()
    async with fronting(target) as front:
        for body, param, says in REFUSED:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            status, _, text = await get(front, path, json.dumps(body).encode())
            found = json.loads(text)["error"]
            assert (status, found["param"]) == (400, param), body
            assert says in found["message"], body
    assert not [call for call in target.calls if call.prompt]


async def test_a_stream_that_breaks_ends_with_an_error_and_is_not_sent_again() -> None:
    async def breaks(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(token_ids=(1,), text="a")
        raise NotReadyError("the target stops")

    targets = [ScriptedTarget(breaks), ScriptedTarget(breaks)]
    async with fronting(*targets) as front, front.client() as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        parts = aiter(stream)
        assert (await anext(parts)).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="incomplete"):
            await anext(parts)
    assert sum(len(target.calls) for target in targets) == 1


@pytest.mark.parametrize("error", [NotReadyError("draining"), OverloadedError("full")], ids=repr)
async def test_a_request_that_one_target_refuses_is_sent_to_another(error: Exception) -> None:
    async def refuses(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        for chunk in NOTHING:
            yield chunk
        raise error

    refusing, serving = ScriptedTarget(refuses), ScriptedTarget()
    async with fronting(refusing, serving) as front, front.client() as client:
        for _ in range(4):
            answer = await client.completions.create(model="demo", prompt="x")
            assert answer.choices[0].text == "a b c"
    assert len(serving.calls) == 4


async def test_a_client_that_leaves_cancels_its_request_on_the_target() -> None:
    ended = asyncio.Event()

    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        try:
            yield GenerationChunk(token_ids=(1,), text="a")
            await asyncio.Event().wait()
        finally:
            ended.set()

    for streams in (True, False):
        ended.clear()
        async with fronting(ScriptedTarget(endless)) as front:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
            body = json.dumps({"prompt": "x", "stream": streams}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            if streams:
                await reader.readuntil(b'"text":"a"')
            else:
                await writer.drain()
                async with asyncio.timeout(10):
                    while (
                        "ssd_gateway_running_requests 1.0" not in (await get(front, "/metrics"))[2]
                    ):
                        pass
            writer.close()
            await asyncio.wait_for(ended.wait(), 10)
            async with asyncio.timeout(10):
                while "ssd_gateway_running_requests 0.0" not in (await get(front, "/metrics"))[2]:
                    pass
            assert 'status="499"' in (await get(front, "/metrics"))[2]


async def test_keys_are_required_on_the_api_only_and_read_again(tmp_path: Path) -> None:
    def line(name: str, key: str) -> str:
        return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"

    keys = tmp_path / "keys"
    keys.write_text("# clients\n" + line("alice", "first"))
    async with fronting(ScriptedTarget(), api_keys_file=str(keys)) as front:
        assert (await get(front, "/readyz"))[0] == 200
        assert (await get(front, "/"))[0] == 200
        status, headers, text = await get(front, "/v1/models")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert (await get(front, "/v1/models", authorization="Bearer first"))[0] == 200
        keys.write_text(line("alice", "second key"))
        assert (await get(front, "/v1/models", authorization="Bearer first"))[0] == 401
        assert (await get(front, "/v1/models", authorization="Bearer second key"))[0] == 200
        # A broken file keeps the last keys.
        keys.write_text("second key")
        assert (await get(front, "/v1/models", authorization="Bearer second key"))[0] == 200


async def test_models_lists_what_ready_targets_serve() -> None:
    async with fronting(ScriptedTarget()) as front, front.client() as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        assert (await client.models.retrieve("demo")).id == "demo"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="other", prompt="x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_without_a_ready_target_the_gateway_is_not_ready_and_clients_may_retry() -> None:
    async with fronting() as front:
        assert (await get(front, "/livez"))[0] == 200
        assert (await get(front, "/readyz"))[:1] == (503,)
        status, headers, _ = await get(front, "/v1/completions", b'{"prompt":"x"}')
        assert (status, headers["retry-after"]) == (503, "1")


async def test_bodies_are_limited_and_must_be_json() -> None:
    async with fronting(ScriptedTarget(), max_body_bytes=1024) as front:
        large = json.dumps({"prompt": "x" * 1024}).encode()
        assert (await get(front, "/v1/completions", large))[0] == 413
        other = await get(front, "/v1/completions", b'{"prompt":"x"}', content_type="text/plain")
        assert other[0] == 415
        assert (await get(front, "/v1/other"))[0] == 404
        assert (await get(front, "/v1/completions"))[0] == 405


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 300 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 200_000,
        JSON_HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
        JSON_HEAD + b"content-length: -1\r\n\r\n{}",
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["zeros", "header", "large", "negative", "chunk"],
)
async def test_broken_http_is_refused_and_the_next_connection_is_served(sent: bytes) -> None:
    async with fronting(ScriptedTarget()) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(12), 10)
        assert answer in (b"HTTP/1.1 400", b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert (await get(front, "/livez"))[0] == 200


async def test_connections_over_the_limit_are_closed() -> None:
    async with fronting(ScriptedTarget(), max_connections=2) as front:
        opened = [await asyncio.open_connection("127.0.0.1", front.gateway.port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, each in (*opened, (reader, writer)):
            each.close()


@pytest.mark.parametrize("head", [b"", b"content-length: 9\r\n"], ids=["request", "body"])
async def test_a_connection_is_closed_if_what_follows_a_response_does_not_end(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)
    async with fronting(ScriptedTarget()) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
        await asyncio.wait_for(reader.readuntil(b"live\n"), 10)
        writer.write(b"G")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_client_that_reads_nothing_is_disconnected_and_its_request_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ended = asyncio.Event()

    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        try:
            while True:
                yield GenerationChunk(token_ids=(1,), text="a" * 200_000)
        finally:
            ended.set()

    async with fronting(ScriptedTarget(endless), stream_stall_seconds=0.2) as front:
        _, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port, limit=1)
        body = b'{"prompt":"x","stream":true}'
        writer.write(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(ended.wait(), 20)
        async with asyncio.timeout(10):
            while "ssd_gateway_running_requests 0.0" not in (await get(front, "/metrics"))[2]:
                pass
        writer.close()
    assert [each.levelname for each in caplog.records if each.levelname == "ERROR"] == []
    assert "client_stalled" in caplog.text


async def test_requests_over_the_limit_are_answered_429() -> None:
    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(token_ids=(1,), text="a")
        await asyncio.Event().wait()

    async with fronting(ScriptedTarget(endless), max_requests=1) as front, front.client() as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="demo", prompt="x")
        await stream.close()


async def test_bodies_of_requests_in_progress_are_limited_together() -> None:
    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(token_ids=(1,), text="a")
        await asyncio.Event().wait()

    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 2048}
    async with fronting(ScriptedTarget(endless), **limits) as front, front.client() as client:
        for _ in range(2):
            stream = await client.completions.create(model="demo", prompt="x" * 1200, stream=True)
            with pytest.raises(openai.RateLimitError, match="max_total_body_bytes"):
                await client.completions.create(model="demo", prompt="x" * 1200)
            with pytest.raises(openai.RateLimitError, match="max_total_body_bytes"):
                await client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "x" * 1200}]
                )
            await stream.close()
            async with asyncio.timeout(10):
                while "ssd_gateway_running_requests 0.0" not in (await get(front, "/metrics"))[2]:
                    pass


async def test_a_request_that_takes_too_long_is_answered_408() -> None:
    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        await asyncio.Event().wait()
        yield GenerationChunk(token_ids=())

    async with fronting(ScriptedTarget(endless), request_timeout_seconds=0.05) as front:
        assert (await get(front, "/v1/completions", b'{"prompt":"x"}'))[0] == 408


async def test_the_playground_loads_nothing_from_elsewhere() -> None:
    async with fronting(ScriptedTarget()) as front:
        status, headers, page = await get(front, "/")
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        for path in ("style.css", "app.js", "lane.js", "stream.js"):
            status, _, text = await get(front, f"/playground/{path}")
            assert status == 200
            assert "//cdn" not in text
        assert 'src="/playground/app.js"' in page
    async with fronting(ScriptedTarget(), playground=False) as front:
        assert (await get(front, "/"))[0] == 404
