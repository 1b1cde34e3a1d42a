"""Error objects of the API, of the gateway itself and of its targets."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.gateway import HELLO, Front, ScriptedTarget, fronting, get, refusing

from ssd.errors import (
    ContextLengthError,
    FieldError,
    NotReadyError,
    OverloadedError,
    PromptSizeError,
)
from ssd.rpc.codec import GenerateCall
from ssd.types import FinishReason, GenerationChunk
from ssd_gateway.targets import TargetPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("error", "raised", "code", "param"),
    [
        (
            FieldError("sampling.temperature", "is 9"),
            openai.BadRequestError,
            "invalid_value",
            "temperature",
        ),
        (
            FieldError("token_ids.ids[3]", "is 9, must be in 0..7"),
            openai.BadRequestError,
            "invalid_value",
            "prompt[3]",
        ),
        (ContextLengthError(60, 9, 64), openai.BadRequestError, "context_length_exceeded", None),
        (
            PromptSizeError("chat", "has 99 bytes"),
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        (OverloadedError("full", 2.5), openai.RateLimitError, "rate_limit_exceeded", None),
        (NotReadyError("draining"), openai.InternalServerError, "service_unavailable", None),
        (RuntimeError("secret"), openai.InternalServerError, None, None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_errors_of_a_target_are_openai_errors(
    error: Exception,
    raised: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
    target: ScriptedTarget,
    client: AsyncOpenAI,
) -> None:
    target.answer = refusing(error)
    for stream in (False, True):
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model="demo", messages=HELLO, stream=stream)
        assert (caught.value.code, caught.value.param) == (code, param)
        assert "secret" not in caught.value.message
        assert caught.value.request_id
        pauses = {OverloadedError: "3", NotReadyError: "1"}
        pause = caught.value.response.headers.get("retry-after")
        assert pause == pauses.get(type(error))


REFUSED: list[tuple[Any, str | None, str]] = [
    ({"prompt": "x", "temprature": 1}, "temprature", "unrecognized"),
    ({"prompt": "x", "temperature": "1"}, "temperature", "must be a number"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "is 0, must be at least 1"),
    ({"prompt": "x", "max_tokens": 2**40}, "max_tokens", "must be at most 2147483647"),
    ({"prompt": "x", "echo": True, "logprobs": 0}, "echo", "cannot be combined with logprobs"),
    ({"prompt": "x", "stop": ["y"] * 17}, "stop", "has 17 entries, must have at most 16"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
    ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": []}, "prompt", "1..32"),
    ({"prompt": 7}, "prompt", "must be a text, a list of texts"),
    ({"prompt": [1, -1]}, "prompt[1]", "is -1, must be at least 0"),
    ({"prompt": "x", "stop": [7]}, "stop", "must be a text or a list of texts"),
    ({"prompt": "x", "mode": "fast"}, "mode", "is 'fast', must be one of auto, autoregressive"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "not supported"),
    ({}, "prompt", "required"),
    ([], None, "JSON object"),
    ({"prompt": "x", "model": None}, "model", "required; this server has demo"),
    ({"prompt": "x", "model": ""}, "model", "required; this server has demo"),
    ({"messages": []}, "messages", "is empty; it must have at least 1 entry"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", "functions"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (
        {"messages": [{"role": "king", "content": "x"}]},
        "messages[0].role",
        "must be one of developer, system",
    ),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"messages": HELLO, "tools": [{"type": "custom"}]}, "tools[0].type", "one of function"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"messages": HELLO, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "function"),
    ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "image_url",
    ),
]


REFUSED_BY_TARGETS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"type": "x"}}, "guided_json", "json_schema"),
    ({"guided_choice": ["a"]}, "guided_choice", "regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_schema"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"max_completion_tokens": 7}, "max_completion_tokens", "max_tokens"),
    ({"max_tokens": 7}, "max_tokens", "max_tokens"),
]


async def test_a_refusal_of_the_target_names_the_field_of_the_body(
    target: ScriptedTarget, front: Front
) -> None:
    for body, param, field in REFUSED_BY_TARGETS:
        target.answer = refusing(FieldError(f"sampling.{field}", "is wrong"))
        whole = json.dumps({"model": "demo", "messages": HELLO, **body}).encode()
        status, _, text = await get(front, "/v1/chat/completions", whole)
        error = json.loads(text)["error"]
        assert (status, error["param"], error["message"]) == (400, param, f"{param}: is wrong")


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ([[1], [2], [9]], "prompt[2][3]"),
        ([[9]], "prompt[0][3]"),
        ([7, 9], "prompt[3]"),
        (["1", "9"], "prompt[1]"),
        ("9", "prompt"),
        ([[1], [9, 9]], "prompt[1]"),
    ],
)
async def test_an_error_names_its_prompt(
    prompts: Any, param: str, target: ScriptedTarget, front: Front
) -> None:
    async def refuses(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
        match call.prompt:
            case (9, 9):
                raise ContextLengthError(60, 9, 64, "token_ids.ids")
            case (*_, 9):
                raise FieldError("token_ids.ids[3]", "is wrong")
            case "9":
                raise FieldError("text", "is wrong")
        yield GenerationChunk(token_ids=(1,), text="a")
        await asyncio.Event().wait()

    target.answer = refuses
    for stream in (False, True):
        body = {"model": "demo", "prompt": prompts, "stream": stream}
        _, _, text = await get(front, "/v1/completions", json.dumps(body).encode())
        error = json.loads(text.partition("data: {")[0] or text.split("data: ")[-1])["error"]
        assert error["param"] == param
        assert error["message"] == f"{param}: is wrong" or "over max_model_len" in error["message"]


async def test_a_request_that_is_not_valid_is_refused_with_its_field(
    target: ScriptedTarget, front: Front
) -> None:
    for body, param, words in REFUSED:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        whole = {"model": "demo", **body} if isinstance(body, dict) else body
        status, _, text = await get(front, path, json.dumps(whole).encode())
        found = json.loads(text)["error"]
        assert (status, found["param"]) == (400, param), body
        assert words in found["message"], body
    assert not [call for call in target.calls if call.prompt]


async def abandoned(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    yield GenerationChunk(token_ids=(1,), text="a")
    yield GenerationChunk(token_ids=(), finish_reason=FinishReason.CANCELLED)


async def broken(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    yield GenerationChunk(token_ids=(1,), text="a")
    raise NotReadyError("the target stops")


@pytest.mark.parametrize(("answer", "num_lost"), [(abandoned, 0), (broken, 1)])
async def test_a_text_that_the_target_ends_does_not_lose_it_and_a_broken_connection_does(
    answer: Any, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = list[object]()
    monkeypatch.setattr(TargetPool, "_mark_lost", lambda _self, *found: lost.append(found))
    async with fronting(ScriptedTarget(answer)) as front, front.client() as client:
        with pytest.raises(openai.APIError, match="incomplete"):
            await client.completions.create(model="demo", prompt="x")
    assert len(lost) == num_lost
