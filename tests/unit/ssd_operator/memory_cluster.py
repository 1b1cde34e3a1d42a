"""A cluster in memory: server-side apply, garbage collection, and failures on command."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from ssd_operator.api.spec import API_VERSION, KIND, RESOURCE_KINDS, Object
from ssd_operator.children.objects import MANAGED_BY_LABEL, OPERATOR
from ssd_operator.observe.cluster import (
    BusyError,
    ClusterError,
    ConflictError,
    Key,
    MissingError,
    Ref,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.pod_state import to_text
from ssd_operator.status.report import Event

AnswerT = TypeVar("AnswerT")
Address = tuple[str, Ref]
"""Namespace, kind and name."""


class LostAnswerError(BusyError):
    """The call was carried out, and its answer came too late."""


@dataclass
class MemoryCluster:
    """``Cluster`` without a server. Objects are copied on the way in and out."""

    now: float = 1_000_000.0
    objects: dict[Address, Object] = field(default_factory=dict)
    writes: list[tuple[str, Ref]] = field(default_factory=list)
    """Verb and object of each call that writes, failed ones included."""
    reads: int = 0
    events: list[Event] = field(default_factory=list)
    failures: list[ClusterError | None] = field(default_factory=list)
    """Raised by the next calls, one each; a call with None goes well."""
    write_faults: Mapping[Any, ClusterError] = field(default_factory=dict)
    """Raised whenever an object, or an object of a kind, is written; at writes of a status only for
    the pair of verb and object."""
    list_faults: Mapping[Any, ClusterError] = field(default_factory=dict)
    """Raised whenever a kind, a namespace or a kind in a namespace is listed."""
    admit: Callable[[Object], object] = lambda thing: None
    """Changes each object that is applied, as a webhook does."""
    meddle: Callable[[str, Ref], object] = lambda verb, ref: None
    """What others do just before a write, by its verb and its object."""
    log: list[tuple[Object, bool]] = field(default_factory=list)
    """All events of a watch: an object, and whether it was deleted."""
    _intents: dict[Address, Object] = field(default_factory=dict)
    _conditions: dict[str, set[str]] = field(default_factory=dict)
    """Types of conditions that the operator has applied, by uid."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _lost: LostAnswerError | None = None

    # ---- Cluster

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        self._may_fail()
        self.reads += 1
        return self._answer(copy.deepcopy(self.objects.get((namespace, ref))))

    async def list_all(self, kind: str, namespace: str) -> tuple[list[Object], int]:
        self._may_fail()
        self._raise(self.list_faults, kind, namespace, (kind, namespace))
        found = [
            copy.deepcopy(thing)
            for (where, ref), thing in self.objects.items()
            if ref.kind == kind and namespace in ("", where) and is_watched(thing)
        ]
        return found, next(self._numbers)

    async def apply(self, wanted: Object, uid: str = "", subresource: str = "") -> Object:
        namespace, ref = wanted["metadata"]["namespace"], ref_of(wanted)
        self._write(subresource or "apply", ref)
        address, wanted = (namespace, ref), copy.deepcopy(wanted)
        live = self.objects.get(address)
        if subresource:
            if live is None:
                raise MissingError(f"{ref} is gone")
            self._check_identity(live, {"uid": uid})
            return self._answer(self.put(live | {subresource: self._status(live, wanted)}))
        if uid:
            self._check_identity(live, {"uid": uid})
        if live is not None and _controllers(live) - _controllers(wanted):
            raise RefusedError("Only one reference can have Controller set to true")
        base = {} if live is None else _without(live, self._intents.get(address, {}), wanted)
        self._intents[address] = wanted
        stored = _merged(base, wanted)
        self.admit(stored)
        return self._answer(self.put(stored))

    async def patch(
        self, namespace: str, ref: Ref, changes: Object, subresource: str = ""
    ) -> Object:
        self._write(subresource or "patch", ref)
        assert subresource or "uid" in changes["metadata"], "another object may have its name"
        live = self.objects.get((namespace, ref))
        if live is None:
            raise MissingError(f"{ref} is gone")
        self._check_identity(live, changes.get("metadata", {}))
        if subresource == "scale" and ref.kind == KIND:
            changes = {"spec": {"draft": changes["spec"]}}
        return self._answer(self.put(patched(live, changes)))

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        self._write("delete", ref)
        found = self.objects.get((namespace, ref))
        if found is not None and found["metadata"]["uid"] == uid:
            self.remove(namespace, ref)
        self._answer(None)

    async def create(self, thing: Object) -> None:
        self._may_fail()
        if thing["kind"] == "Event":
            self.events.append(Event(thing["type"], thing["reason"], thing["message"]))
        else:
            self.put(thing)
        self._answer(None)

    # ---- calls of tests and controllers

    def create_resource(self, key: Key, spec: Object) -> None:
        metadata = {"namespace": key[0], "name": key[1]}
        self.put({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})

    def put(self, thing: Object) -> Object:
        """Store an object as an API server would: uid, generation, version.

        Raises:
            RefusedError: two of its fields exclude each other.
        """
        _check_exclusive(thing)
        address = thing["metadata"]["namespace"], Ref(thing["kind"], thing["metadata"]["name"])
        old, thing = self.objects.get(address), copy.deepcopy(thing)
        metadata = thing["metadata"]
        if old is None:
            metadata["uid"] = f"uid-{next(self._numbers)}"
            metadata["generation"] = 1
            metadata["creationTimestamp"] = to_text(self.now)
        elif old == thing:
            return copy.deepcopy(old)
        elif old.get("spec") != thing.get("spec"):
            metadata["generation"] = old["metadata"]["generation"] + 1
        metadata["resourceVersion"] = str(next(self._numbers))
        self.objects[address] = thing
        self.log.append((copy.deepcopy(thing), False))
        return copy.deepcopy(thing)

    def remove(self, namespace: str, ref: Ref) -> None:
        """Delete an object and, as the garbage collector does, all that it owns."""
        address = namespace, ref
        gone = copy.deepcopy(self.objects.pop(address))
        gone["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.log.append((gone, True))
        self._intents.pop(address, None)
        for (where, each), thing in list(self.objects.items()):
            owners = thing["metadata"].get("ownerReferences") or []
            is_orphan = any(owner["uid"] == gone["metadata"]["uid"] for owner in owners)
            if is_orphan and (where, each) in self.objects:
                self.remove(where, each)

    def of_kind(self, kind: str) -> list[Object]:
        return [thing for (_, ref), thing in self.objects.items() if ref.kind == kind]

    def _status(self, live: Object, wanted: Object) -> Object:
        """The applied status with conditions of other writers, as the schema has it."""
        applied: Object = wanted["status"]
        ours = self._conditions.setdefault(live["metadata"]["uid"], set())
        ours |= {each["type"] for each in applied.get("conditions", ())}
        conditions = live.get("status", {}).get("conditions", [])
        theirs = [each for each in conditions if each["type"] not in ours]
        return applied | {"conditions": [*applied["conditions"], *theirs]} if theirs else applied

    def _write(self, verb: str, ref: Ref) -> None:
        self.writes.append((verb, ref))
        self.meddle(verb, ref)
        self._may_fail()
        self._raise(self.write_faults, (verb, ref), *(() if verb == "status" else (ref, ref.kind)))

    def _raise(self, faults: Mapping[Any, ClusterError], *keys: object) -> None:
        for key in keys:
            if key in faults:
                raise faults[key]

    def _check_identity(self, live: Object | None, meant: Object) -> None:
        for name in ("uid", "resourceVersion"):
            if name in meant and (live is None or live["metadata"][name] != meant[name]):
                raise ConflictError(f"{name} {meant[name]} is not the one that is stored")

    def _may_fail(self) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, LostAnswerError):
            self._lost = failure
        elif failure is not None:
            raise failure

    def _answer(self, answer: AnswerT) -> AnswerT:
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return answer


