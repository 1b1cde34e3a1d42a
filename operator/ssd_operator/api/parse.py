"""From a resource of the API server to a ``Resource``: validated, complete, typed.

An API server has applied the schema already. It is applied here once more, because an object may
have been stored under an older definition, and a definition may be newer than this operator. CEL
rules, the uniqueness of list items and the parts of ``kubernetes_types.py`` are left to the API
server; of these, only the amounts of resources are read.
"""

import json

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ssd.errors import SSDError
from ssd_operator.api.pool import PoolSpec, spec_of
from ssd_operator.api.spec import KIND, POOL_KIND, Object, Resource, Spec

MOST_PROBLEMS = 3
"""Reported at once; a condition is one sentence, not a list."""


class SpecError(SSDError):
    """A resource that the schema of this operator forbids; names the field and the value."""


def parse(obj: Object) -> Resource:
    """Read a resource, with every default filled in.

    Raises:
        SpecError: the schema forbids it.
    """
    metadata, text = obj["metadata"], json.dumps(obj.get("spec"))
    try:
        # JSON, because strict validation of Python values accepts no list for a tuple.
        if obj["kind"] == POOL_KIND:
            spec = spec_of(PoolSpec.model_validate_json(text, strict=True))
        else:
            spec = Spec.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = [_sentence(problem) for problem in error.errors(include_url=False)]
        more = len(problems) - MOST_PROBLEMS
        suffix = f"; and {more} more" if more > 0 else ""
        raise SpecError("; ".join(problems[:MOST_PROBLEMS]) + suffix) from error
    if obj["kind"] == KIND and not spec.draft.model_fields_set & {"source", "pool_ref"}:
        raise SpecError("spec.draft.source is missing")
    return Resource(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        annotations=metadata.get("annotations") or {},
        kind=obj["kind"],
    )


def _sentence(error: ErrorDetails) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    if error["type"] == "missing":
        return f"spec{path} is missing"
    # A condition quotes no more than the begin of a value.
    return f"spec{path} is {error['input']!r:.64}: {error['msg'][0].lower()}{error['msg'][1:]}"
