"""What a response keeps."""

import json
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ssd.types import (
    GenerationChunk,
    LookupResult,
    PositionLogprobs,
    Round,
    TokenLogprob,
    TokenText,
)
from ssd_gateway.responses import (
    ChatFormat,
    CompletionFormat,
    Continuation,
    Position,
    StreamAssembly,
)
from ssd_gateway.schemas import CompletionRequest, parse
from ssd_gateway.tool_calls import TextReader


def test_a_stream_keeps_nothing_that_it_has_sent() -> None:
    fields = {"prompt": "x", "stream": True, "logprobs": 1, "report_rounds": True}
    request = parse(CompletionRequest, json.dumps(fields).encode()).prepared()
    assembly = StreamAssembly({"id": "a"}, CompletionFormat(), request, TextReader)

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

    # Fills the free lists of the interpreter.
    send(200)
    tracemalloc.start()
    try:
        send(200)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200 * 40


@given(
    st.lists(st.sampled_from([b"a", "é日".encode(), b"\xe6", b"\x97\xa5", b"\x80", b"\xff", b""]))
)
def test_the_offset_of_a_token_is_its_place_in_the_text(parts: list[bytes]) -> None:
    continuation = Continuation(TextReader(), awaits_prompt=False)
    tokens = [TokenLogprob(1, -1.0, part.decode(errors="replace"), part) for part in parts]
    logprobs = tuple(PositionLogprobs(token, ()) for token in tokens)
    _, positions = continuation.add(
        GenerationChunk(token_ids=(1,) * len(tokens), logprobs=logprobs)
    )
    # All bytes before a token, whose last character may be incomplete.
    before = [b"".join(parts[:index]).decode(errors="replace") for index in range(len(parts))]
    assert [position.offset for position in positions] == [*map(len, before)]


def test_special_tokens_have_names_in_log_probabilities() -> None:
    word, end = TokenLogprob(1, -0.5, "a"), TokenLogprob(8, -1.0, special="<end>")
    other = TokenLogprob(9, -2.0)
    positions = [Position(0, PositionLogprobs(end, (word, end, other)))]
    text = CompletionFormat().logprobs(positions)
    assert text["tokens"] == ["<end>"]
    assert text["top_logprobs"] == [{"a": -0.5, "<end>": -1.0, "token_id:9": -2.0}]
    (chat,) = ChatFormat().logprobs(positions)["content"]
    assert (chat["token"], chat["bytes"]) == ("<end>", [])
    assert [each["token"] for each in chat["top_logprobs"]] == ["a", "<end>", "token_id:9"]
