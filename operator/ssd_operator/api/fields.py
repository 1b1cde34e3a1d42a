"""Types of fields with their bounds, for the CRD and for validation, and quantities as numbers.

Patterns are anchored at both ends and list their characters: Go and Rust do not mean the same
blanks and digits. The description of a block's field is the docstring below it.
"""

import re
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, with_config
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from ssd_operator.api.reserved import GROUP

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]))?")
_SUFFIXES = (
    {"": Decimal(1)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("num", start=-3)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
)

_MILLI = Decimal("0.001")


def parse_quantity(text: str | int | float) -> Decimal:
    """Return the number that a quantity means.

    Raises:
        ValueError: it is not a quantity.
    """
    match = _FORM.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 2Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number) * Decimal(10) ** int(exponent or 0) * _SUFFIXES[suffix or ""]


def parse_rounded(text: str | int | float) -> Decimal:
    """Return the number that an API server makes of a request or limit: whole thousandths, up.

    Raises:
        ValueError: it is not a quantity.
    """
    thousandths = parse_quantity(text) / _MILLI
    return thousandths.to_integral_value(ROUND_CEILING) * _MILLI


_T = TypeVar("_T")
_QUANTITY = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[KMGTPE]i|[numkMGTPE])?$"
_QUANTITY_LENGTH = 32
_LABEL = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"


class Block(BaseModel):
    """A block of the spec: snake case in Python, camel case in the resource."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        use_attribute_docstrings=True,
    )

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values of these fields; they are not validated."""
        return self.model_copy(update=fields)


def rules(*checks: tuple[str, str]) -> dict[str, Any]:
    """CEL rules of a schema, each with the message of the API server to who breaks it."""
    found = [{"rule": expression, "message": message} for expression, message in checks]
    return {"x-kubernetes-validations": found}


def checked(*checks: tuple[str, str]) -> ConfigDict:
    """Configuration of a model with CEL rules."""
    return ConfigDict(json_schema_extra=rules(*checks))


def with_rules(*checks: tuple[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Decorate a ``TypedDict`` with CEL rules."""
    return with_config(checked(*checks))


def between(least: int, most: int, about: str | None = None) -> Any:
    """Bounds of an integer, and its description where there is no docstring."""
    return Field(ge=least, le=most, description=about)


def text(
    most: int, about: str | None = None, *, least: int | None = None, pattern: str | None = None
) -> Any:
    """Bounds of a string, in characters, and its description where there is no docstring."""
    return Field(max_length=most, min_length=least, pattern=pattern, description=about)


def items(most: int, *keys: str, about: str | None = None) -> Any:
    """Bounds of a list; ``keys`` are the fields that identify its items."""
    kind: dict[str, Any] = {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": list(keys),
    }
    return Field(max_length=most, json_schema_extra=kind if keys else None, description=about)


def about(words: str) -> Any:
    """Description of a field without a docstring."""
    return Field(description=words)


def _quantity(value: object) -> int | str:
    # A bool is an int in Python, and not in JSON.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= _QUANTITY_LENGTH and re.match(_QUANTITY, value):
        return value
    raise PydanticCustomError("quantity", "Input should be a quantity such as 500m, 2 or 16Gi")


Quantity = Annotated[
    int | str,
    PlainValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": _QUANTITY,
            "maxLength": _QUANTITY_LENGTH,
        }
    ),
]
"""A Kubernetes quantity, as it was written."""
Visible = Annotated[str, text(512, pattern="^[!-~]*$")]
"""ASCII without blanks."""
ObjectName = Annotated[
    str, text(253, "Name of the object.", least=1, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
LabelValue = Annotated[str, text(63, pattern=_LABEL)]
NodeLabels = Annotated[dict[str, LabelValue], Field(max_length=16)]
_FOREIGN = rules(
    (
        f"self.all(k, !k.startsWith('{GROUP}/'))",
        f"names under {GROUP}/ are the operator's: use a prefix of your own",
    )
)
Labels = Annotated[dict[str, LabelValue], Field(max_length=32, json_schema_extra=_FOREIGN)]
Annotations = Annotated[
    dict[str, Annotated[str, text(4096)]], Field(max_length=32, json_schema_extra=_FOREIGN)
]
