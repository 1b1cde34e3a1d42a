"""Tools of a request: their definitions, and which of them the model may or must call."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ssd.errors import FieldError, UnsupportedError
from ssd_gateway.fields import Body, Part
from ssd_gateway.tool_calls import (
    CallReader,
    HermesReader,
    ListReader,
    LlamaReader,
    NamedReader,
    TextReader,
)

MAX_TOOLS = 128
"""The limit of OpenAI's API."""
_READERS: dict[str, type[CallReader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
_Schema = dict[str, Any]
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
"""Keywords with which ``properties`` is not the whole list of arguments."""
_DATA = {"const", "default", "enum", "examples"}
"""Keywords whose values are no schemas."""
_MAPS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose values have schemas by name."""


class FunctionDefinition(Body):
    """A function that the model can call. The template receives all fields."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: _Schema | None = None

    def arguments_schema(self) -> _Schema:
        """Return the JSON schema of the arguments, an object.

        It has no other arguments than those that are listed, unless it allows them: a weak model
        would add arguments until its tokens end.
        """
        schema = {"type": "object", **(self.parameters or {"properties": {}})}
        if "properties" in schema and not _COMBINING & schema.keys():
            schema.setdefault("additionalProperties", False)
        return schema


class Tool(Part):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a text contains calls, or must be calls."""

    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    """Name of the function that must be called, for "named"."""
    max_calls: int | None = None
    json_schema: str = ""
    """Schema of a text that must be calls."""

    def reader(self, tool_format: str, *, is_whole: bool) -> TextReader:
        """Return what finds the calls.

        Args:
            tool_format: of the model; empty if it is not known.
            is_whole: whether the response does not stream.

        Raises:
            UnsupportedError: the model may call tools, and its format is not known.
        """
        match self.choice:
            case "none":
                return TextReader()
            case "named":
                return NamedReader(self.name)
            case "required":
                return ListReader(is_whole=is_whole, max_calls=self.max_calls)
        if tool_format not in _READERS:
            raise UnsupportedError(
                "tool_choice",
                f"'auto' needs a model whose format of calls is known: {', '.join(_READERS)}; set "
                "tool_format of the target, or tool_choice to 'required', 'none' or a function",
            )
        return _READERS[tool_format](is_whole=is_whole, max_calls=self.max_calls)


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, are_parallel: bool) -> ToolUse:
    """Return how a text contains calls.

    Raises:
        FieldError: the choice names no tool.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "needs tools")
        return ToolUse()
    max_calls = None if are_parallel else 1
    if choice == "none":
        return ToolUse()
    if choice in (None, "auto"):
        return ToolUse("auto", max_calls=max_calls)
    if choice == "required":
        schema = _list_schema(tools, max_calls)
        return ToolUse("required", max_calls=max_calls, json_schema=_json(schema))
    assert isinstance(choice, NamedTool)
    name = choice.function.name
    function = next((tool.function for tool in tools if tool.function.name == name), None)
    if function is None:
        raise FieldError("tool_choice.function.name", f"{name[:64]!r} is not one of the tools")
    return ToolUse("named", name, json_schema=_json(function.arguments_schema()))


def tools_text(tools: Sequence[Tool]) -> str:
    """Return the tools as the template receives them."""
    return _json([tool.model_dump(exclude_none=True) for tool in tools])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list_schema(tools: Sequence[Tool], max_calls: int | None) -> _Schema:
    """Return the schema of a list of calls. That of each tool is a definition at its root."""
    definitions: _Schema = {}
    calls = []
    for number, tool in enumerate(tools):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(tool.function.arguments_schema(), place)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": {"$ref": place},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if max_calls is None else {"maxItems": max_calls}
    items = {"anyOf": calls}
    return {"type": "array", "minItems": 1, **limit, "items": items, "$defs": definitions}


def _moved(schema: Any, place: str, *, is_map: bool = False) -> Any:
    """Return a schema whose references to its root point to a place.

    Args:
        schema: or a part of it.
        place: the reference of the new place.
        is_map: whether the keys are names of schemas, not keywords.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$id" in schema and not is_map:
        # A schema with $id is the root of its own references.
        return schema
    if is_map:
        return {name: _moved(subschema, place) for name, subschema in schema.items()}
    moved = {
        key: member if key in _DATA else _moved(member, place, is_map=key in _MAPS)
        for key, member in schema.items()
    }
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference + "/").startswith("#/"):
        moved["$ref"] = place + reference[1:]
    return moved
