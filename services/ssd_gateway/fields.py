"""Types of fields that several bodies use, and the fields that ask for a structure of the text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from ssd.errors import FieldError
from ssd.rpc.sampling_codec import MAX_LOGIT_BIASES

UINT32 = 2**32 - 1
Count = Annotated[int, Field(ge=0, le=UINT32)]
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# A list ends at its first wrong entry: an error for each of a million entries would take gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdList = Annotated[list[Count], Field(max_length=1_000_000, fail_fast=True)]
_ANY_OBJECT = '{"type":"object"}'
MISSING_STRUCTURES: Mapping[str, tuple[object, ...]] = {
    "disable_additional_properties": (None, False),
    "disable_any_whitespace": (None, False),
    "disable_fallback": (None, False),
    "grammar": (None,),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
}
"""Fields of ``structured_outputs`` whose feature is missing, with the values that do not ask for
it."""


def is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether JSON's equality finds a value; Python's true also equals 1."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def _with_few_entries(value: object) -> object:
    """Refuse too many entries of an object before their values are checked."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        size: dict[str, Any] = {"max_length": MAX_LOGIT_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", **size})
    return value


Biases = Annotated[
    dict[str, Number], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_with_few_entries)
]


class Body(BaseModel):
    """An object of JSON whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Part(Body):
    """An object inside a body."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: object) -> object:
        """Drop unknown fields but the first, whose error names it."""
        if not isinstance(value, dict):
            return value
        known_names = {field.alias or name for name, field in cls.model_fields.items()}
        dropped = frozenset([name for name in value if name not in known_names][1:])
        return {name: member for name, member in value.items() if name not in dropped}


class JsonSchema(Part):
    """The schema of a response format."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """Return the JSON schema of the text; None for any text.

        Raises:
            FieldError: the format needs a schema and has none, or has one that it does not use.
        """
        if self.type != "json_schema" and self.json_schema is not None:
            raise FieldError(
                "response_format.json_schema", f"needs the type 'json_schema', not {self.type!r}"
            )
        if self.type == "text":
            return None
        if self.type == "json_object":
            return _ANY_OBJECT
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise FieldError("response_format.json_schema.schema", "is required")
        return json.dumps(self.json_schema.schema_, ensure_ascii=False)


class StructuredOutputs(Part):
    """What the text must look like, with vLLM's names. At most one field is set."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        """Drop fields of missing features that do not ask for them."""
        if not isinstance(value, dict):
            return value
        return {
            name: member
            for name, member in value.items()
            if not is_one_of(member, MISSING_STRUCTURES.get(name, ()))
        }


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must look like. At most one of the two texts is not empty."""

    field: str = ""
    """The field of the body that asks for it; empty without one."""
    json_schema: str = ""
    regex: str = ""


class StructureFields(Body):
    """Fields of a request that ask for a structure, with the names of several servers."""

    model_config = ConfigDict(extra="allow")

    response_format: ResponseFormat | None = None
    regex: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    def asked_structure(self) -> Structure:
        """Return the structure that fields of this class ask for.

        Raises:
            FieldError: several fields ask for a structure, or one with an empty text.
        """
        named = self.structured_outputs or StructuredOutputs()
        schemas = {
            "response_format": self.response_format and self.response_format.schema_text(),
            "structured_outputs.json": _json_text(named.json_),
            "structured_outputs.json_object": _ANY_OBJECT if named.json_object else None,
            "guided_json": _json_text(self.guided_json),
        }
        expressions = {
            "regex": self.regex,
            "structured_outputs.regex": named.regex,
            "structured_outputs.choice": _any_of(named.choice),
            "guided_regex": self.guided_regex,
            "guided_choice": _any_of(self.guided_choice),
        }
        asked = {name: text for name, text in (schemas | expressions).items() if text is not None}
        first, *others = asked or [""]
        if others:
            raise FieldError(others[0], f"cannot be combined with {first}")
        if first and not asked[first]:
            raise FieldError(first, "is empty; leave it out for any text")
        return Structure(first, schemas.get(first) or "", expressions.get(first) or "")


def _json_text(schema: str | dict[str, Any] | None) -> str | None:
    return json.dumps(schema, ensure_ascii=False) if isinstance(schema, dict) else schema


def _any_of(texts: list[str] | None) -> str | None:
    """Return the regular expression of some texts."""
    return None if texts is None else "|".join(map(re.escape, texts))
