"""Bodies of requests: shares of clients, and how fast a body must arrive."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway import JSON_HEAD, ScriptedTarget, endless, fronting, get

from ssd.errors import DeadlineError, OverloadedError
from ssd_gateway import body
from ssd_gateway.body import BodyBudget, read_body

SCOPE = {"type": "http", "headers": [(b"content-type", b"application/json")]}


def test_a_client_has_half_of_what_the_others_leave() -> None:
    budget = BodyBudget(1600)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        first.take(500)
        second.take(300)
        with pytest.raises(OverloadedError, match="would have 801 bytes, must have at most 800"):
            second.take(1)
        other.take(400)
        with pytest.raises(OverloadedError, match="must have at most 400"):
            other.take(1)
        first.keep(100)
        other.take(200)
        first.keep(200)
        with pytest.raises(OverloadedError, match="would have 601 bytes"):
            other.take(1)
    with budget.share("c") as later:
        later.take(800)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2000))))
def test_no_client_can_use_all_bytes(steps: list[tuple[str, int]]) -> None:
    budget = BodyBudget(1 << 12)
    with ExitStack() as stack:
        for client, num_bytes in steps:
            share = stack.enter_context(budget.share(client))
            try:
                share.take(num_bytes)
            except OverloadedError:
                share.keep(0)
        # Four clients leave 1/16 together, of which a fifth one has half.
        stack.enter_context(budget.share("e")).take(1 << 7)


async def stops(num_parts: int) -> AsyncGenerator[bytes, None]:
    """Parts of a body that never ends."""
    for _ in range(num_parts):
        yield b" " * body.PART_BYTES
    await asyncio.Event().wait()


async def trickles() -> AsyncGenerator[bytes, None]:
    while True:
        await asyncio.to_thread(int)
        yield b" "


@pytest.mark.parametrize(
    ("parts", "found"),
    [(stops(0), "0 bytes"), (stops(3), f"{3 * body.PART_BYTES} bytes"), (trickles(), " bytes")],
)
async def test_a_body_that_arrives_too_slowly_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, parts: AsyncGenerator[bytes, None], found: str
) -> None:
    monkeypatch.setattr(body, "PART_SECONDS", 0.05)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(parts), "more_body": True}

    with (
        BodyBudget(1 << 24).share("a") as share,
        pytest.raises(DeadlineError, match=f"too slowly: [0-9]*{found} so far"),
    ):
        await read_body(SCOPE, receive, 1 << 23, share)
    await parts.aclose()


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
            async with asyncio.timeout(10):
                while "ssd_gateway_running_requests 0.0" not in (await get(front, "/metrics"))[2]:
                    pass


async def test_bodies_that_do_not_end_deny_the_gateway_to_no_other_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "PART_SECONDS", 0.5)
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(f"{key}:{hashlib.sha256(key.encode()).hexdigest()}\n" for key in ("a", "b"))
    )
    limits = {"max_body_bytes": 2048, "max_total_body_bytes": 4096, "api_keys_file": str(keys)}
    async with fronting(ScriptedTarget(), **limits) as front, front.client("b") as client:
        head = JSON_HEAD + b"authorization: Bearer a\r\ncontent-length: 2048\r\n\r\n"
        slow = [await asyncio.open_connection("127.0.0.1", front.gateway.port) for _ in range(2)]
        for _, writer in slow:
            writer.write(head + b" " * 2047)
        # The second one passes the part of the client.
        refused = await asyncio.wait_for(slow[1][0].read(12), 10)
        answer = await client.completions.create(model="demo", prompt="x" * 500)
        assert answer.choices[0].text == "a b c"
        assert refused == b"HTTP/1.1 429"
        assert await asyncio.wait_for(slow[0][0].read(12), 10) == b"HTTP/1.1 408"
        for _, writer in slow:
            writer.close()
