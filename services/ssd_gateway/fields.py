"""Types of fields that several bodies use."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from ssd.rpc.sampling_codec import MAX_LOGIT_BIASES

UINT32 = 2**32 - 1
Count = Annotated[int, Field(ge=0, le=UINT32)]
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# A list ends at its first wrong entry: an error for each of a million entries would take gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdList = Annotated[list[Count], Field(max_length=1_000_000, fail_fast=True)]


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
