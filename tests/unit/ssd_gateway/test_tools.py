"""Tools of a request and calls in its response."""

import json
from typing import Any

import pytest
from tests.gateway import HELLO, TIME, WEATHER

from ssd.errors import FieldError
from ssd.rpc.codec import GenerateCall
from ssd_gateway.schemas import ChatRequest, parse
from ssd_gateway.tools import FunctionDefinition


def call_of(**fields: Any) -> GenerateCall:
    body = {"model": "m", "messages": HELLO, "tools": [WEATHER, TIME], **fields}
    (call,) = parse(ChatRequest, json.dumps(body).encode()).calls().values()
    return call


def test_the_schema_of_a_tool_is_built_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], FunctionDefinition.arguments_schema

    def counted(function: FunctionDefinition) -> dict[str, Any]:
        built.append(function.name)
        return build(function)

    monkeypatch.setattr(FunctionDefinition, "arguments_schema", counted)
    body = {"model": "m", "messages": HELLO, "tools": [WEATHER, TIME], "tool_choice": "required"}
    prepared = parse(ChatRequest, json.dumps(body).encode()).prepared()
    assert prepared.tool_use.json_schema == prepared.calls[0].sampling.json_schema
    assert built == ["weather", "time"]


def test_the_grammar_of_required_calls_has_a_shape_for_each_tool() -> None:
    schema = json.loads(call_of(tool_choice="required").sampling.json_schema)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    weather, time = (each["properties"] for each in schema["items"]["anyOf"])
    assert weather == {"name": {"const": "weather"}, "parameters": {"$ref": "#/$defs/0"}}
    assert time == {"name": {"const": "time"}, "parameters": {"$ref": "#/$defs/1"}}
    closed = {"additionalProperties": False}
    assert schema["$defs"]["1"] == {"type": "object", "properties": {}} | closed
    single = call_of(tool_choice="required", parallel_tool_calls=False).sampling.json_schema
    assert json.loads(single)["maxItems"] == 1
    named = call_of(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert json.loads(named.sampling.json_schema) == WEATHER["function"]["parameters"] | closed
    assert not call_of(tool_choice="auto").sampling.json_schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"regex": "a", "tool_choice": "required"}, "regex"),
]


@pytest.mark.parametrize(("fields", "path"), REFUSED)
def test_tools_that_cannot_be_used_are_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        call_of(**fields)
    assert caught.value.field == path


def test_references_of_required_calls_stay_within_their_tool() -> None:
    data: Any = {"$ref": "#/definitions/P"}
    parameters: Any = {
        "properties": {
            "const": {"$ref": "#/definitions/P"},
            "b": {"$ref": "#/properties/const"},
            "c": {"anyOf": [{"$ref": "#"}, {"const": data}]},
            "$ref": {"type": "string"},
            "d": {"$ref": "https://example.com/schema"},
        },
        "definitions": {"P": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = call_of(tools=[WEATHER, tool], tool_choice="required").sampling.json_schema
    first, second = json.loads(text)["$defs"].values()
    assert first["properties"] == {"place": {"$ref": "#/$defs/0/$defs/Place"}}
    assert second["properties"] == {
        "const": {"$ref": "#/$defs/1/definitions/P"},
        "b": {"$ref": "#/$defs/1/properties/const"},
        "c": {"anyOf": [{"$ref": "#/$defs/1"}, {"const": data}]},
        "$ref": {"type": "string"},
        "d": {"$ref": "https://example.com/schema"},
    }
    assert second["definitions"] == parameters["definitions"]


@pytest.mark.parametrize(
    ("parameters", "additional"),
    [
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, None),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}}, None),
        (None, False),
    ],
)
def test_a_call_has_no_arguments_that_are_not_listed(
    parameters: dict[str, Any] | None, additional: object
) -> None:
    function = FunctionDefinition(name="add", parameters=parameters)
    assert function.arguments_schema().get("additionalProperties") is additional


def test_references_of_a_schema_with_an_id_stay_its_own() -> None:
    parameters: Any = {
        "$id": "https://example.com/f",
        "properties": {"a": {"$ref": "#/$defs/A"}, "$id": {"type": "string"}},
        "$defs": {"A": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = call_of(tools=[WEATHER, tool], tool_choice="required").sampling.json_schema
    _, second = json.loads(text)["$defs"].values()
    assert second["properties"]["a"] == {"$ref": "#/$defs/A"}
    assert second["$defs"] == {"A": {"type": "integer"}}
