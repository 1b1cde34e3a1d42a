"""Tools with a real target and the official client: a grammar makes the calls.

The embedded pair is not trained to call tools, so a chat template of this test asks for them.
"""

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tests.gateway import gateway_of
from tests.pairs import target_of

from ssd import demo

TEMPLATE = """
{%- if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}
{%- if enable_thinking is false %}<think></think>{% endif %}
{%- for message in messages %}
    {{- message.role ~ ": " ~ message.content }}
    {%- for call in message.tool_calls %}{{ call.function.arguments.count + 1 }}{% endfor %}
{% endfor %}"""
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add some numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"enum": ["metre", "é"]},
            },
            "required": ["count", "unit"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
}
SAME: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 256,
    "temperature": 0.8,
    "seed": 3,
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(demo.folder("demo://target"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with target_of(folder) as (target, _), gateway_of(target) as (_, client):
        yield client


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "stop":
        assert found == {}
    else:
        assert name == "add"
        assert found.keys() == {"count", "unit"}
        assert found["count"] in range(10)
        assert found["unit"] in ("metre", "é")


async def test_required_and_named_tools_are_called_with_arguments_of_their_schema(
    client: AsyncOpenAI,
) -> None:
    tools = {"tools": [ADD, STOP], "parallel_tool_calls": False}
    named: Any = {"type": "function", "function": {"name": "add"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        request: Any = {**SAME, **tools, "tool_choice": choice}
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert whole.finish_reason == reason
        (call,) = whole.message.tool_calls
        check(call.function.name, call.function.arguments)

    broken: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: no") as caught:
        await client.chat.completions.create(**SAME, tools=[broken], tool_choice="required")
    assert caught.value.param == "tools"


async def test_tools_calls_and_variables_reach_the_template(client: AsyncOpenAI) -> None:
    async def num_prompt_tokens(**fields: Any) -> int:
        request = {**SAME, "max_tokens": 1, **fields}
        return int((await client.chat.completions.create(**request)).usage.prompt_tokens)

    plain = await num_prompt_tokens()
    assert await num_prompt_tokens(tools=[ADD]) > plain + 20
    assert await num_prompt_tokens(tools=[ADD], tool_choice="none") == plain
    thinking = {"chat_template_kwargs": {"enable_thinking": False, "unknown": 1}}
    assert await num_prompt_tokens(extra_body=thinking) > plain
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": "{}"},
    }
    history = [
        *SAME["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    # The template adds to an argument that is missing.
    with pytest.raises(openai.BadRequestError, match="the chat template of the model rejects it"):
        await num_prompt_tokens(messages=history)
    call["function"]["arguments"] = '{"count": 5}'
    assert await num_prompt_tokens(messages=history) > plain
    call["function"]["arguments"] = "5"
    with pytest.raises(openai.BadRequestError, match="is not a JSON object") as caught:
        await num_prompt_tokens(messages=history)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(openai.BadRequestError, match="is set by the server") as caught:
        await num_prompt_tokens(extra_body={"chat_template_kwargs": {"tools": []}})
    assert caught.value.param == "chat_template_kwargs"
