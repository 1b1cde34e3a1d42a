"""Types of fields with their bounds, for the CRD and for validation, and quantities as numbers.

Patterns are anchored at both ends and list their characters: Go and Rust do not mean the same
blanks and digits. The description of a block's field is the docstring below it.
"""

import re
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from ssd_operator.api.reserved import GROUP

_QUANTITY = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[KMGTPE]i|[numkMGTPE])?$"
_SUFFIXES = (
    {"": Decimal(1)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("num", start=-3)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
)


def parse_quantity(text: str | int | float, *, is_rounded: bool = False) -> Decimal:
    """Return the number that a quantity means; it may be negative, as an integer of a spec may.

    With ``is_rounded`` it is rounded up to whole thousandths, as an API server does with requests
    and limits.

    Raises:
        ValueError: it is not a quantity.
    """
    amount = str(text)
    sign = amount[:1] if amount.startswith(("+", "-")) else ""
    match = re.fullmatch(_QUANTITY, amount.removeprefix(sign))
    if match is None:
        raise ValueError(f"{text!r:.64} is not a quantity such as 500m, 2 or 2Gi")
    number, suffix = match[1], match[2] or ""
    quantity = Decimal(sign + number) * (_SUFFIXES.get(suffix) or Decimal(f"1{suffix}"))
    return (quantity * 1000).to_integral_value(ROUND_CEILING) / 1000 if is_rounded else quantity


def _readable(text: int | str) -> int | str:
    parse_quantity(text)
    return text


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
    validations = [{"rule": expression, "message": message} for expression, message in checks]
    return {"x-kubernetes-validations": validations}


def checked(*checks: tuple[str, str]) -> ConfigDict:
    """Configuration of a model with CEL rules."""
    return ConfigDict(json_schema_extra=rules(*checks))


def between(least: int, most: int) -> Any:
    """Bounds of an integer."""
    return Field(ge=least, le=most)


def text(most: int, *, least: int | None = None, pattern: str | None = None) -> Any:
    """Bounds of a string, in characters."""
    return Field(max_length=most, min_length=least, pattern=pattern)


def items(most: int, *keys: str) -> Any:
    """Bounds of a list; ``keys`` are the fields that identify its items."""
    return Field(max_length=most, json_schema_extra=keyed(*keys))


def keyed(*keys: str) -> dict[str, Any]:
    """Schema of a list whose items these fields identify; without any it is one value."""
    kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
    return kind if keys else {}


def block(about: str, required: str = "", **fields: Any) -> dict[str, Any]:
    """Schema of an object; ``required`` are names of fields, separated by blanks."""
    schema = {"description": about, "type": "object", "properties": fields}
    return schema | ({"required": required.split()} if required else {})


def string(about: str, most: int | None = None, **bounds: Any) -> dict[str, Any]:
    """Schema of a string with at most so many characters."""
    longest = {} if most is None else {"maxLength": most}
    return {"description": about, "type": "string", **longest, **bounds}


QUANTITY = {"x-kubernetes-int-or-string": True, "pattern": _QUANTITY, "maxLength": 32}
NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""Pattern of the name of an object."""
LABEL = {"type": "string", "maxLength": 63, "pattern": _LABEL}
Quantity = Annotated[int | str, AfterValidator(_readable), WithJsonSchema(QUANTITY)]
"""A Kubernetes quantity, as it was written."""
Visible = Annotated[str, text(512, pattern="^[!-~]*$")]
"""ASCII without blanks."""
RESOURCE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of the name of an SSDDeployment or an SSDDraftPool, which have at most 40 characters."""
ObjectName = Annotated[str, text(253, least=1, pattern=NAME)]
NodeLabels = Annotated[dict[str, Annotated[str, text(63, pattern=_LABEL)]], Field(max_length=16)]
_FOREIGN = rules(
    (
        f"self.all(k, !k.startsWith('{GROUP}/'))",
        f"names under {GROUP}/ are the operator's: use a prefix of your own",
    )
)
Labels = Annotated[
    dict[str, Annotated[str, text(63, pattern=_LABEL)]],
    Field(max_length=32, json_schema_extra=_FOREIGN),
]
Annotations = Annotated[
    dict[str, Annotated[str, text(4096)]], Field(max_length=32, json_schema_extra=_FOREIGN)
]
