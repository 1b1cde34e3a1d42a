"""Bodies of requests: shares of clients, and how fast a body must arrive."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import DeadlineError, OverloadedError, TooLargeError
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


def test_a_request_that_runs_grows_while_others_leave_anything() -> None:
    budget = BodyBudget(1600)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        other.take(700)
        first.take(450)
        second.take(100, is_running=True)
        second.take(350, is_running=True)
        with pytest.raises(OverloadedError, match="at most 900: all of what others leave"):
            second.take(1, is_running=True)


def test_a_request_that_is_too_large_for_an_idle_gateway_is_refused_for_good() -> None:
    with BodyBudget(1600).share("a") as share:
        share.take(800)
        with pytest.raises(TooLargeError, match="over 800 bytes, half of max_total_body_bytes"):
            share.take(1)


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
