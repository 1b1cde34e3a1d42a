"""Where bodies are parsed, and what a large one may contain."""

import json
import threading

import pytest

from ssd.errors import FieldError, TooLargeError
from ssd.rpc.codec import GenerateCall
from ssd_gateway.parser import SMALL_BYTES, BodyLimits, RequestParser
from ssd_gateway.schemas import CompletionRequest

LIMITS = BodyLimits(num_bytes=1 << 23, num_values=1000)
threads: list[str] = []


class Noted(CompletionRequest):
    """Notes the thread in which it is converted."""

    def calls(self) -> dict[str, GenerateCall]:
        threads.append(threading.current_thread().name)
        return super().calls()


async def test_a_large_body_is_parsed_away_from_the_event_loop() -> None:
    parser = RequestParser()
    threads.clear()
    for size in (SMALL_BYTES // 2, 2 * SMALL_BYTES):
        body = json.dumps({"model": "m", "prompt": "x" * size}).encode()
        request = await parser.prepare(Noted, body, LIMITS)
        assert request.calls[0].prompt == "x" * size
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("parser")


async def test_errors_of_large_bodies_are_those_of_small_ones() -> None:
    parser = RequestParser()
    body = json.dumps({"prompt": "x" * SMALL_BYTES, "top_p": "1"}).encode()
    with pytest.raises(FieldError, match="top_p: must be a number"):
        await parser.prepare(CompletionRequest, body, LIMITS)
    with pytest.raises(TooLargeError, match="values"):
        await parser.prepare(CompletionRequest, b"[" * (2 * SMALL_BYTES), LIMITS)
