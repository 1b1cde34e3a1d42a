"""The API with the official client, in front of scripted targets on real ports."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from tests.gateway import (
    BODIES,
    HELLO,
    INFO,
    JSON_HEAD,
    Answer,
    Front,
    ScriptedTarget,
    endless,
    fronting,
    get,
    keys_file,
    post,
    raw,
    refusing,
    sample,
    spells,
    until_running,
)

from ssd import __version__
from ssd.errors import DeadlineError, FieldError, NotReadyError, OverloadedError
from ssd.rpc.codec import Conversation, GenerateCall
from ssd.types import ChatTurn, FinishReason, GenerationChunk, Mode
from ssd_gateway import api, targets
from ssd_gateway.responses import StreamAssembly

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_reaches_the_target_and_returns_its_text_and_counts(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    answer: Any = await client.chat.completions.create(
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
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert answer.model == "demo"
    (call,) = target.calls
    assert call.prompt == Conversation((ChatTurn("system", "be short"), ChatTurn("user", "hello")))
    assert call.sampling.temperature == 0.5
    assert call.sampling.stop == ("x", "y")
    assert call.sampling.ignore_eos
    assert (call.sampling.seed, call.sampling.max_tokens) == (2**64 - 1, 9)
    assert call.mode is Mode.AUTOREGRESSIVE
    assert target.request_ids == ["abc"]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", False),
        ("not a trace", False),
    ],
)
async def test_a_target_receives_the_trace_of_the_caller(
    given: str, target: ScriptedTarget, client: AsyncOpenAI, *, sent: bool
) -> None:
    await client.chat.completions.create(
        model="demo", messages=HELLO, extra_headers={"traceparent": given}
    )
    assert target.traces == [given if sent else ""]


async def test_a_stream_has_the_text_in_parts_then_the_counts(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks: list[Any] = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas[1:]] == ["a ", "b ", "c"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_prompts_are_choices_of_one_completion(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def reads(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        async for chunk in spells(call, (f"<{call.prompt}>",)):
            yield chunk

    target.answer = reads
    answer: Any = await client.completions.create(model="demo", prompt=["one", "two", "three"])
    stream = await client.completions.create(model="demo", prompt=[[1], [2]], stream=True)
    found = {chunk.choices[0].index: chunk.choices[0].text async for chunk in stream}
    assert [choice.text for choice in answer.choices] == ["<one>", "<two>", "<three>"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 15
    assert found == {0: "<(1,)>", 1: "<(2,)>"}


async def test_a_batch_of_long_prompts_reaches_the_target() -> None:
    target = ScriptedTarget(info=replace(INFO, max_model_len=6000, max_text_bytes=60_000))
    async with fronting(target) as front, front.client() as client:
        batch = [[1] * 5000] * 32
        answer = await client.completions.create(model="demo", prompt=batch)
    assert len(answer.choices) == len(target.calls) == 32


async def test_the_time_to_the_first_token_is_not_that_of_an_echoed_prompt(
    target: ScriptedTarget, front: Front, client: AsyncOpenAI
) -> None:
    async def echoes(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        for choice in range(call.sampling.n):
            yield GenerationChunk(token_ids=(9,), text="prompt", choice=choice)
        await asyncio.Event().wait()

    name = "ssd_gateway_time_to_first_token_seconds_count"
    target.answer = echoes
    before = await sample(front, name)
    stream = await client.completions.create(
        model="demo", prompt=["prompt"] * 2, n=2, echo=True, stream=True
    )
    parts = aiter(stream)
    for _ in range(4):
        await anext(parts)
    assert await sample(front, name) == before
    await stream.close()


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


async def test_a_stream_that_breaks_by_a_bug_ends_with_an_error_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, front: Front, client: AsyncOpenAI
) -> None:
    def fails(_assembly: StreamAssembly) -> NoReturn:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StreamAssembly, "usage", fails)
    before = await sample(front, "ssd_gateway_broken_streams_total")
    stream = await client.completions.create(
        model="demo", prompt="x", stream=True, stream_options={"include_usage": True}
    )
    with pytest.raises(openai.APIError, match="internal error"):
        async for _ in stream:
            pass
    assert await sample(front, "ssd_gateway_broken_streams_total") == before + 1


def refusing_the_second(may_refuse: asyncio.Event, first_sets: asyncio.Event) -> Answer:
    """An answer to the prompts x and y; y is refused after an event."""

    async def answers(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        if call.prompt == "y":
            await may_refuse.wait()
            raise FieldError("text", "is wrong")
        yield GenerationChunk(token_ids=(1,), text="a")
        first_sets.set()
        await asyncio.Event().wait()

    return answers


async def test_the_refusal_of_one_prompt_is_the_status_of_a_stream_of_several(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    has_begun = asyncio.Event()
    target.answer = refusing_the_second(has_begun, has_begun)
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: is wrong"):
        await client.completions.create(model="demo", prompt=["x", "y"], stream=True)


async def test_an_error_of_the_client_does_not_count_as_a_broken_stream(
    target: ScriptedTarget, front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "HOLD_SECONDS", 0.0)
    may_refuse = asyncio.Event()
    target.answer = refusing_the_second(may_refuse, asyncio.Event())
    before = await sample(front, "ssd_gateway_broken_streams_total")
    stream = await client.completions.create(model="demo", prompt=["x", "y"], stream=True)
    parts = aiter(stream)
    assert (await anext(parts)).choices[0].text == "a"
    may_refuse.set()
    with pytest.raises(openai.APIError, match=r"prompt\[1\]: is wrong"):
        await anext(parts)
    assert await sample(front, "ssd_gateway_broken_streams_total") == before


async def cancels(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    yield GenerationChunk(token_ids=(), seed=7, finish_reason=FinishReason.CANCELLED)


@pytest.mark.parametrize(
    "answer",
    [refusing(NotReadyError("draining")), refusing(OverloadedError("full")), cancels],
    ids=["draining", "full", "cancels it while it waits"],
)
async def test_a_request_that_one_target_refuses_is_sent_to_another(answer: Answer) -> None:
    serving = ScriptedTarget()
    async with fronting(ScriptedTarget(answer), serving) as front, front.client() as client:
        for _ in range(4):
            served = await client.completions.create(model="demo", prompt="x")
            assert served.choices[0].text == "a b c"
    assert len(serving.calls) == 4


async def test_a_request_that_was_refused_after_a_wait_is_not_sent_to_another_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "RETRY_SECONDS", 0.0)
    both = [ScriptedTarget(refusing(OverloadedError("waited for 600 s"))) for _ in range(2)]
    async with fronting(*both) as front, front.client(max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="waited for 600 s"):
            await client.completions.create(model="demo", prompt="x")
    assert sum(len(each.calls) for each in both) == 1


async def test_a_client_that_leaves_cancels_its_request_on_the_target() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        started.set()
        try:
            yield GenerationChunk(token_ids=(1,), text="a")
            await asyncio.Event().wait()
        finally:
            ended.set()

    for streams in (True, False):
        started.clear()
        ended.clear()
        async with fronting(ScriptedTarget(endless)) as front:
            body = json.dumps({"model": "demo", "prompt": "x", "stream": streams}).encode()
            reader, writer = await post(front, body)
            if streams:
                await reader.readuntil(b'"text":"a"')
            await asyncio.wait_for(started.wait(), 10)
            writer.close()
            await asyncio.wait_for(ended.wait(), 10)
            await until_running(front, 0)
            assert 'status="499"' in (await get(front, "/metrics"))[2]


async def test_keys_are_required_on_the_api_only(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, alice="first")
    async with fronting(ScriptedTarget(), api_keys_file=keys) as front:
        assert (await get(front, "/readyz"))[0] == 200
        assert (await get(front, "/"))[0] == 200
        status, headers, text = await get(front, "/v1/models")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert (await get(front, "/v1/models", authorization="Bearer first"))[0] == 200


async def test_models_lists_what_ready_targets_serve(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="other", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_model_whose_target_restarts_is_not_ready_and_not_unknown() -> None:
    restarts = ScriptedTarget(info=replace(INFO, model="other"))
    body = b'{"model":"other","prompt":"x"}'
    async with fronting(ScriptedTarget(), restarts) as front:
        assert (await get(front, "/v1/completions", body))[0] == 200
        restarts.reason = "draining"
        restarts.answer = refusing(NotReadyError("draining"))
        for path, given_body in (("/v1/completions", body), ("/v1/models/other", None)):
            status, headers, text = await get(front, path, given_body)
            assert (status, headers["retry-after"]) == (503, "1"), path
            assert json.loads(text)["error"]["code"] == "service_unavailable"
        unknown = await get(front, "/v1/models/unknown")
        assert unknown[0] == 404


async def test_a_model_is_unknown_only_after_all_targets_have_reported_theirs() -> None:
    starts = ScriptedTarget(info=replace(INFO, model="other"))
    starts.reason = "loading"
    async with fronting(ScriptedTarget(), starts) as front:
        for path in ("/v1/models/other", "/v1/models/unknown"):
            status, headers, text = await get(front, path)
            assert (status, headers["retry-after"]) == (503, "1"), path
            assert "1 of them has not answered" in json.loads(text)["error"]["message"]
        starts.reason = ""
        await asyncio.wait_for(front.gateway.targets.wait_ready(2), 10)
        assert (await get(front, "/v1/models/other"))[0] == 200
        assert (await get(front, "/v1/models/unknown"))[0] == 404


async def test_without_a_ready_target_the_gateway_is_not_ready_and_clients_may_retry() -> None:
    async with fronting() as front:
        assert (await get(front, "/livez"))[0] == 200
        for path in ("/readyz", "/health"):
            status, _, text = await get(front, path)
            assert (status, text) == (503, "no target is ready, targets: 1\n")
        status, headers, _ = await get(front, "/v1/completions", b'{"prompt":"x"}')
        assert (status, headers["retry-after"]) == (503, "1")


async def test_bodies_are_limited_and_must_be_json() -> None:
    async with fronting(ScriptedTarget(), max_body_bytes=1024) as front:
        large = json.dumps({"prompt": "x" * 1024}).encode()
        assert (await get(front, "/v1/completions", large))[0] == 413
        other = await get(front, "/v1/completions", b'{"prompt":"x"}', content_type="text/plain")
        assert other[0] == 415
        packed = await get(front, "/v1/completions", b"\x1f\x8b", content_encoding="gzip")
        assert (packed[0], "Content-Encoding is 'gzip'" in packed[2]) == (415, True)
        assert (await get(front, "/v1/other"))[0] == 404
        assert (await get(front, "/v1/completions"))[0] == 405
        assert (await get(front, "/health"))[0] == 200
        assert json.loads((await get(front, "/version"))[2]) == {"version": __version__}


async def test_a_client_that_sends_more_than_the_limit_reads_why() -> None:
    async with fronting(ScriptedTarget(), max_body_bytes=1024) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        writer.write(JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(256):
            writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            await writer.drain()
        answer = await asyncio.wait_for(reader.readuntil(b"1024 bytes"), 10)
        assert answer.startswith(b"HTTP/1.1 413")
        writer.write(b"0\r\n\r\n")
        await asyncio.wait_for(reader.read(), 10)
        writer.close()


HOSTS = {
    200: (
        *("localhost", "LOCALHOST:9", "127.0.0.1:8000", "[::1]:8000", "[::1]"),
        *("localhost.", "localhost.:8000", "[::ffff:127.0.0.1]:8000"),
    ),
    403: (
        *("localhost..", "[::ffff:10.0.0.1]", "rebound.example."),
        "rebound.example:8000",
        "localhost.example",
        "127.0.0.1.example:80",
        "10.0.0.1",
        "",
    ),
}


async def test_without_keys_a_page_of_another_name_cannot_use_the_api(tmp_path: Path) -> None:
    async with fronting(ScriptedTarget()) as front:
        for wanted, hosts in HOSTS.items():
            for host in hosts:
                for path in ("/", "/v1/models"):
                    status, _, text = await get(front, path, host=host)
                    assert status == wanted, host
                    assert ("host_not_allowed" in text) == (wanted == 403)
    for other in ({"api_keys_file": keys_file(tmp_path, alice="first")}, {"allow_insecure": True}):
        async with fronting(ScriptedTarget(), **other) as front:
            assert (await get(front, "/livez", host="rebound.example"))[0] == 200


async def test_paths_with_a_slash_at_the_end_are_counted_as_those_without(front: Front) -> None:
    name = 'ssd_gateway_requests_total{path="/v1/models",status="200"}'
    assert (await get(front, "/v1/models"))[0] == 200
    before = await sample(front, name)
    assert (await get(front, "/v1/models/"))[0] == 200
    assert await sample(front, name) == before + 1


async def test_a_path_with_a_slash_at_the_end_is_not_redirected(front: Front) -> None:
    body = json.dumps({"model": "demo", "prompt": "x", "messages": HELLO}).encode()
    for path in ("/v1/chat/completions/", "/v1/completions/", "/livez/"):
        status, headers, text = await get(front, path, body if path.startswith("/v1") else None)
        assert (status, "location" in headers) == (404, False)
        assert json.loads(text)["error"]["code"] == "unknown_url"


async def test_requests_over_the_limit_are_answered_429() -> None:
    async with fronting(ScriptedTarget(endless), max_requests=1) as front, front.client() as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="demo", prompt="x")
        await stream.close()


async def test_one_client_cannot_take_all_requests_of_a_gateway(tmp_path: Path) -> None:
    limits = {"max_requests": 8, "api_keys_file": keys_file(tmp_path, alice="a", bob="b")}
    async with (
        fronting(ScriptedTarget(endless), **limits) as front,
        front.client("a") as first,
        front.client("b") as second,
    ):
        one: dict[str, Any] = {"model": "demo", "prompt": "x", "stream": True}
        streams = [await first.completions.create(**one) for _ in range(7)]
        with pytest.raises(openai.RateLimitError, match="7 requests of this client"):
            await first.completions.create(**one)
        streams.append(await second.completions.create(**one))
        with pytest.raises(openai.RateLimitError, match="8 requests are in progress"):
            await second.completions.create(**one)
        await streams.pop(0).close()
        await until_running(front, 7)
        streams.append(await first.completions.create(**one))
        for each in streams:
            await each.close()


async def test_the_official_client_does_not_repeat_a_request_that_takes_too_long() -> None:
    target = ScriptedTarget(endless)
    async with (
        fronting(target, request_timeout_seconds=0.05) as front,
        front.client(max_retries=2) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="maximum of this gateway") as caught:
            await client.completions.create(model="demo", prompt="x")
        assert caught.value.status_code == 408
    assert len(target.calls) <= 1, "the time can end before the call"
    target = ScriptedTarget(refusing(DeadlineError("the maximum of this target")))
    async with fronting(target) as front, front.client(max_retries=2) as client:
        with pytest.raises(openai.APIStatusError, match="maximum of this target"):
            await client.completions.create(model="demo", prompt="x")
    assert len(target.calls) == 1


async def test_no_body_is_answered_with_an_internal_error(front: Front) -> None:
    @settings(max_examples=60, deadline=None)
    @given(BODIES, st.sampled_from(["completions", "chat/completions"]))
    def attack(body: dict[str, Any], path: str) -> None:
        given_body = json.dumps({"model": "demo"} | body if body else body).encode()
        status, _, text = raw(front, f"/v1/{path}", given_body)
        assert status < 500, text
        assert ('"error"' in text) == (status >= 400), text

    await asyncio.to_thread(attack)
