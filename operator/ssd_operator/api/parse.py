"""From an SSDDeployment of the API server to a ``Resource``: checked, complete, typed.

An API server has applied the schema already. It is applied here once more, because an object may
have been stored under an older definition, and a definition may be newer than this operator.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from ssd.errors import SSDError
from ssd_operator.api import reserved, schema
from ssd_operator.api.spec import (
    Accelerator,
    Autoscaling,
    Draft,
    Engine,
    Model,
    ModelCache,
    Object,
    Observability,
    Placement,
    PodOverrides,
    PodTemplate,
    Resource,
    ScalingMode,
    SecretKey,
    Security,
    Sharing,
    Source,
    Spec,
    Speculation,
    Target,
    Transport,
)
from ssd_operator.api.structural import problems, stored

TENSOR_PARALLEL_SIZES = {Accelerator.NVIDIA: 4, Accelerator.CPU: 1}
"""Where the resource names none."""
DRAFT_DEADLINES = {Accelerator.NVIDIA: 20, Accelerator.CPU: 100}
"""Where the resource names none, in milliseconds. Processes that share cores need the longer one,
or good drafts end in quarantine. It costs little: a round waits no longer than tables take."""
MOST_PROBLEMS = 3
"""Told of at once; a condition is one sentence, not a list."""

_SPEC = schema.spec()
_PROCESSES = ("target", "draft")
_Block = TypeVar(
    "_Block",
    Autoscaling,
    Draft,
    Engine,
    Model,
    ModelCache,
    Observability,
    Placement,
    PodOverrides,
    PodTemplate,
    Security,
    Speculation,
    Target,
    Transport,
)


class SpecError(SSDError):
    """A resource cannot be carried out as it is written.

    Attributes:
        reason: of ``SpecValid=False``, one word.
        message: what was found, what is allowed.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def parse(obj: Object) -> Resource:
    """Read a resource, with every default filled in.

    Args:
        obj: as the API server gives it, with or without the defaults of its schema.

    Raises:
        SpecError: ``SpecInvalid`` for what the schema forbids, ``ReservedEnv`` and
            ``PodTemplateInvalid`` for names that pods have already.
    """
    metadata = obj["metadata"]
    spec = stored(obj.get("spec"), _SPEC)
    found = list(problems(spec, _SPEC, "spec"))
    if found:
        more = len(found) - MOST_PROBLEMS
        told = "; ".join(found[:MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise SpecError("SpecInvalid", told)
    for block, path in ((spec, "spec"), *((spec[each], f"spec.{each}") for each in _PROCESSES)):
        _check_template(block.get("podTemplate", {}), f"{path}.podTemplate")
    return Resource(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=_spec(spec),
        annotations=metadata.get("annotations") or {},
        is_deleting="deletionTimestamp" in metadata,
    )


def carried_on(last: Resource, obj: Object) -> Resource:
    """What was asked for last, in place of a resource that ``parse`` does not take.

    But whoever scales or pauses it now is heard, if the schema has nothing against it.
    """
    spec, generation = stored(obj.get("spec"), _SPEC), obj["metadata"]["generation"]
    if any(problems(spec, _SPEC, "spec")):
        return replace(last, generation=generation)
    draft = replace(last.spec.draft, replicas=spec["draft"]["replicas"])
    return replace(
        last,
        generation=generation,
        spec=replace(last.spec, paused=spec["paused"], draft=draft),
    )


def _check_template(template: Object, path: str) -> None:
    taken = sorted({each["name"] for each in template.get("env", ())} & reserved.ENV)
    if taken:
        raise SpecError(
            "ReservedEnv",
            f"{path}.env sets {', '.join(taken)}, which is the operator's: leave it out",
        )
    clashes = [
        *_clashes(template, "volumes", "name", reserved.VOLUMES),
        *_clashes(template, "volumeMounts", "mountPath", reserved.PATHS),
    ]
    if clashes:
        raise SpecError(
            "PodTemplateInvalid", f"{path}.{clashes[0]} is there already: use another one"
        )


def _clashes(template: Object, part: str, key: str, taken: frozenset[str]) -> Iterator[str]:
    for each in template.get(part, ()):
        # The kubelet mounts /tmp and /tmp/ at one place.
        name = each[key].rstrip("/") if key == "mountPath" else each[key]
        if name in taken:
            yield f"{part}: {name}"


def _spec(spec: Object) -> Spec:
    accelerator = Accelerator(spec["accelerator"])
    security = spec["security"]
    return Spec(
        accelerator=accelerator,
        paused=spec["paused"],
        pod_template=_flat(PodTemplate, spec.get("podTemplate", {})),
        model=_flat(Model, spec["model"]),
        target=_target(spec["target"], accelerator),
        draft=_draft(spec["draft"]),
        speculation=_flat(
            Speculation,
            spec["speculation"],
            draft_deadline_milliseconds=spec["speculation"].get(
                "draftDeadlineMilliseconds", DRAFT_DEADLINES[accelerator]
            ),
        ),
        transport=_flat(Transport, spec["transport"]),
        placement=_flat(Placement, spec["placement"]),
        model_cache=_model_cache(spec["modelCache"]),
        security=_flat(Security, security),
        observability=_flat(Observability, spec["observability"]),
    )


def _target(target: Object, accelerator: Accelerator) -> Target:
    return _flat(
        Target,
        target,
        source=_source(target["source"]),
        tensor_parallel_size=target.get("tensorParallelSize", TENSOR_PARALLEL_SIZES[accelerator]),
        engine=_flat(Engine, target["engine"]),
        pod_template=_flat(PodOverrides, target.get("podTemplate", {})),
    )


def _draft(draft: Object) -> Draft:
    return _flat(
        Draft,
        draft,
        source=_source(draft["source"]),
        sharing=Sharing(draft["sharing"]),
        autoscaling=_autoscaling(draft["autoscaling"]) if "autoscaling" in draft else None,
        pod_template=_flat(PodOverrides, draft.get("podTemplate", {})),
    )


def _source(source: Object) -> Source:
    token = source.get("tokenSecretRef")
    return Source(
        uri=source["uri"],
        revision=source.get("revision", ""),
        token_secret=None if token is None else SecretKey(name=token["name"], key=token["key"]),
    )


def _autoscaling(autoscaling: Object) -> Autoscaling:
    keda = {f"keda_{_snake(name)}": value for name, value in autoscaling.get("keda", {}).items()}
    return _flat(
        Autoscaling,
        autoscaling,
        mode=ScalingMode(autoscaling["mode"]),
        target_occupancy=float(autoscaling["targetOccupancy"]),
        **keda,
    )


def _model_cache(cache: Object) -> ModelCache:
    return _flat(ModelCache, cache, size_limit=str(cache.get("sizeLimit", "")))


def _flat(kind: type[_Block], block: Object, **read: Any) -> _Block:
    """A dataclass from the fields of the same names; ``read`` are the others."""
    names = {field.name for field in fields(kind)}
    same = {_snake(name): _frozen(value) for name, value in block.items() if _snake(name) in names}
    return kind(**(same | read))


def _snake(name: str) -> str:
    return re.sub("(?=[A-Z])", "_", name).lower()


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
