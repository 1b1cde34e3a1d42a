"""From an SSDDeployment of the API server to a ``Resource``: validated, complete, typed.

An API server has applied the schema already. It is applied here once more, because an object may
have been stored under an older definition, and a definition may be newer than this operator. CEL
rules and the uniqueness of list items are left to the API server.
"""

import json
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ssd.errors import SSDError
from ssd_operator.api import reserved
from ssd_operator.api.spec import Object, Resource, Spec

MOST_PROBLEMS = 3
"""Reported at once; a condition is one sentence, not a list."""
_LONGEST_VALUE = 64
"""Characters of a value that a message repeats."""


class SpecError(SSDError):
    """A resource cannot be carried out as it is written.

    Attributes:
        reason: of ``SpecValid=False``, one word.
        message: the actual value and the allowed value.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def parse(obj: Object) -> Resource:
    """Read a resource, with every default filled in.

    Args:
        obj: as the API server returns it, with or without the defaults of its schema.

    Raises:
        SpecError: ``SpecInvalid`` for what the schema forbids, ``ReservedEnv`` and
            ``PodTemplateInvalid`` for names that pods have already.
    """
    spec, metadata = _read(obj), obj["metadata"]
    _check_names(spec)
    return Resource(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        annotations=metadata.get("annotations") or {},
        is_deleting="deletionTimestamp" in metadata,
    )


def carried_on(last: Resource, obj: Object) -> Resource:
    """The last valid resource, in place of one that ``parse`` refuses.

    The new number of drafts and the new ``paused`` still apply if the schema accepts the spec.
    """
    generation = obj["metadata"]["generation"]
    try:
        new = _read(obj)
    except SpecError:
        return replace(last, generation=generation)
    draft = last.spec.draft.changed(replicas=new.draft.replicas)
    spec = last.spec.changed(paused=new.paused, draft=draft)
    return replace(last, generation=generation, spec=spec)


def _read(obj: Object) -> Spec:
    # JSON, because strict validation of Python values accepts no list for a tuple.
    text = json.dumps(_without_nulls(obj.get("spec")))
    try:
        return Spec.model_validate_json(text, strict=True)
    except ValidationError as error:
        found = [_sentence(each) for each in error.errors(include_url=False)]
    more = len(found) - MOST_PROBLEMS
    shown = "; ".join(found[:MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    raise SpecError("SpecInvalid", shown)


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


def _check_names(spec: Spec) -> None:
    parts = {"": spec.pod_template, ".target": spec.target.pod_template}
    for part, template in (parts | {".draft": spec.draft.pod_template}).items():
        variables = {each["name"] for each in template.env} & reserved.ENV
        if variables:
            raise SpecError(
                "ReservedEnv",
                f"spec{part}.podTemplate.env sets {', '.join(sorted(variables))}, which is the "
                "operator's: leave it out",
            )
    names = {each["name"] for each in spec.pod_template.volumes} & reserved.VOLUMES
    # The kubelet mounts /tmp and /tmp/ at one place.
    mounts = {each["mountPath"].rstrip("/") for each in spec.pod_template.volume_mounts}
    for part, taken in (("volumes", names), ("volumeMounts", mounts & reserved.PATHS)):
        if taken:
            raise SpecError(
                "PodTemplateInvalid",
                f"spec.podTemplate.{part}: {min(taken)} is there already: use another one",
            )
