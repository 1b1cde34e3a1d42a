"""Collects what one pass sees of a resource: cached objects, and objects read by name."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_operator.api.spec import Object, Resource, ScalingMode, drafts_of_cell
from ssd_operator.children.kinds import OPTIONAL_KINDS
from ssd_operator.children.manifests import wanted
from ssd_operator.children.names import (
    Component,
    component_name,
    draft_cells,
    is_engine_pod,
    is_released,
    maker_of,
)
from ssd_operator.observe.cluster import Cluster, ForbiddenError, Key, is_owned_by, ref_of
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.object_cache import ObjectCache, is_of_former, is_ours
from ssd_operator.observe.pod_state import endpoints_of, is_terminating, to_seconds
from ssd_operator.settings import OperatorSettings

OPTIONAL_SECONDS = 600.0
"""Between two reads of objects of optional kinds, and of which of these kinds are served."""
FORBIDDEN_SECONDS = 60.0
"""Between two reads where the right was missing."""


@dataclass(slots=True)
class ObserverMemory:
    """What earlier passes over one resource have read, so that nothing is read twice."""

    resource: Resource | None = None
    """Of the pass before."""
    names: tuple[Ref, ...] = ()
    """Names of all its children."""
    children: frozenset[Ref] = frozenset()
    """Children of the last pass that was not paused."""
    forbidden: frozenset[str] = frozenset()
    """Optional kinds that the resource wants and that we may not read."""
    kinds_wanted: frozenset[str] = field(default_factory=frozenset)
    optional_read_at: float = float("-inf")


class Observer:
    """Collects the state of resources. Asyncio loop."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ObjectCache,
        settings: OperatorSettings,
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._settings = settings
        self._now = now
        self._served: frozenset[str] = frozenset()
        self._served_at = float("-inf")

    async def observe(
        self, key: Key, found: Object, resource: Resource, memory: ObserverMemory
    ) -> Observed:
        """Collect the state of a resource and of everything around it.

        Args:
            key: of the resource.
            found: the resource as an object.
            resource: the same, parsed.
            memory: of the pass before; is updated.

        Raises:
            ClusterError: the API server does not answer.
        """
        await self._read_optional(key, resource, memory)
        seen = self._cache.children(key)
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
            live = await self._cluster.get(key[0], ref)
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
        return Observed(
            children=children,
            pods=pods,
            released=tuple(each for each in seen.values() if is_released(each, resource)),
            endpoints=endpoints_of(resource.name, slices),
            foreign=frozenset(foreign),
            former=frozenset(former),
            absent=frozenset(absent),
            optional_apis=self._served - memory.forbidden,
            unreadable=memory.forbidden,
            status=found.get("status") or {},
        )

    def forget_served_kinds(self) -> None:
        """Read again which kinds are served: a call about one of them was answered with 404."""
        self._served_at = float("-inf")

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
            memory.resource, memory.names = resource, _names(resource, self._settings)
        absent_kinds = OPTIONAL_KINDS - (self._served - memory.forbidden)
        names = [ref for ref in memory.names if ref.kind not in absent_kinds]
        makers = {Ref("Deployment", maker_of(pod)) for pod in pods if not is_terminating(pod)}
        vanished = sorted((memory.children | makers) - set(names))
        return [ref for ref in (*names, *vanished) if ref not in children]

    async def _read_optional(self, key: Key, resource: Resource, memory: ObserverMemory) -> None:
        """Read objects of optional kinds that the resource wants or has had, if it is time to.

        The first time all kinds are read, since an operator before this one may have made them. A
        missing right matters only for a kind that is wanted.
        """
        now = self._now()
        if now - self._served_at >= OPTIONAL_SECONDS:
            self._served = await self._cluster.optional_kinds()
            self._served_at = now
        kinds, is_first = _kinds_wanted(resource), memory.optional_read_at == float("-inf")
        pause = FORBIDDEN_SECONDS if memory.forbidden else OPTIONAL_SECONDS
        if now - memory.optional_read_at < pause and kinds == memory.kinds_wanted:
            return
        cached, forbidden = self._cache.children(key), set[str]()
        for kind in self._served:
            ref = Ref(kind, _name_of(kind, resource))
            if not (is_first or kind in kinds or ref in cached):
                continue
            try:
                live = await self._cluster.get(key[0], ref)
            except ForbiddenError as error:
                if error.is_namespace_terminating:
                    raise
                forbidden.add(kind)
                continue
            if live is not None:
                self._cache.remember(key, live)
            elif ref in cached:
                self._cache.mark_deleted(cached[ref])
        memory.forbidden, memory.kinds_wanted = kinds & forbidden, kinds
        memory.optional_read_at = now


def _names(resource: Resource, settings: OperatorSettings) -> tuple[Ref, ...]:
    """Names of all children of a resource, except a preflight's pod."""
    cells = draft_cells(resource)
    number = resource.spec.draft.replicas
    replicas = {cell: drafts_of_cell(number, len(cells), cell) for cell in cells}
    return tuple(map(ref_of, wanted(resource, settings, replicas)))


def _kinds_wanted(resource: Resource) -> frozenset[str]:
    """Optional kinds of which a resource wants an object."""
    autoscaling = resource.spec.draft.autoscaling
    is_wanted_by_kind = {
        "ScaledObject": autoscaling is not None and autoscaling.mode is ScalingMode.KEDA,
        "PodMonitor": resource.spec.observability.pod_monitor,
    }
    return frozenset(kind for kind, is_wanted in is_wanted_by_kind.items() if is_wanted)


def _name_of(kind: str, resource: Resource) -> str:
    return component_name(resource, Component.DRAFT) if kind == "ScaledObject" else resource.name


def _is_older(pod: Object, resource: Object, deployment: Object | None) -> bool:
    """Whether a pod is of a former resource of this name: nothing that is ours existed before it.

    One that is older than the resource alone came with a Deployment that was left for us to adopt;
    one that is older than its Deployment alone was adopted by that.
    """
    makers = [resource] if deployment is None else [resource, deployment]
    return all(_made_at(pod) < _made_at(each) for each in makers)


def _made_at(thing: Object) -> float:
    return to_seconds(thing["metadata"].get("creationTimestamp")) or 0.0
