"""Tools of a request and calls in its response, with the official client."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from tests.gateway import HELLO, INFO, TIME, WEATHER, ScriptedTarget, fronting, spells

from ssd.rpc.codec import GenerateCall
from ssd.types import FinishReason, GenerationChunk

TEXT = 'Sure.<tool_call>\n{"name": "weather", "arguments": {"place": "é"}}\n</tool_call>'
LLAMA_TEXT = '{"name": "weather", "parameters": {"place": "é"}}; {"name": "time", "parameters": {}}'


def writes(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
    async def answer(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        async for chunk in spells(call, tuple(text)):
            yield replace(chunk, finish_reason=finish if chunk.finish_reason else None)

    return answer


def called(message: Any) -> Iterator[tuple[str, Any]]:
    for each in message.tool_calls:
        assert each.id.startswith("call_")
        assert each.type == "function"
        yield each.function.name, json.loads(each.function.arguments)


async def joined(stream: Any) -> tuple[str, list[list[str]], str | None]:
    """Content, name and arguments of each call, and the finish reason of a stream."""
    content, calls, reason = "", [], None
    async for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.type == "function"
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "names"),
    [
        ("hermes", TEXT, "Sure.", ["weather"]),
        ("llama3_json", LLAMA_TEXT, None, ["weather", "time"]),
    ],
)
async def test_calls_in_a_text_are_tool_calls_of_the_message_and_of_a_stream(
    tool_format: str, text: str, content: str | None, names: list[str]
) -> None:
    target = ScriptedTarget(writes(text), replace(INFO, tool_format=tool_format))
    request: Any = {"model": "demo", "messages": HELLO, "tools": [WEATHER, TIME]}
    async with fronting(target) as front, front.client() as client:
        answer = await client.chat.completions.create(**request, n=2)
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == content
            found = dict(called(choice.message))
            assert list(found) == names
            assert found["weather"] == {"place": "é"}
        streamed = await joined(await client.chat.completions.create(**request, stream=True))
        assert streamed[0] == (content or "")
        assert [name for name, _ in streamed[1]] == names
        assert json.loads(streamed[1][0][1]) == {"place": "é"}
        assert streamed[2] == "tool_calls"

        plain = await client.chat.completions.create(**request, tool_choice="none")
        assert plain.choices[0].message.content == text
        assert plain.choices[0].message.tool_calls is None
        assert plain.choices[0].finish_reason == "stop"
        prompts: list[Any] = [call.prompt for call in target.calls]
        assert json.loads(prompts[0].tools) == [WEATHER, TIME]
        assert prompts[-1].tools == ""


async def test_a_text_that_ends_within_a_call_has_the_finish_reason_length() -> None:
    target = ScriptedTarget(writes(TEXT[:-20], FinishReason.LENGTH))
    request: Any = {"model": "demo", "messages": HELLO, "tools": [WEATHER]}
    async with fronting(target) as front, front.client() as client:
        answer = await client.chat.completions.create(**request)
        assert answer.choices[0].message.content == TEXT[:-20]
        assert answer.choices[0].finish_reason == "length"
        streamed = await joined(await client.chat.completions.create(**request, stream=True))
        assert (streamed[0], streamed[1][0][0], streamed[2]) == ("Sure.", "weather", "length")


async def test_a_call_that_is_required_is_a_list_and_that_of_a_named_function_its_arguments() -> (
    None
):
    required = (
        '[{"name": "weather", "parameters": {"place": "é"}}, {"name": "time", "parameters": {}}]'
    )
    named: Any = {"type": "function", "function": {"name": "weather"}}
    cases: list[tuple[Any, str, str, list[str]]] = [
        ("required", required, "tool_calls", ["weather", "time"]),
        (named, '{"place": "é"}', "stop", ["weather"]),
    ]
    for choice, text, reason, names in cases:
        # The grammar makes the calls: no format needs to be known.
        target = ScriptedTarget(writes(text), replace(INFO, tool_format=""))
        request: Any = {"model": "demo", "messages": HELLO, "tools": [WEATHER, TIME]}
        request["tool_choice"] = choice
        async with fronting(target) as front, front.client() as client:
            answer = await client.chat.completions.create(**request)
            assert list(dict(called(answer.choices[0].message))) == names
            assert answer.choices[0].message.content is None
            assert answer.choices[0].finish_reason == reason
            streamed = await joined(await client.chat.completions.create(**request, stream=True))
            assert [name for name, _ in streamed[1]] == names
            assert json.loads(streamed[1][0][1]) == {"place": "é"}
            assert (streamed[0], streamed[2]) == ("", reason)


async def test_tools_of_a_model_whose_format_is_not_known_are_refused_before_it_runs() -> None:
    target = ScriptedTarget(info=replace(INFO, tool_format=""))
    async with fronting(target) as front, front.client() as client:
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError, match="hermes, llama3_json") as caught:
                await client.chat.completions.create(
                    model="demo", messages=HELLO, tools=[WEATHER], stream=stream
                )
            assert caught.value.param == "tool_choice"
    assert not target.calls
