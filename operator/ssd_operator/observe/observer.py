"""Collects what one pass sees of a resource: cached objects, and objects read by name."""

from dataclasses import dataclass

from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.manifests import wanted
from ssd_operator.children.names import (
    draft_cells,
    is_engine_pod,
    is_released,
    maker_of,
)
from ssd_operator.observe.cluster import Cluster, Ref, is_owned_by, ref_of
from ssd_operator.observe.object_cache import ObjectCache, is_of_former, is_ours
from ssd_operator.observe.pod_state import endpoints_of, is_terminating, to_seconds
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.settings import OperatorSettings


@dataclass(slots=True)
class ObserverMemory:
    """What earlier passes over one resource have read, so that nothing is read twice."""

    resource: Resource | None = None
    """Of the pass before."""
    names: tuple[Ref, ...] = ()
    """Names of all its children."""
    children: frozenset[Ref] = frozenset()
    """Children of the last pass that was not paused."""


class Observer:
    """Collects the state of resources. Asyncio loop."""

    def __init__(self, cluster: Cluster, cache: ObjectCache, settings: OperatorSettings) -> None:
        self._cluster = cluster
        self._cache = cache
        self._settings = settings

    async def observe(
        self, found: Object, resource: Resource, memory: ObserverMemory, now: float
    ) -> Snapshot:
        """Collect the state of a resource and of everything around it.

        Raises:
            ClusterError: the API server does not answer.
        """
        seen = self._cache.children((resource.namespace, resource.name))
        children = {
            ref: each
            for ref, each in seen.items()
            if (is_owned_by if ref.kind == "Pod" else is_ours)(each, resource.uid)
        }
        pods = tuple(
            each
            for ref, each in seen.items()
            if ref.kind == "Pod"
            and ref not in children
            and is_engine_pod(each, resource.name)
            and not _is_older(each, found, children.get(Ref("Deployment", maker_of(each))))
        )
        foreign, former, absent = set[Ref](), set[Ref](), set[Ref]()
        for ref in self._unseen(resource, memory, children, pods):
            # Read by name: the watch sees only what carries our label.
            live = await self._cluster.get(resource.namespace, ref)
            if live is None:
                absent.add(ref)
            elif is_ours(live, resource.uid):
                children[ref] = live
            elif is_of_former(live, resource.name, resource.uid):
                former.add(ref)
            else:
                foreign.add(ref)
        if not resource.spec.paused:
            memory.children = frozenset(children)
        slices = (each for ref, each in seen.items() if ref.kind == "EndpointSlice")
        return Snapshot(
            resource=resource,
            now=now,
            children=children,
            pods=pods,
            released=tuple(each for each in seen.values() if is_released(each, resource)),
            endpoints=endpoints_of(resource.name, slices),
            foreign=frozenset(foreign),
            former=frozenset(former),
            absent=frozenset(absent),
            kinds=self._cache.kinds,
            status=found.get("status") or {},
        )

    def _unseen(
        self,
        resource: Resource,
        memory: ObserverMemory,
        children: dict[Ref, Object],
        pods: tuple[Object, ...],
    ) -> list[Ref]:
        """Names that are to be read, since the cache has no child of this name.

        These are wanted children, and children that existed before or still have pods. The latter
        were deleted, or their labels were removed and without a read they would never be deleted.
        """
        if memory.resource != resource:
            memory.resource, memory.names = resource, self._names(resource)
        makers = {Ref("Deployment", maker_of(pod)) for pod in pods if not is_terminating(pod)}
        vanished = sorted((memory.children | makers) - set(memory.names))
        return [ref for ref in (*memory.names, *vanished) if ref not in children]

    def _names(self, resource: Resource) -> tuple[Ref, ...]:
        """Names of all children of a resource, except a preflight's pod."""
        cells = draft_cells(resource)
        replicas = dict.fromkeys(cells, resource.spec.draft.replicas)
        return tuple(map(ref_of, wanted(resource, self._settings, replicas, self._cache.kinds)))


def _is_older(pod: Object, resource: Object, deployment: Object | None) -> bool:
    """Whether a pod is of a former resource of this name: nothing that is ours existed before it.

    One that is older than the resource alone came with a Deployment that was left for us to adopt;
    one that is older than its Deployment alone was adopted by that.
    """
    makers = [resource] if deployment is None else [resource, deployment]
    return all(_made_at(pod) < _made_at(each) for each in makers)


def _made_at(thing: Object) -> float:
    return to_seconds(thing["metadata"].get("creationTimestamp")) or 0.0
