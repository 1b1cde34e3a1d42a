"""A cluster, its controllers, engines and an operator, all in memory; time moves on command."""

import copy
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from tests.unit.ssd_operator.controllers import Controllers
from tests.unit.ssd_operator.memory_cluster import MemoryCluster, Watch
from tests.unit.ssd_operator.resources import SETTINGS

from ssd_operator.api.spec import Object
from ssd_operator.children.kinds import KINDS, REQUIRED_KINDS
from ssd_operator.observe.cluster import ClusterError, Key
from ssd_operator.observe.facts import DrainFact, PoolFact, Ref
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import is_ready
from ssd_operator.policy.drain import DrainCall
from ssd_operator.runtime.reconcile import Reconciler
from ssd_operator.runtime.relist import Readiness, Relist

KEY: Key = ("default", "demo")
DEMO: Object = {
    "accelerator": "cpu",
    "target": {"source": {"uri": "demo://target"}},
    "draft": {"source": {"uri": "demo://draft"}, "replicas": 2},
}


@dataclass
class MemoryEngines:
    """``Engines`` that return what a test puts into them."""

    answers: dict[str, PoolFact] = field(default_factory=dict)
    facts: dict[str, DrainFact] = field(default_factory=dict)
    followed: dict[str, str] = field(default_factory=dict)

    def pools(self, key: Key) -> Mapping[str, PoolFact]:
        return {pod: fact for pod, fact in self.answers.items() if pod in self.followed}

    def drains(self, key: Key) -> Mapping[str, DrainFact]:
        return dict(self.facts)

    def follow(self, key: Key, targets: Mapping[str, str], pods: AbstractSet[str]) -> None:
        self.followed = dict(targets)
        self.facts = {pod: fact for pod, fact in self.facts.items() if pod in pods}

    def drain(self, key: Key, calls: Iterable[DrainCall]) -> None:
        for call in calls:
            self.facts.setdefault(call.pod, DrainFact(pod=call.pod))

    def finish(self) -> bool:
        """End all drains with success; whether any was running."""
        going = [fact for fact in self.facts.values() if not fact.is_done]
        for fact in going:
            self.facts[fact.pod] = replace(fact, is_done=True, result="Drained")
        return bool(going)


class World:
    """One resource ``default/demo`` and everything around it."""

    def __init__(
        self,
        spec: Object = DEMO,
        cluster: MemoryCluster | None = None,
        kinds: AbstractSet[str] = REQUIRED_KINDS,
    ) -> None:
        self.cluster = cluster or MemoryCluster()
        self.kinds = kinds
        self.controllers = Controllers(self.cluster)
        self.cluster.create_resource(KEY, spec)
        self.restart()

    def restart(self) -> None:
        """Start a new operator, without memory."""
        self.engines = MemoryEngines()
        self.watch = Watch(self.cluster)
        self.cache = ObjectCache(
            self.watch.resources, self.watch.children, lambda: self.cluster.now, self.kinds
        )
        self.woken: list[Key] = []
        self.relist = Relist(self.cluster, self.cache, self.woken.append, Readiness())
        self.reconciler = Reconciler(
            self.cluster, self.cache, self.engines, SETTINGS, lambda: self.cluster.now
        )

    def catch_up(self, kinds: Iterable[str] = KINDS) -> None:
        """The watch catches up."""
        for _, thing, is_gone in self.watch.catch_up(kinds):
            self.cache.replace_answers(thing)
            if is_gone:
                self.cache.mark_deleted(thing)

    def relist_watch(self) -> None:
        """The watch lists again, and does not report what was deleted."""
        self.watch.list_again()

    async def run_pass(self) -> float | None:
        """One pass over what the watch has reported so far."""
        return await self.reconciler.reconcile(KEY)

    async def try_pass(self) -> float | None:
        """One pass that may fail, as the queue runs them."""
        try:
            return await self.run_pass()
        except ClusterError:
            self.cluster.now += 1.0
            return None

    async def round(self) -> bool:
        """Catch up, run a pass, and let the controllers follow; whether they had to."""
        self.cluster.now += 2.0
        self.catch_up()
        await self.try_pass()
        has_drained = self.engines.finish()
        return self.controllers.settle() or has_drained

    async def come_to_rest(self, most_rounds: int) -> int:
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

    def deployment(self, name: str) -> Object:
        return self.cluster.objects["default", Ref("Deployment", name)]

    def ready_pods(self, component: str) -> list[Object]:
        return [
            pod
            for pod in self.cluster.of_kind("Pod")
            if pod["metadata"]["labels"]["ssd.dev/component"] == component and is_ready(pod)
        ]

    def children(self) -> list[tuple[Ref, Object]]:
        uid = self.cluster.resource(KEY)["metadata"]["uid"]
        return [
            (ref, thing)
            for (_, ref), thing in sorted(self.cluster.objects.items())
            if any(o["uid"] == uid for o in thing["metadata"].get("ownerReferences", []))
        ]


async def settled(spec: Object = DEMO) -> World:
    world = World(spec)
    await world.come_to_rest(6)
    world.cluster.writes.clear()
    return world


def demo(**blocks: Any) -> Object:
    spec: Object = copy.deepcopy(DEMO)
    for name, block in blocks.items():
        spec[name] = {**spec.get(name, {}), **block}
    return spec
