"""Structural schemas: how fields are written down, and what an API server makes of a value.

The builders return what ``openAPIV3Schema`` holds. ``stored`` and ``problems`` do on this side what
the API server does on its own, so that an object means the same with and without its defaults.
CEL rules are the API server's alone.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ssd_operator.api.spec import Object

Schema = dict[str, Any]

QUANTITY = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[KMGTPE]i|[numkMGTPE])?$"
QUANTITY_LENGTH = 32
VISIBLE = "^[!-~]*$"
"""ASCII without blanks."""


def text(about: str, most: int, *, least: int = 0, pattern: str = "", default: str = "") -> Schema:
    """A string of ``least`` to ``most`` characters.

    A pattern is anchored at both ends and names its characters, since Go and Python do not
    mean the same blanks and digits.
    """
    bounds = {"minLength": least or None, "maxLength": most, "pattern": pattern or None}
    return _scalar("string", about, default or None, **bounds)


def one_of(about: str, values: Sequence[str], default: str | None = None) -> Schema:
    """One of some words."""
    longest = max(len(value) for value in values)
    return _scalar("string", about, default, maxLength=longest, enum=list(values))


def integer(about: str, least: int, most: int, default: int | None = None) -> Schema:
    """A number of ``least`` to ``most``."""
    return _scalar("integer", about, default, format="int32", minimum=least, maximum=most)


def boolean(about: str, *, default: bool | None = None) -> Schema:
    """True or false."""
    return _scalar("boolean", about, default)


def time(about: str) -> Schema:
    """A moment, as RFC 3339 has it."""
    return _field("string", about, format="date-time", maxLength=64)


def quantity(about: str) -> Schema:
    """A Kubernetes quantity: 500m, 2, 16Gi."""
    return {
        "description": about,
        "x-kubernetes-int-or-string": True,
        "pattern": QUANTITY,
        "maxLength": QUANTITY_LENGTH,
    }


def rule(expression: str, message: str) -> Object:
    """A CEL rule and what the API server says to an object that breaks it."""
    return {"rule": expression, "message": message}


def block(
    about: str,
    fields: Mapping[str, Schema],
    *,
    required: Sequence[str] = (),
    rules: Sequence[Object] = (),
    default: Object | None = None,
) -> Schema:
    """An object.

    Args:
        about: for whom asks ``kubectl explain``.
        fields: by name.
        required: those that must be there.
        rules: of ``rule``.
        default: of the block itself. It is validated as written, before the defaults of its fields
            are filled in, so it must spell the fields that its rules read.
    """
    return _field(
        "object",
        about,
        properties=dict(fields),
        required=list(required) or None,
    ) | _present(**{"x-kubernetes-validations": list(rules) or None, "default": default})


def array(about: str, items: Schema, most: int, *, keys: Sequence[str] = ()) -> Schema:
    """A list of at most ``most``; with ``keys`` its items are known by these fields."""
    kind = {"x-kubernetes-list-type": "map" if keys else "atomic"}
    return (
        _field("array", about, items=items, maxItems=most)
        | kind
        | _present(**{"x-kubernetes-list-map-keys": list(keys) or None})
    )


def unique(about: str, items: Schema, most: int) -> Schema:
    """A list of at most ``most`` different scalars."""
    return array(about, items, most) | {"x-kubernetes-list-type": "set"}


def mapping(about: str, values: Schema, most: int, rules: Sequence[Object] = ()) -> Schema:
    """A map of at most ``most`` keys of the user's own."""
    return _field("object", about, additionalProperties=values, maxProperties=most) | _present(
        **{"x-kubernetes-validations": list(rules) or None}
    )


def stored(value: Any, schema: Schema) -> Any:
    """What an API server keeps of a value: no unknown field, no null, every default filled in.

    (A server-side apply refuses a null where there is no default; create and update drop it.)
    """
    if isinstance(value, list) and "items" in schema:
        return [stored(each, schema["items"]) for each in value]
    if not isinstance(value, dict):
        return value
    if "additionalProperties" in schema:
        return {
            name: stored(each, schema["additionalProperties"])
            for name, each in value.items()
            if each is not None
        }
    kept = {}
    for name, field in schema.get("properties", {}).items():
        found = value.get(name)
        if found is None:
            found = deepcopy(field.get("default"))
        if found is not None:
            kept[name] = stored(found, field)
    return kept


def problems(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """Say what about a stored value breaks its schema, one sentence each; CEL rules left out."""
    kind = schema.get("type", "int-or-string")
    if not _is_of(kind, value):
        yield f"{path} is {value!r}, which is no {kind}"
    elif "enum" in schema:
        if value not in schema["enum"]:
            words = ", ".join(map(str, schema["enum"]))
            yield f"{path} is {value!r}; it may be one of {words}"
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, path)
    elif isinstance(value, list):
        yield from _problems_of_list(value, schema, path)
    elif isinstance(value, str):
        yield from _problems_of_text(value, schema, path)
    elif kind == "integer" and not schema["minimum"] <= value <= schema["maximum"]:
        yield f"{path} is {value}; it may be {schema['minimum']} to {schema['maximum']}"


def _problems_of_object(value: Object, schema: Schema, path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name} is missing"
    most = schema.get("maxProperties")
    if most is not None and len(value) > most:
        yield f"{path} has {len(value)} entries; at most {most} are allowed"
    for name, each in value.items():
        field = schema.get("additionalProperties") or schema["properties"][name]
        yield from problems(each, field, f"{path}.{name}")


def _problems_of_list(value: list[Any], schema: Schema, path: str) -> Iterator[str]:
    if len(value) > schema["maxItems"]:
        yield f"{path} has {len(value)} items; at most {schema['maxItems']} are allowed"
    for index, each in enumerate(value):
        yield from problems(each, schema["items"], f"{path}[{index}]")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    is_distinct = schema["x-kubernetes-list-type"] != "atomic"
    names = [[each.get(key) for key in keys] if isinstance(each, dict) else each for each in value]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if is_distinct and twice is not None:
        yield f"{path} holds {twice!r} twice"


def _problems_of_text(value: str, schema: Schema, path: str) -> Iterator[str]:
    least, most = schema.get("minLength", 0), schema["maxLength"]
    if not least <= len(value) <= most:
        yield f"{path} has {len(value)} characters; it may have {least} to {most}"
    elif "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        yield f"{path} is {value!r}, which does not match {schema['pattern']}"


def _is_of(kind: str, value: Any) -> bool:
    # A bool is an int in Python, and neither in JSON.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "int-or-string":
            return is_integer or isinstance(value, str)
        case "integer":
            return is_integer
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _field(kind: str, about: str, **limits: Any) -> Schema:
    return {"description": about, "type": kind} | _present(**limits)


def _scalar(kind: str, about: str, default: Any, **limits: Any) -> Schema:
    """A field. Its description contains its default: ``kubectl explain`` shows it nowhere else."""
    if default is None:
        return _field(kind, about, **limits)
    word = json.dumps(default) if isinstance(default, bool) else default
    return _field(kind, f"{about} Default: {word}.", **limits) | {"default": default}


def _present(**entries: Any) -> Schema:
    return {name: value for name, value in entries.items() if value is not None}
