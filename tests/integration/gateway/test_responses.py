"""Log-probabilities, rounds and counts of responses, with the official client."""

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.gateway import HELLO, ScriptedTarget, spells

from ssd.rpc.codec import GenerateCall
from ssd.types import (
    FinishReason,
    GenerationChunk,
    LookupResult,
    PositionLogprobs,
    Round,
    TokenLogprob,
    TokenText,
    Usage,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_rounds_and_statistics_are_returned_on_request(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    reported = Round(
        (TokenText(1, "b"), TokenText(2, "x")),
        1,
        (TokenText(1, "b"), TokenText(3, "c")),
        LookupResult.HIT,
    )

    async def reports(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        yield GenerationChunk(token_ids=(1, 3), text="bc", seed=2**64 - 1, rounds=(reported,))
        async for chunk in spells(call, ("d",)):
            yield chunk

    target.answer = reports
    more = {"report_rounds": True}
    whole = await client.completions.create(model="demo", prompt="a", extra_body=more)
    plain = await client.completions.create(model="demo", prompt="a")
    stream = await client.completions.create(model="demo", prompt="a", stream=True, extra_body=more)
    parts = [(chunk.model_extra or {}).get("ssd", {}) async for chunk in stream]
    shown = {"proposed": ["b", "x"], "accepted": 1, "added": ["b", "c"], "lookup": "hit"}
    extended: Any = (whole.model_extra or {})["ssd"]
    assert extended["rounds"] == parts[0]["rounds"] == [shown]
    assert parts[0]["seed"] == str(2**64 - 1)
    assert extended["statistics"]["rounds"] == parts[-1]["statistics"]["rounds"] == 3
    assert "ssd" not in (plain.model_extra or {})


async def test_each_of_several_choices_has_its_own_seed_and_rounds(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def reports(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        seed = {"a": 11, "b": 22}[str(call.prompt)]
        async for chunk in spells(call, ("d", "e")):
            added = (TokenText(1, f"{call.prompt}{chunk.choice}{chunk.text}"),)
            round_ = Round((), 0, added, LookupResult.MISS)
            yield replace(chunk, seed=seed if chunk.text == "d" else None, rounds=(round_,))

    target.answer = reports
    more = {"report_rounds": True}
    both: Any = await client.completions.create(
        model="demo", prompt=["a", "b"], n=2, extra_body=more
    )
    one: Any = await client.completions.create(model="demo", prompt="a", n=2, extra_body=more)
    assert [choice.ssd["seed"] for choice in both.choices] == ["11", "11", "22", "22"]
    added = [[round_["added"] for round_ in choice.ssd["rounds"]] for choice in both.choices]
    assert added == [[[f"{name}d"], [f"{name}e"]] for name in ("a0", "a1", "b0", "b1")]
    assert all(choice.ssd["statistics"]["rounds"] == 3 for choice in both.choices)
    assert "ssd" not in both.model_extra
    assert (one.ssd, one.choices[1].ssd["seed"]) == ({"seed": "11"}, "11")


async def test_n_continuations_have_log_probabilities_of_their_own(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    def position(text: str, logprob: float) -> PositionLogprobs:
        top = (TokenLogprob(5, -0.5, "é"), TokenLogprob(6, -math.inf, "z"))
        return PositionLogprobs(TokenLogprob(1, logprob, text), top)

    async def weighs(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        found = 0
        async for chunk in spells(call):
            found += 1
            yield replace(chunk, logprobs=(position(chunk.text, -float(found)),))

    target.answer = weighs
    chat: Any = await client.chat.completions.create(
        model="demo", messages=HELLO, n=2, logprobs=True, top_logprobs=2
    )
    text: Any = await client.completions.create(model="demo", prompt="x", n=2, logprobs=2)
    stream = await client.completions.create(model="demo", prompt="x", n=2, logprobs=2, stream=True)
    parts = [part.choices[0] async for part in stream]
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (5, 6)
    found = chat.choices[1].logprobs.content
    assert [each.logprob for each in found] == [-4.0, -5.0, -6.0]
    assert (found[0].token, found[0].bytes) == ("a ", [97, 32])
    assert [each.logprob for each in found[0].top_logprobs] == [-0.5, -9999.0]
    assert found[0].top_logprobs[0].bytes == [0xC3, 0xA9]
    shown = text.choices[0].logprobs
    assert shown.tokens == ["a ", "b ", "c"]
    assert shown.text_offset == [0, 2, 4]
    assert shown.top_logprobs == [{"é": -0.5, "z": -9999.0}] * 3
    offsets = [part.logprobs.text_offset for part in parts if part.index == 1 and part.logprobs]
    assert offsets == [[0], [2], [4]]


async def test_offsets_of_a_stream_are_those_of_a_whole_response(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def lags(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        texts = ["", "a ", "b c"]
        for number, (word, text) in enumerate(zip(("a ", "b ", "c"), texts, strict=True)):
            yield GenerationChunk(
                token_ids=(number,),
                text=text,
                logprobs=(PositionLogprobs(TokenLogprob(number, -1.0, word)),),
                finish_reason=FinishReason.LENGTH if number == 2 else None,
            )

    asked: Any = {"model": "demo", "prompt": "x", "logprobs": 1}
    target.answer = lags
    whole: Any = (await client.completions.create(**asked)).choices[0]
    stream = await client.completions.create(stream=True, **asked)
    parts = [part.choices[0].logprobs async for part in stream]
    assert whole.text == "a b c"
    assert whole.logprobs.text_offset == [0, 2, 4]
    assert [each.text_offset for each in parts if each] == [[0], [2], [4]]


async def test_tokens_that_are_parts_of_a_character_have_their_bytes(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def splits(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        tokens = [TokenLogprob(n, -1.0, "\ufffd", bytes([b])) for n, b in enumerate("é".encode())]
        tokens.append(TokenLogprob(9, -1.0, "日"))
        yield GenerationChunk(
            token_ids=(0, 1, 9),
            text="é日",
            logprobs=tuple(PositionLogprobs(each, (*tokens,)) for each in tokens),
            finish_reason=FinishReason.LENGTH,
        )

    target.answer = splits
    chat: Any = await client.chat.completions.create(
        model="demo", messages=HELLO, logprobs=True, top_logprobs=3
    )
    text: Any = await client.completions.create(model="demo", prompt="x", logprobs=3)
    found = chat.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in found) == "é日".encode()
    shown = text.choices[0].logprobs
    assert shown.tokens == ["bytes:\\xc3", "bytes:\\xa9", "日"]
    assert shown.text_offset == [0, 1, 1]
    assert shown.top_logprobs == [dict.fromkeys(shown.tokens, -1.0)] * 3


async def test_cached_tokens_are_those_that_all_continuations_of_a_prompt_had(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def shares(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        for choice, cached in enumerate((0, 4)):
            usage = Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=cached)
            yield GenerationChunk(
                token_ids=(1,), choice=choice, finish_reason=FinishReason.LENGTH, usage=usage
            )

    target.answer = shares
    answer: Any = await client.completions.create(model="demo", prompt="x", n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_each_object_of_a_stream_has_the_token_counts_so_far_on_request(
    target: ScriptedTarget, client: AsyncOpenAI
) -> None:
    async def counts(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        async for chunk in spells(call):
            first = chunk.token_ids == (0,)
            if first and call.sampling.echo:
                yield GenerationChunk(token_ids=(7,) * 5, text="p", prompt_tokens=5)
                first = False
            yield replace(chunk, prompt_tokens=5 if first else 0)

    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    target.answer = counts
    chat = await client.chat.completions.create(
        model="demo", messages=HELLO, stream=True, stream_options=options
    )
    of_chat = [chunk.usage async for chunk in chat]
    text = await client.completions.create(
        model="demo", prompt="p", echo=True, stream=True, stream_options=options
    )
    of_text = [chunk.usage async for chunk in text]
    alone = await client.completions.create(
        model="demo", prompt="p", stream=True, stream_options=options | {"include_usage": False}
    )
    assert [chunk.usage async for chunk in alone] == [None] * 3
    # The role, or the echo; three tokens; the counts of all continuations.
    for found in (of_chat, of_text):
        assert [each and each.completion_tokens for each in found] == [0, 1, 2, 3, 3]
        assert [each and each.prompt_tokens for each in found] == [5] * 5
        assert [each and each.total_tokens for each in found] == [5, 6, 7, 8, 8]