def _check_exclusive(thing: Object) -> None:
    """Refuse fields that exclude each other, as the validation of an API server does."""
    spec = thing.get("spec", {})
    strategy = spec.get("strategy", {})
    pod = spec.get("template", {}).get("spec", {})
    profile = pod.get("securityContext", {}).get("seccompProfile", {})
    refused = {
        "strategy.rollingUpdate": strategy.get("type") == "Recreate"
        and "rollingUpdate" in strategy,
        "minAvailable": "minAvailable" in spec and "maxUnavailable" in spec,
        "loadBalancerSourceRanges": "loadBalancerSourceRanges" in spec
        and spec.get("type") != "LoadBalancer",
        "localhostProfile": "localhostProfile" in profile and profile["type"] != "Localhost",
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise RefusedError(f"422: spec.{name}: Forbidden")


def _controllers(thing: Object) -> set[str]:
    owners = thing["metadata"].get("ownerReferences") or []
    return {owner["uid"] for owner in owners if owner.get("controller")}


def is_watched(thing: Object) -> bool:
    """Whether a watch selects an object."""
    labels = thing["metadata"].get("labels") or {}
    is_child = labels.get(MANAGED_BY_LABEL) == OPERATOR
    return thing["kind"] in RESOURCE_KINDS or is_child


_BY_NAME = frozenset({"containers", "initContainers", "env"})
"""Lists whose items several writers share."""
_ATOMIC = frozenset({"selector", "podSelector", "nodeSelector"})
"""Maps that have one writer."""


def patched(live: Any, wanted: Any) -> Any:
    """As a merge patch does: lists are replaced, keys that are null are removed."""
    if not isinstance(live, dict) or not isinstance(wanted, dict):
        return copy.deepcopy(wanted)
    merged = live | {name: patched(live.get(name), value) for name, value in wanted.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _merged(live: Any, wanted: Any, key: str = "") -> Any:
    if isinstance(live, dict) and isinstance(wanted, dict) and key not in _ATOMIC:
        return {
            **live,
            **{name: _merged(live.get(name), value, name) for name, value in wanted.items()},
        }
    if isinstance(live, list) and key in _BY_NAME:
        ours, theirs = _by_name(wanted), _by_name(live)
        return [_merged(theirs[name], ours.get(name, {})) for name in theirs] + [
            copy.deepcopy(each) for name, each in ours.items() if name not in theirs
        ]
    return copy.deepcopy(wanted)


def _without(live: Any, before: Any, now: Any, key: str = "") -> Any:
    """``live`` without the fields that we wanted before and do not want now."""
    if all(isinstance(each, list) for each in (live, before, now)) and key in _BY_NAME:
        old, new = _by_name(before), _by_name(now)
        return [
            _without(each, old.get(name), new.get(name))
            for name, each in _by_name(live).items()
            if name in new or name not in old
        ]
    if not all(isinstance(each, dict) for each in (live, before, now)):
        return live
    return {
        name: _without(value, before.get(name), now.get(name), name)
        for name, value in live.items()
        if name in now or name not in before
    }


def _by_name(items: list[Object]) -> dict[str, Object]:
    return {each["name"]: each for each in items}
