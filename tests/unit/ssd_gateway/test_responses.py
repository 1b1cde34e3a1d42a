"""What a response keeps."""

import json
import tracemalloc

from ssd.types import (
    GenerationChunk,
    LookupResult,
    PositionLogprobs,
    Round,
    TokenLogprob,
    TokenText,
)
from ssd_gateway.responses import Assembly, CompletionFormat, Head
from ssd_gateway.schemas import CompletionRequest, parse
from ssd_gateway.tool_calls import TextReader


def test_a_stream_keeps_nothing_that_it_has_sent() -> None:
    fields = {"prompt": "x", "stream": True, "logprobs": 1, "report_rounds": True}
    request = parse(CompletionRequest, json.dumps(fields).encode()).prepared()
    head = Head(id="a", created=1, model="m", fingerprint="f")
    assembly = Assembly(head, CompletionFormat(), request, TextReader)

    def send(number: int) -> None:
        for _ in range(number):
            token = TokenLogprob(1, -1.0, "a" * 100)
            proposed = Round((TokenText(1, "b" * 100),), 1, (), LookupResult.HIT)
            chunk = GenerationChunk(
                token_ids=(1,),
                text="c" * 100,
                logprobs=(PositionLogprobs(token, ()),),
                rounds=(proposed,),
            )
            assert assembly.add(0, chunk)

    send(10)
    tracemalloc.start()
    try:
        send(200)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200 * 40
