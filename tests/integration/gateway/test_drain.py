"""The end of a gateway."""

import asyncio
from collections.abc import AsyncGenerator

import openai
import pytest
from tests.gateway import ScriptedTarget, fronting, get, spells

from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error() -> None:
    have_begun = asyncio.Event()

    async def endless(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        if len(target.calls) == 2:
            have_begun.set()
        yield GenerationChunk(token_ids=(1,), text="a")
        await asyncio.Event().wait()

    target = ScriptedTarget(endless)
    async with fronting(target, drain_seconds=0.1) as front, front.client() as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        whole = asyncio.create_task(client.completions.create(model="demo", prompt="y"))
        parts = aiter(stream)
        assert (await anext(parts)).choices[0].text == "a"
        await asyncio.wait_for(have_begun.wait(), 10)
        front.gateway.drain()
        with pytest.raises(openai.APIError, match="the gateway cancelled the request"):
            await anext(parts)
        with pytest.raises(openai.InternalServerError, match="the gateway cancelled the request"):
            await whole


async def test_a_gateway_that_drains_refuses_new_requests_until_the_running_ones_end() -> None:
    may_end = asyncio.Event()

    async def waits(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(token_ids=(1,), text="a")
        await may_end.wait()
        async for chunk in spells(call, ("b",)):
            yield chunk

    target = ScriptedTarget(waits)
    async with fronting(target, drain_seconds=3600.0) as front, front.client() as client:
        stream = await client.completions.create(model="demo", prompt="x", stream=True)
        parts = aiter(stream)
        assert (await anext(parts)).choices[0].text == "a"
        front.gateway.drain()
        for _ in range(2):
            assert (await get(front, "/readyz"))[::2] == (503, "draining\n")
            status, headers, text = await get(front, "/v1/completions", b'{"prompt":"x"}')
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert "accepts no new requests" in text
        assert "ssd_gateway_running_requests 1.0" in (await get(front, "/metrics"))[2]
        may_end.set()
        assert [part.choices[0].text async for part in parts] == ["b"]
    assert len(target.calls) == 1
