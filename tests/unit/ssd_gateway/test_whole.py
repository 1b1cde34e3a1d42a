"""Responses that are no streams."""

import json
import tracemalloc
from typing import Any

from ssd.types import FinishReason, GenerationChunk, PositionLogprobs, TokenLogprob, Usage
from ssd_gateway.api import send_whole
from ssd_gateway.json_text import BLOCK_BYTES
from ssd_gateway.responses import ChatFormat, WholeAssembly
from ssd_gateway.schemas import ChatRequest, parse
from ssd_gateway.tool_calls import HermesReader, TextReader

CALL = '<tool_call>{"name": "f", "arguments": {"a": "' + "é" * 1000 + '"}}</tool_call>'


def assembly(**fields: Any) -> WholeAssembly:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse(ChatRequest, json.dumps(body).encode()).prepared()
    return WholeAssembly({"id": "a"}, ChatFormat(), request, TextReader)


def chunk(choice: int, number: int, *, is_last: bool = False) -> GenerationChunk:
    tokens = [TokenLogprob(number, -0.123456 * each, f" token {each}") for each in range(1, 21)]
    return GenerationChunk(
        token_ids=(number,),
        text=tokens[0].text,
        choice=choice,
        logprobs=(PositionLogprobs(tokens[0], tuple(tokens)),),
        finish_reason=FinishReason.LENGTH if is_last else None,
        usage=Usage(prompt_tokens=1, completion_tokens=number + 1) if is_last else None,
    )


async def sent(whole: WholeAssembly) -> list[dict[str, Any]]:
    """Messages of the response."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await send_whole(whole.whole(), send)
    return messages


async def test_a_whole_response_takes_the_memory_that_it_counts_and_is_sent_in_blocks() -> None:
    whole = assembly(n=2, logprobs=True, top_logprobs=20)
    tracemalloc.start()
    try:
        counted = sum(
            whole.add(0, chunk(choice, number, is_last=number == 99))
            for number in range(100)
            for choice in range(2)
        )
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.25 * counted + 50_000
    start, *parts = await sent(whole)
    body = b"".join(part["body"] for part in parts)
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)
    assert len(body) > 2 * BLOCK_BYTES
    assert max(len(part["body"]) for part in parts) <= BLOCK_BYTES
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert abs(len(body) - counted) < 1000
    answer = json.loads(body)
    for choice in answer["choices"]:
        assert choice["message"]["content"] == " token 1" * 100
        found = choice["logprobs"]["content"]
        assert [len(each["top_logprobs"]) for each in found] == [20] * 100
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 200


async def test_the_text_of_a_call_counts_while_it_is_incomplete() -> None:
    whole = assembly()
    whole.new_reader = lambda: HermesReader(is_whole=True)
    counted = [
        whole.add(0, GenerationChunk(token_ids=(1,), text=CALL[place : place + 50]))
        for place in range(0, len(CALL), 50)
    ]
    assert counted[:20] == [50] * 20
    end = GenerationChunk(
        token_ids=(1,),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
    )
    counted.append(whole.add(0, end))
    _, *parts = await sent(whole)
    (choice,) = json.loads(b"".join(part["body"] for part in parts))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "' + "é" * 1000 + '"}'}
    assert sum(counted) > 2000
