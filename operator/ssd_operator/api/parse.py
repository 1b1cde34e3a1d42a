"""From an SSDDeployment of the API server to a ``Resource``: validated, complete, typed.

An API server has applied the schema already. It is applied here once more, because an object may
have been stored under an older definition, and a definition may be newer than this operator. CEL
rules and the uniqueness of list items are left to the API server.
"""

import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ssd.errors import SSDError
from ssd_operator.api.spec import Object, Resource, Spec

MOST_PROBLEMS = 3
"""Reported at once; a condition is one sentence, not a list."""
_LONGEST_VALUE = 64
"""Characters of a value that a message repeats."""


class SpecError(SSDError):
    """A resource that the schema of this operator forbids; names the field and the value."""


def parse(obj: Object) -> Resource:
    """Read a resource, with every default filled in.

    Raises:
        SpecError: the schema forbids it.
    """
    metadata = obj["metadata"]
    # JSON, because strict validation of Python values accepts no list for a tuple.
    text = json.dumps(_without_nulls(obj.get("spec")))
    try:
        spec = Spec.model_validate_json(text, strict=True)
    except ValidationError as error:
        found = [_sentence(each) for each in error.errors(include_url=False)]
        more = len(found) - MOST_PROBLEMS
        suffix = f"; and {more} more" if more > 0 else ""
        raise SpecError("; ".join(found[:MOST_PROBLEMS]) + suffix) from error
    return Resource(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        annotations=metadata.get("annotations") or {},
    )


def _without_nulls(value: Any) -> Any:
    """What an API server stores: it drops a field that is null, and fills in its default."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def _sentence(error: ErrorDetails) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    if error["type"] == "missing":
        return f"spec{path} is missing"
    value, message = error["input"], error["msg"]
    if error["type"] in ("too_long", "string_too_long"):
        unit = "characters" if isinstance(value, str) else "entries"
        found = f"has {len(value)} {unit}"
    else:
        found = f"is {repr(value)[:_LONGEST_VALUE]}"
    return f"spec{path} {found}: {message[0].lower()}{message[1:]}"
