"""A cluster, its controllers, engines and an operator, all in memory; time moves on command."""

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from tests.unit.ssd_operator.checked_cluster import CheckedCluster
from tests.unit.ssd_operator.controllers import Controllers
from tests.unit.ssd_operator.memory_cluster import MemoryCluster, is_watched, patched
from tests.unit.ssd_operator.resources import SETTINGS

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import KIND, Object
from ssd_operator.children.objects import WATCHED_KINDS
from ssd_operator.observe.cluster import ClusterError, Key, Ref
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import Address, condition_of, is_ready, name_of
from ssd_operator.observe.snapshot import TargetReport
from ssd_operator.policy.drain import Drain
from ssd_operator.runtime.reconcile import Reconciler

KEY: Key = ("default", "demo")
RESOURCE, SERVICE, TARGETS = (
    Ref(KIND, "demo"),
    Ref("Service", "demo"),
    Ref("Service", "demo-targets"),
)
TARGET, DRAFTS = Ref("Deployment", "demo-target-0"), Ref("Deployment", "demo-draft-0")
DEMO: Object = {
    "accelerator": "cpu",
    "target": {"source": {"uri": "demo://target"}},
    "draft": {"source": {"uri": "demo://draft"}, "replicas": 2},
}


@dataclass
class MemoryEngines:
    """``Engines`` that return what a test puts into them."""

    answers: dict[str, TargetReport] = field(default_factory=dict)
    """By target."""
    call_errors: dict[str, str] = field(default_factory=dict)
    """By target."""
    followed: dict[Key, Mapping[str, Address]] = field(default_factory=dict)
    drains: dict[Key, dict[str, str]] = field(default_factory=dict)
    """Results by draft."""

    def state(self, key: Key) -> tuple[Mapping[str, TargetReport], Mapping[str, str]]:
        followed = self.followed.get(key, {})
        pools = {pod: fact for pod, fact in self.answers.items() if pod in followed}
        return pools, dict(self.drains.get(key, {}))

    def errors(self, key: Key) -> Mapping[str, str]:
        followed = self.followed.get(key, {})
        return {pod: error for pod, error in self.call_errors.items() if pod in followed}

    def follow(self, key: Key, targets: Mapping[str, Address], pods: AbstractSet[str]) -> None:
        self.followed[key] = targets
        drains = self.drains.get(key, {})
        self.drains[key] = {pod: fact for pod, fact in drains.items() if pod in pods}

    def drain(self, key: Key, wanted: Iterable[Drain]) -> None:
        for each in wanted:
            if each.address is not None:
                self.drains.setdefault(key, {}).setdefault(each.pod, "")

    def finish(self) -> bool:
        """End all drains with success; whether any was running."""
        is_going = any("" in drains.values() for drains in self.drains.values())
        for key, drains in self.drains.items():
            self.drains[key] = {pod: result or "Drained" for pod, result in drains.items()}
        return is_going


