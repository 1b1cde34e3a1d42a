"""A cluster in memory: server-side apply, garbage collection, and failures on command."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ssd_operator.cluster import (
    WATCHED_KINDS,
    ClusterError,
    ForbiddenError,
    Key,
    RefusedError,
)
from ssd_operator.events import Event
from ssd_operator.facts import Ref
from ssd_operator.names import MANAGED_BY_LABEL, OPERATOR
from ssd_operator.pod_state import to_text
from ssd_operator.spec import API_VERSION, KIND, Object
from ssd_operator.view import key_of, owner_key

Address = tuple[str, Ref]
"""Namespace, kind and name."""


@dataclass
class MemoryCluster:
    """``Cluster`` without a server. Objects are copied on the way in and out."""

    now: float = 1_000_000.0
    objects: dict[Address, Object] = field(default_factory=dict)
    writes: list[tuple[str, Ref]] = field(default_factory=list)
    """Verb and object of each call that was meant to change something, failed ones included."""
    reads: int = 0
    events: list[Event] = field(default_factory=list)
    failures: list[ClusterError] = field(default_factory=list)
    """Raised by the next calls, one each."""
    refused: dict[Ref, str] = field(default_factory=dict)
    """What admission has against objects."""
    refusals: dict[str, ClusterError] = field(default_factory=dict)
    """Raised whenever an object of a kind is applied."""
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """What a quota or a policy has against objects."""
    optional: frozenset[str] = frozenset()
    unreadable: set[str] = field(default_factory=set)
    """Kinds that we have no right on."""
    leaving_namespaces: set[str] = field(default_factory=set)
    _intents: dict[Address, Object] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    # ---- what Cluster promises

    async def get(self, namespace: str, ref: Ref) -> Object | None:
        self._may_fail()
        self.reads += 1
        if ref.kind in self.unreadable:
            raise ForbiddenError(f"cannot get {ref.kind}")
        return copy.deepcopy(self.objects.get((namespace, ref)))

    async def uids(self, kind: str, namespace: str) -> frozenset[str]:
        self._may_fail()
        return frozenset(
            thing["metadata"]["uid"]
            for (where, ref), thing in self.objects.items()
            if ref.kind == kind and namespace in ("", where) and _is_watched(thing)
        )

    async def apply(self, wanted: Object) -> Object:
        namespace = wanted["metadata"]["namespace"]
        ref = Ref(wanted["kind"], wanted["metadata"]["name"])
        self._write("apply", ref)
        if namespace in self.leaving_namespaces and (namespace, ref) not in self.objects:
            raise ForbiddenError(f"namespace {namespace} is being terminated", is_leaving=True)
        if ref.kind in self.refusals:
            raise self.refusals[ref.kind]
        if ref in self.forbidden:
            raise ForbiddenError(self.forbidden[ref])
        if ref in self.refused:
            raise RefusedError(self.refused[ref])
        address, wanted = (namespace, ref), copy.deepcopy(wanted)
        live = self.objects.get(address)
        base = {} if live is None else _without(live, self._intents.get(address, {}), wanted)
        self._intents[address] = wanted
        return self.put(_merged(base, wanted))

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        self._write("delete", ref)
        found = self.objects.get((namespace, ref))
        if found is not None and found["metadata"]["uid"] == uid:
            self.remove(namespace, ref)

    async def annotate_pod(
        self, namespace: str, name: str, annotations: Mapping[str, str]
    ) -> Object | None:
        ref = Ref("Pod", name)
        self._write("annotate", ref)
        found = copy.deepcopy(self.objects.get((namespace, ref)))
        if found is None:
            return None
        found["metadata"].setdefault("annotations", {}).update(annotations)
        return self.put(found)

    async def patch_status(self, namespace: str, name: str, status: Object) -> Object | None:
        ref = Ref(KIND, name)
        self._write("status", ref)
        found = copy.deepcopy(self.objects.get((namespace, ref)))
        return None if found is None else self.put(found | {"status": status})

    async def patch_scale(self, namespace: str, name: str, replicas: int) -> None:
        self._write("scale", Ref(KIND, name))
        self.edit_spec((namespace, name), draft={"replicas": replicas})

    async def post_event(self, about: Object, event: Event, seconds: float) -> None:
        self._may_fail()
        self.events.append(event)

    async def optional_kinds(self) -> frozenset[str]:
        self._may_fail()
        return self.optional

    # ---- what tests and controllers do to it

    def create_resource(self, key: Key, spec: Object) -> None:
        metadata = {"namespace": key[0], "name": key[1]}
        self.put({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})

    def edit_spec(self, key: Key, **blocks: Any) -> None:
        found = copy.deepcopy(self.objects.get((key[0], Ref(KIND, key[1]))))
        if found is not None:
            self.put(found | {"spec": _merged(found["spec"], blocks)})

    def put(self, thing: Object) -> Object:
        """Store an object as an API server would: uid, generation, version."""
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
        return copy.deepcopy(thing)

    def remove(self, namespace: str, ref: Ref) -> None:
        """Delete an object and, as the garbage collector does, all that it owns."""
        address = namespace, ref
        gone = self.objects.pop(address)
        self._intents.pop(address, None)
        for (where, each), thing in list(self.objects.items()):
            owners = thing["metadata"].get("ownerReferences") or []
            is_orphan = any(owner["uid"] == gone["metadata"]["uid"] for owner in owners)
            if is_orphan and (where, each) in self.objects:
                self.remove(where, each)

    def at_its_end(self, thing: Object) -> Object:
        """An object as the event of its deletion has it: the deletion is a version of its own."""
        version = str(next(self._numbers))
        return {**thing, "metadata": {**thing["metadata"], "resourceVersion": version}}

    def of_kind(self, kind: str) -> list[Object]:
        return [thing for (_, ref), thing in self.objects.items() if ref.kind == kind]

    def resource(self, key: Key) -> Object:
        return self.objects[key[0], Ref(KIND, key[1])]

    def condition(self, key: Key, kind: str) -> tuple[str, str]:
        """Status and reason."""
        conditions = self.resource(key).get("status", {}).get("conditions", [])
        found = next(each for each in conditions if each["type"] == kind)
        return found["status"], found["reason"]

    def _write(self, verb: str, ref: Ref) -> None:
        self.writes.append((verb, ref))
        self._may_fail()

    def _may_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class Watch:
    """Indices as kopf keeps them, brought up to date on command."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._seen: dict[tuple[str, Ref, str], Object] = {}
        self.resources: dict[Key, list[Object]] = {}
        self.children: dict[Key, list[Object]] = {}

    def catch_up(self) -> list[tuple[Key, Object, bool]]:
        """Bring the indices up to date; the events of it: key, object, whether it is gone."""
        gone = [
            self._cluster.at_its_end(thing)
            for address, thing in self._seen.items()
            if self._is_deleted(address)
        ]
        self._seen = {
            address: thing for address, thing in self._seen.items() if not self._is_deleted(address)
        }
        return [*self.list_anew(), *_told(gone, is_gone=True)]

    def list_anew(self) -> list[tuple[Key, Object, bool]]:
        """What a watch does after a gap: it tells what is there, and keeps what is gone."""
        now = {
            (*address, thing["metadata"]["uid"]): copy.deepcopy(thing)
            for address, thing in self._cluster.objects.items()
            if _is_watched(thing)
        }
        changed = [thing for address, thing in now.items() if self._seen.get(address) != thing]
        self._seen |= now
        self.resources.clear()
        self.children.clear()
        for (namespace, ref, _), thing in self._seen.items():
            if ref.kind == KIND:
                self.resources.setdefault((namespace, ref.name), []).append(thing)
            elif (key := owner_key(thing)) is not None:
                self.children.setdefault(key, []).append(thing)
        return _told(changed, is_gone=False)

    def _is_deleted(self, address: tuple[str, Ref, str]) -> bool:
        live = self._cluster.objects.get(address[:2])
        is_same = live is not None and live["metadata"]["uid"] == address[2]
        return not (live is not None and is_same and _is_watched(live))


def _told(things: list[Object], *, is_gone: bool) -> list[tuple[Key, Object, bool]]:
    return [(key, thing, is_gone) for thing in things if (key := key_of(thing)) is not None]


def _is_watched(thing: Object) -> bool:
    labels = thing["metadata"].get("labels") or {}
    is_child = labels.get(MANAGED_BY_LABEL) == OPERATOR
    return thing["kind"] in WATCHED_KINDS and (thing["kind"] == KIND or is_child)


def _merged(live: Any, wanted: Any) -> Any:
    if isinstance(live, dict) and isinstance(wanted, dict):
        return {
            **live,
            **{name: _merged(live.get(name), value) for name, value in wanted.items()},
        }
    return copy.deepcopy(wanted)


def _without(live: Any, before: Any, now: Any) -> Any:
    """``live`` without the fields that we wanted before and do not want now."""
    if not all(isinstance(each, dict) for each in (live, before, now)):
        return live
    return {
        name: _without(value, before.get(name), now.get(name))
        for name, value in live.items()
        if name in now or name not in before
    }
