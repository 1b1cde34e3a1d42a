"""Any body is a list of calls or an error of the client."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.gateway import BODIES, HELLO, VALUES

from ssd.errors import FieldError, RequestError, UnsupportedError
from ssd.rpc.codec import Conversation, GenerateCall, generate_request
from ssd.rpc.sampling_codec import MAX_LOGIT_BIASES
from ssd.types import ChatTurn, SamplingParams, ToolCall
from ssd_gateway.problems import problem
from ssd_gateway.schemas import WITHOUT_EFFECT, ChatRequest, CompletionRequest, parse

KINDS = (ChatRequest, CompletionRequest)


def calls(kind: Any, body: bytes) -> list[GenerateCall]:
    """The calls of a body, each of which can be encoded."""
    found: list[GenerateCall] = list(parse(kind, body).calls().values())
    for call in found:
        generate_request(call)
    return found


def completion(**fields: Any) -> GenerateCall:
    (call,) = calls(CompletionRequest, json.dumps({"prompt": "x"} | fields).encode())
    return call


def chat(**fields: Any) -> GenerateCall:
    (call,) = calls(ChatRequest, json.dumps({"messages": HELLO} | fields).encode())
    return call


def refused_field(request: Callable[..., GenerateCall], **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        request(**fields)
    assert isinstance(caught.value, FieldError | UnsupportedError)
    return caught.value.field


@given(body=BODIES | VALUES, kind=st.sampled_from(KINDS))
def test_any_json_is_calls_or_an_error_of_the_client(body: Any, kind: Any) -> None:
    try:
        assert calls(kind, json.dumps(body).encode())
    except RequestError as error:
        status, shown = problem(error, "id")
        assert status == 400
        assert json.dumps(shown)


@given(body=st.binary(max_size=200), kind=st.sampled_from(KINDS))
@example(body=b"[" * 100_000, kind=ChatRequest)
@example(body=b'{"prompt":' + b"[" * 100_000, kind=CompletionRequest)
@example(body=b'{"user":' + b'{"a":' * 100_000, kind=CompletionRequest)
@example(body=b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}", kind=CompletionRequest)
@example(body=b'{"prompt":"\\ud800"}', kind=CompletionRequest)
@example(body=b'{"prompt":"x","temperature":NaN}', kind=CompletionRequest)
@example(body=b'{"prompt":"x","temperature":1e999}', kind=CompletionRequest)
def test_any_bytes_are_calls_or_an_error_of_the_client(body: bytes, kind: Any) -> None:
    with pytest.raises(RequestError):
        calls(kind, body)


def test_extensions_have_the_names_of_other_servers() -> None:
    call = completion(
        ignore_eos=True,
        stop_token_ids=[3],
        top_k=5,
        min_p=0.25,
        repetition_penalty=1.5,
        min_tokens=2,
        logit_bias={"7": 1, "3": -100},
        top_p=0.5,
        n=2,
        echo=True,
        mode="speculative",
        report_rounds=True,
        priority=-3,
        seed=2**64 - 1,
        user="u",
        metadata={"a": "b"},
    )
    assert call.sampling == SamplingParams(
        ignore_eos=True,
        stop_token_ids=(3,),
        top_k=5,
        min_p=0.25,
        repetition_penalty=1.5,
        min_tokens=2,
        logit_bias=((3, -100.0), (7, 1.0)),
        top_p=0.5,
        n=2,
        echo=True,
        seed=2**64 - 1,
        max_tokens=16,
    )
    assert call.report_rounds
    assert call.message_interval_ms == 1000
    assert call.priority == -3


@pytest.mark.parametrize("name", ["functions", "function_call", "audio", "web_search_options"])
def test_missing_features_are_accepted_only_if_nothing_asks_for_them(name: str) -> None:
    assert chat(**{name: None}) == chat()
    with pytest.raises(UnsupportedError) as caught:
        chat(**{name: {"type": "x"}})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ({"length_penalty": True}, "length_penalty"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"disable_fallback": 0}}, "structured_outputs.disable_fallback"),
    ],
)
def test_a_value_that_only_equals_a_neutral_one_is_refused(
    field: dict[str, Any], path: str
) -> None:
    assert refused_field(completion, **field) == path


def test_neutral_values_are_accepted_inside_structured_outputs_too() -> None:
    neutral = {"grammar": None, "whitespace_pattern": None, "disable_any_whitespace": False}
    for wanted in ({"regex": "a+"}, {"json_object": False, "regex": "a+"}):
        call = completion(length_penalty=1.0, structured_outputs=wanted | neutral)
        assert call.sampling.regex == "a+"


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_accounting_and_hints_have_no_effect(name: str) -> None:
    assert completion(seed=1, **{name: {"any": [1]}}) == completion(seed=1)


def test_a_structure_has_the_names_of_other_servers() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    for field, expected in (
        ({"guided_json": schema}, (schema, "")),
        ({"guided_json": json.dumps(schema)}, (schema, "")),
        ({"structured_outputs": {"json": schema}}, (schema, "")),
        ({"structured_outputs": {"json_object": True}}, ({"type": "object"}, "")),
        ({"guided_regex": "a+"}, (None, "a+")),
        ({"structured_outputs": {"regex": "a+"}}, (None, "a+")),
        ({"guided_choice": ["a b", "c.d"]}, (None, r"a\ b|c\.d")),
        ({"structured_outputs": {"choice": ["é", "|"]}}, (None, r"é|\|")),
    ):
        call = completion(**field)
        found = call.sampling.json_schema
        assert (json.loads(found) if found else None, call.sampling.regex) == expected


def test_a_history_has_calls_of_tools_and_their_results() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"é": []}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "h"}}]},
        {"role": "assistant", "content": None, "audio": None},
    ]
    assert chat(messages=turns).prompt == Conversation(
        (
            ChatTurn("user", "x"),
            ChatTurn("assistant", "", (ToolCall("1", "f", '{"a": 1}'),)),
            ChatTurn("tool", "2", tool_call_id="1"),
            ChatTurn("assistant", "", (ToolCall("", "g", '{"é": []}'),)),
            ChatTurn("assistant", "", (ToolCall("", "h", "{}"),)),
            ChatTurn("assistant", ""),
        )
    )


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "function", "content": "x"}, "messages[0]"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0]"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "messages[0].tool_calls",
        ),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x", "audio": {}}, "messages[0].audio"),
    ],
)
def test_a_history_that_no_template_reads_is_refused_by_name(
    message: dict[str, Any], path: str
) -> None:
    assert refused_field(chat, messages=[message]) == path


def test_variables_of_the_template_are_passed() -> None:
    arguments = {"enable_thinking": False, "é": {"a": [1]}}
    prompt: Any = chat(chat_template_kwargs=arguments).prompt
    assert json.loads(prompt.template_arguments) == arguments


def test_an_unknown_field_is_named() -> None:
    found = refused_field(completion, stream_options={"include": True})
    assert found == "stream_options.include"


def test_a_response_format_is_the_schema_of_the_text() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    for wanted, expected in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, schema),
    ):
        found = completion(response_format=wanted).sampling.json_schema
        assert (json.loads(found) if found else None) == expected


def test_a_format_without_its_schema_with_an_unused_one_or_beside_a_regex_is_refused() -> None:
    with pytest.raises(FieldError, match="schema"):
        completion(response_format={"type": "json_schema"})
    for kind in ("text", "json_object"):
        unused = {"type": kind, "json_schema": {"name": "n", "schema": {"type": "object"}}}
        assert refused_field(completion, response_format=unused) == "response_format.json_schema"
        neutral = {"type": kind, "json_schema": None}
        assert completion(response_format=neutral) == completion(response_format={"type": kind})
    with pytest.raises(FieldError, match="regex: cannot be combined with response_format"):
        completion(response_format={"type": "json_object"}, regex="a+")
    assert completion(regex="a+").sampling.regex == "a+"


NUM_BAD = 2 * MAX_LOGIT_BIASES
WRONG: tuple[Any, ...] = ({}, None, 1.5, True, "x", [{}])
UNKNOWN = {f"x{number}": 1 for number in range(NUM_BAD)}
OF_WRONG_LISTS: list[Any] = [
    {name: [each] * NUM_BAD}
    for name in ("prompt", "stop", "stop_token_ids", "guided_choice", "messages")
    for each in WRONG
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_with_many_mistakes_has_few_errors(kind: Any) -> None:
    of_contents = [
        {"messages": [{"role": "user", "content": [each] * NUM_BAD}] * 3} for each in WRONG
    ]
    of_biases = [{"logit_bias": dict.fromkeys(map(str, range(NUM_BAD)), each)} for each in WRONG]
    of_objects = [
        {"structured_outputs": {"choice": [1] * NUM_BAD}},
        *({name: UNKNOWN} for name in ("stream_options", "response_format", "structured_outputs")),
    ]
    for body in OF_WRONG_LISTS + of_contents + of_biases + of_objects:
        whole = json.dumps({"messages": 1, "prompt": 1, "mode": 1} | body)
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(whole)
        assert caught.value.error_count() <= 10, whole[:80]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", ""),
        ("guided_regex", ""),
        ("guided_json", ""),
        ("guided_choice", [""]),
        ("structured_outputs", {"json": ""}),
        ("structured_outputs", {"regex": ""}),
        ("structured_outputs", {"choice": [""]}),
    ],
)
def test_a_structure_without_a_text_is_refused(name: str, value: object) -> None:
    with pytest.raises(FieldError, match="is empty; leave it out") as caught:
        completion(**{name: value})
    assert caught.value.field.startswith(name)
