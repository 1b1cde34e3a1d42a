"""Bodies of requests: shares of clients, and how fast a body must arrive."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import openai
import pytest
from tests.gateway import (
    JSON_HEAD,
    Front,
    ScriptedTarget,
    endless,
    fronting,
    get,
    keys_file,
    spells,
    until_running,
)

from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk
from ssd_gateway import body

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_prompts_of_a_client_in_progress_are_limited_and_metadata_is_not_held() -> None:
    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 4096}
    async with fronting(ScriptedTarget(endless), **limits) as front, front.client() as client:
        for _ in range(2):
            held = [
                await client.completions.create(
                    model="demo", prompt="x", stream=True, extra_body={"metadata": "y" * 1200}
                )
                for _ in range(4)
            ]
            held.append(
                await client.completions.create(model="demo", prompt="x" * 1200, stream=True)
            )
            with pytest.raises(openai.RateLimitError, match="max_total_body_bytes"):
                await client.completions.create(model="demo", prompt="x" * 1200)
            with pytest.raises(openai.RateLimitError, match="max_total_body_bytes"):
                await client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "x" * 1200}]
                )
            for stream in held:
                await stream.close()
            await until_running(front, 0)


async def test_a_whole_response_is_limited_and_a_stream_is_not() -> None:
    async def echoes(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        async for chunk in spells(call, ("x" * 900,) * (3 if call.prompt == "long" else 1)):
            yield chunk

    target = ScriptedTarget(echoes)
    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 4096}
    async with fronting(target, **limits) as front, front.client() as client:
        with pytest.raises(openai.APIStatusError, match="set stream") as caught:
            await client.completions.create(model="demo", prompt="long")
        assert caught.value.status_code == 413
        stream = await client.completions.create(model="demo", prompt="long", stream=True)
        assert sum([len(chunk.choices[0].text) async for chunk in stream]) == 2700
        answer = await client.completions.create(model="demo", prompt="x", n=2)
        assert sum(len(choice.text) for choice in answer.choices) == 1800


async def test_whole_responses_that_run_have_room_until_all_is_in_use() -> None:
    have_begun, may_end = asyncio.Barrier(3), asyncio.Event()

    async def waits(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        await have_begun.wait()
        async for chunk in spells(call, ("x" * 1800, "")):
            yield chunk
            await may_end.wait()

    target = ScriptedTarget(waits)
    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 4096}
    async with fronting(target, **limits) as front, front.client() as client:
        create = client.completions.create
        running = [asyncio.ensure_future(create(model="demo", prompt="x")) for _ in range(3)]
        async with asyncio.timeout(10):
            (refused,), others = await asyncio.wait(running, return_when="FIRST_EXCEPTION")
        assert isinstance(error := refused.exception(), openai.RateLimitError)
        assert "all of what others leave of 4096" in str(error)
        may_end.set()
        assert [len((await each).choices[0].text) for each in others] == [1800, 1800]


async def test_bodies_that_do_not_end_deny_the_gateway_to_no_other_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "PART_SECONDS", 0.5)
    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 4096}
    keys = keys_file(tmp_path, alice="a", bob="b")
    async with (
        fronting(ScriptedTarget(), **limits, api_keys_file=keys) as front,
        front.client("b") as client,
    ):
        head = JSON_HEAD + b"authorization: Bearer a\r\ncontent-length: 2048\r\n\r\n"
        slow = [await asyncio.open_connection("127.0.0.1", front.gateway.port) for _ in range(2)]
        for _, writer in slow:
            writer.write(head + b" " * 2047)
        # The second one passes the part of the client.
        refused = await asyncio.wait_for(slow[1][0].read(12), 10)
        answer = await client.completions.create(model="demo", prompt="x" * 500)
        assert answer.choices[0].text == "a b c"
        assert refused == b"HTTP/1.1 429"
        too_slow = await asyncio.wait_for(slow[0][0].readuntil(b"\r\n\r\n"), 10)
        assert too_slow.startswith(b"HTTP/1.1 408")
        assert b"x-should-retry" not in too_slow, "the client may send it again"
        for _, writer in slow:
            writer.close()


async def test_a_body_beyond_the_longest_prompt_is_refused_before_it_is_read(front: Front) -> None:
    large = b'{"messages":"' + b"x" * (4 << 20) + b'"}'
    status, _, text = await get(front, "/v1/chat/completions", large)
    assert (status, "over the limit" in text) == (413, True)
    many = b'{"messages":"x","metadata":[' + b"[]," * (1 << 18) + b"[]]}"
    status, _, text = await get(front, "/v1/chat/completions", many)
    assert (status, "values; send shorter" in text) == (413, True)