class World:
    """Resources and everything around them; without others the resource ``default/demo``."""

    def __init__(self, *documents: Object, **blocks: Any) -> None:
        """``blocks`` are those of the demo; see ``demo``."""
        self.cluster = MemoryCluster() if documents else CheckedCluster()
        self.controllers = Controllers(self.cluster)
        for document in documents:
            self.put(document)
        if not documents:
            self.cluster.create_resource(KEY, demo(**blocks))
        self.restart()

    def put(self, document: Object) -> None:
        """Store an object of the namespace ``default``."""
        self.cluster.put(document | {"metadata": document["metadata"] | {"namespace": "default"}})

    def restart(self) -> None:
        """Start a new operator, without memory."""
        self.engines = MemoryEngines()
        self.woken = set[Key]()
        self.cache = ObjectCache(lambda key, **_: self.woken.add(key))
        for kind in WATCHED_KINDS:
            self.cache.replace(kind, "", [], 0)
        self._seen = dict.fromkeys(WATCHED_KINDS, 0)
        self.reconciler = Reconciler(
            self.cluster, self.cache, self.engines, SETTINGS, lambda: self.cluster.now
        )

    # ---- what is there

    def __contains__(self, ref: Ref) -> bool:
        return ("default", ref) in self.cluster.objects

    def __getitem__(self, ref: Ref) -> Object:
        return self.cluster.objects["default", ref]

    @property
    def status(self) -> Object:
        found: Object = self[RESOURCE]["status"]
        return found

    @property
    def drains(self) -> dict[str, str]:
        """Results of drains, by pod."""
        return self.engines.drains.get(KEY, {})

    def condition(self, kind: str, of: Ref = RESOURCE) -> tuple[str, str]:
        """Status and reason."""
        found = condition_of(self[of], kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        return str(condition_of(self[RESOURCE], kind)["message"])

    @property
    def reasons(self) -> list[str]:
        """Reasons of all Events."""
        return [event.reason for event in self.cluster.events]

    def messages(self, reason: str) -> list[str]:
        """Messages of the Events for a reason."""
        return [event.message for event in self.cluster.events if event.reason == reason]

    def written(self, kind: str, verb: str = "apply") -> list[str]:
        """Names of the objects of a kind that were written."""
        return [ref.name for each, ref in self.cluster.writes if (each, ref.kind) == (verb, kind)]

    def ready_pods(self, component: str) -> list[Object]:
        return [
            pod
            for pod in self.cluster.of_kind("Pod")
            if pod["metadata"]["labels"]["ssd.dev/component"] == component and is_ready(pod)
        ]

    def children(self) -> list[Ref]:
        uid = self[RESOURCE]["metadata"]["uid"]
        return [
            ref
            for (_, ref), thing in sorted(self.cluster.objects.items())
            if any(o["uid"] == uid for o in thing["metadata"].get("ownerReferences", []))
        ]

    # ---- what others do

    def edit_spec(self, of: Ref = RESOURCE, /, **blocks: Any) -> None:
        with self.edited(of) as found:
            found["spec"] = patched(found["spec"], blocks)

    @contextlib.contextmanager
    def edited(self, ref: Ref) -> Iterator[Object]:
        """A copy of an object, to be edited and stored."""
        found = copy.deepcopy(self[ref])
        yield found
        self.cluster.put(found)

    def remove(self, ref: Ref) -> None:
        self.cluster.remove("default", ref)

    def take_name(self, ref: Ref, **metadata: Any) -> Object:
        """Put an object of another owner there."""
        if ref in self:
            self.remove(ref)
        about = {"namespace": "default", "name": ref.name, **metadata}
        return self.cluster.put({"apiVersion": "v1", "kind": ref.kind, "metadata": about})

    def report_links(self, state: str = "Active", **more: Any) -> None:
        """Each target reports a link to each draft."""
        links = tuple(
            LinkStatus(address=name, draft_pod=name, state=state.lower(), transport="tcp", **more)
            for name in map(name_of, self.ready_pods("draft"))
        )
        self.report(links=links)

    def report(self, **answer: Any) -> None:
        """Each target that is ready answers this."""
        report = TargetReport(PoolStatus(**answer), self.cluster.now)
        self.engines.answers = dict.fromkeys(map(name_of, self.ready_pods("target")), report)

    # ---- time

    def catch_up(self, kinds: Iterable[str] = WATCHED_KINDS) -> None:
        """The watches of these kinds catch up."""
        for kind in self._seen.keys() & set(kinds):
            new, self._seen[kind] = self.cluster.log[self._seen[kind] :], len(self.cluster.log)
            for thing, is_deleted in new:
                if thing["kind"] == kind:
                    is_gone = is_deleted or not is_watched(thing)
                    (self.cache.mark_deleted if is_gone else self.cache.put)(thing)

    async def run_pass(self) -> float:
        """One pass over what the watch has reported so far; the seconds until the next one."""
        again_after = await self.reconciler.reconcile(KEY)
        assert again_after is not None, "the resource is gone"
        return again_after

    async def next_pass(self) -> float:
        """One pass, two seconds later, over everything as it is."""
        self.cluster.now += 2.0
        self.catch_up()
        return await self.run_pass()

    async def delete_resource(self) -> None:
        """Delete the resource, and run its last pass."""
        self.remove(RESOURCE)
        self.catch_up()
        assert await self.reconciler.reconcile(KEY) is None

    async def try_pass(self) -> float:
        """One pass that may fail, as the queue runs them."""
        try:
            return await self.run_pass()
        except ClusterError:
            self.cluster.now += 1.0
            return math.inf

    async def round(self) -> bool:
        """Catch up, run a pass, and let the controllers follow; whether they had to."""
        self.cluster.now += 2.0
        self.catch_up()
        await self.try_pass()
        has_drained = self.engines.finish()
        return self.controllers.settle() or has_drained

    async def rounds(self, number: int) -> None:
        for _ in range(number):
            await self.round()

    async def come_to_rest(self, most_rounds: int = 8) -> int:
        """Rounds until a pass writes nothing.

        Raises:
            AssertionError: there are more.
        """
        for number in range(most_rounds + 1):
            num_writes = len(self.cluster.writes)
            await self.round()
            if len(self.cluster.writes) == num_writes:
                return number
        raise AssertionError(f"still writing: {self.cluster.writes[-5:]}")


async def settled(**blocks: Any) -> World:
    """A resource that serves."""
    world = World(**blocks)
    await world.come_to_rest()
    world.cluster.writes.clear()
    world.cluster.events.clear()
    return world


def demo(**blocks: Any) -> Object:
    """The spec of the demo with these blocks; fields of ``target`` and ``draft`` are added."""
    spec: Object = copy.deepcopy(DEMO)
    for name, block in blocks.items():
        spec[name] = {**spec[name], **block} if name in DEMO and name != "accelerator" else block
    return spec
