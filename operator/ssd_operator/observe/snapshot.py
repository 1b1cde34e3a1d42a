"""The state of one resource in one pass: its children, pods and links, and how it is collected."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ssd.rpc.listen import join_address
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.spec import POOL_KIND, Object, Resource
from ssd_operator.children.manifests import wanted
from ssd_operator.children.objects import (
    COMPONENT_LABEL,
    DRAFT_PORT,
    ENGINES,
    POOL_LABEL,
    Component,
    child_name,
    draft_cells,
    drafts_name,
    targets_service,
)
from ssd_operator.observe.cluster import Cluster, Ref, ref_of
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import (
    address_of,
    cell_of,
    controller_of,
    drain_deadline_of,
    endpoints_of,
    has_ended,
    is_live,
    is_lost,
    is_ours,
    is_owned_by,
    is_pod_of,
    is_ready,
    is_terminating,
    labels_of,
    made_at,
    maker_of,
    name_of,
)
from ssd_operator.settings import OperatorSettings

PROGRESS_EXCEEDED = "ProgressDeadlineExceeded"
"""Reason of the condition Progressing of a Deployment that does not proceed."""
UP = frozenset({"active", "quarantined"})
"""States of a link whose ends fit each other; tables of a busy draft are late."""
CLOCK_SECONDS = 10.0
"""A clock that is set back by less only makes waits longer by as much. The clocks of API servers,
nodes and the operator differ by less."""
OLDEST_ANSWER_SECONDS = 30.0
"""A target without an answer for longer is unreachable."""


class TargetReport(NamedTuple):
    """One target's report, and when it came (the operator's clock)."""

    status: PoolStatus
    at: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a resource and of everything around it, as one pass has read it."""

    resource: Resource
    now: float
    """Seconds since the epoch."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that the resource owns (controller owner reference by uid), and those with its labels
    and no owner: a preflight's pod is one, the pods of Deployments are not."""
    pods: tuple[Object, ...] = ()
    """Pods of engines: the others with the resource's ``ssd.dev/name`` label, and those at the
    other end of its links: drafts of its pool, or targets that have this pool's."""
    gateways: tuple[Object, ...] = ()
    """Pods of gateways."""
    endpoints: frozenset[str] = frozenset()
    """Names of the ready pods of the client Service."""
    foreign: Mapping[Ref, str] = field(default_factory=dict)
    """Wanted names that other owners' objects have, with the owner."""
    former: frozenset[Ref] = frozenset()
    """Wanted names of children that a former resource of this name left; they will be deleted."""
    pools: Mapping[str, TargetReport] = field(default_factory=dict)
    """Reports by target pod; only of pods that exist."""
    call_errors: Mapping[str, str] = field(default_factory=dict)
    """Why calls to targets have failed since their last report, by pod."""
    drains: Mapping[str, str] = field(default_factory=dict)
    """Results by draft pod: Drained, TimedOut, Unreachable; empty while a drain runs."""
    status: Object = field(default_factory=dict)
    """The present status."""
    pool: Resource | None = None
    """The pool that the resource refers to; None if there is none, or none that can be read."""
    deployments: tuple[str, ...] = ()
    """Names of the resources that refer to this pool."""

    @cached_property
    def targets(self) -> tuple[Object, ...]:
        """Live target pods of the wanted cells, or those with drafts of this pool."""
        cells = range(self.resource.spec.num_cells)
        pods = self._pods(Component.TARGET)
        is_pool = self.resource.is_pool
        return tuple(pod for pod in pods if is_live(pod) and (is_pool or cell_of(pod) in cells))

    @cached_property
    def ready_targets(self) -> tuple[Object, ...]:
        """Live target pods that serve."""
        return tuple(pod for pod in self.targets if is_ready(pod))

    @cached_property
    def drafts(self) -> tuple[Object, ...]:
        """Live draft pods of all cells, with those that are drained."""
        return tuple(pod for pod in self._pods(Component.DRAFT) if is_live(pod))

    @cached_property
    def staying_drafts(self) -> tuple[Object, ...]:
        """Live draft pods that are not drained."""
        return tuple(pod for pod in self.drafts if drain_deadline_of(pod) is None)

    @cached_property
    def ready_drafts(self) -> tuple[Object, ...]:
        """Live draft pods that accept sessions."""
        return tuple(pod for pod in self.staying_drafts if is_ready(pod))

    @cached_property
    def num_draining(self) -> int:
        """Draft pods that are drained or deleted, without those on lost nodes."""
        terminating = [
            pod
            for pod in self._pods(Component.DRAFT)
            if is_terminating(pod) and not is_lost(pod, self.now)
        ]
        return len(self.drafts) - len(self.staying_drafts) + len(terminating)

    @cached_property
    def answers(self) -> dict[str, PoolStatus]:
        """Answers of ready targets that are not too old, by pod."""
        oldest = self.now - OLDEST_ANSWER_SECONDS
        names = map(name_of, self.ready_targets)
        reports = {name: self.pools[name] for name in names if name in self.pools}
        # A later one is of a time before the clock was set back.
        newest = self.now + CLOCK_SECONDS
        return {
            name: report.status for name, report in reports.items() if oldest <= report.at <= newest
        }

    @cached_property
    def links(self) -> dict[tuple[str, str], LinkStatus]:
        """Links by target and draft; by address if no live pod has it."""
        # A target does not know the name of a draft before the handshake, or if that fails.
        pods = {
            join_address(address.host, DRAFT_PORT): name_of(pod)
            for pod in self.drafts
            if (address := address_of(pod)) is not None
        }
        return {
            (target, link.draft_pod or pods.get(link.address, link.address)): link
            for target, answer in sorted(self.answers.items())
            for link in answer.links
        }

    @property
    def active_links(self) -> dict[tuple[str, str], LinkStatus]:
        """Links in state ``active``."""
        return {pair: link for pair, link in self.links.items() if link.state == "active"}

    @property
    def linked_targets(self) -> frozenset[str]:
        """Target pods with a link to a draft that fits them, active or suspended."""
        return frozenset(target for (target, _), link in self.links.items() if link.state in UP)

    @property
    def active_drafts(self) -> frozenset[str]:
        """Draft pods with an active link."""
        return frozenset(map(name_of, self.drafts)) & {draft for _, draft in self.active_links}

    @property
    def refused_targets(self) -> frozenset[str]:
        """Target pods with a refused link and none that is up: no draft is known to fit them."""
        refused = {target for (target, _), link in self.links.items() if link.state == "refused"}
        return frozenset(refused - self.linked_targets)

    @property
    def gateway_services(self) -> frozenset[Ref]:
        """Services that gateways need: of what they call, and of themselves."""
        names = targets_service(self.resource), child_name(self.resource, Component.GATEWAY)
        return frozenset(Ref("Service", name) for name in names)

    @property
    def gateway_services_lost(self) -> frozenset[Ref]:
        """Services in ``gateway_services`` whose names belong to another owner."""
        return self.gateway_services & self.foreign.keys()

    @property
    def num_drafts_wanted(self) -> int:
        """Number of drafts of all cells together, or of the pool; 0 without the pool."""
        owner = self.resource if self.resource.pool_prefix is None else self.pool
        return 0 if owner is None else owner.spec.draft.replicas

    def cell_targets(self, cell: int) -> tuple[Object, ...]:
        """Target pods of a cell, with those that are being deleted."""
        return tuple(
            pod
            for pod in self._pods(Component.TARGET)
            if cell_of(pod) == cell and (is_live(pod) or is_terminating(pod))
        )

    def ended(self, component: Component) -> tuple[Object, ...]:
        """Target or draft pods whose processes have ended for good."""
        pods = self._pods(component)
        return tuple(pod for pod in pods if has_ended(pod) and not is_terminating(pod))

    @property
    def target_deployments(self) -> tuple[Object, ...]:
        """Target Deployments that exist."""
        cells = range(self.resource.spec.num_cells)
        names = [child_name(self.resource, Component.TARGET, cell) for cell in cells]
        return self._deployments(names)

    @property
    def draft_deployments(self) -> tuple[Object, ...]:
        """Draft Deployments that exist."""
        cells = draft_cells(self.resource)
        return self._deployments([drafts_name(self.resource, cell) for cell in cells])

    @property
    def gateway_deployments(self) -> tuple[Object, ...]:
        """The Deployment of gateways, if it exists; empty if gateways are not enabled."""
        name = child_name(self.resource, Component.GATEWAY)
        return self._deployments([name] if self.resource.spec.gateway.enabled else [])

    @property
    def live_gateways(self) -> tuple[Object, ...]:
        """Live pods of gateways."""
        return tuple(filter(is_live, self.gateways))

    def _pods(self, component: Component) -> tuple[Object, ...]:
        return tuple(
            pod
            for pod in sorted(self.pods, key=name_of)
            if labels_of(pod).get(COMPONENT_LABEL) == component
        )

    def _deployments(self, names: Iterable[str]) -> tuple[Object, ...]:
        deployments = (self.children.get(Ref("Deployment", name)) for name in names)
        return tuple(deployment for deployment in deployments if deployment is not None)


async def observe(
    cluster: Cluster,
    cache: ObjectCache,
    settings: OperatorSettings,
    cached: Object,
    resource: Resource,
    now: float,
) -> Snapshot:
    """Collect the state of a resource, ``cached`` and parsed, and of everything around it.

    The cluster is read where the cache has no child of a wanted name: watches bring only what
    carries our label.

    Raises:
        ClusterError: the API server does not answer.
    """
    seen = cache.children(resource.key)
    children = {
        ref: child
        for ref, child in seen.items()
        if (is_owned_by if ref.kind == "Pod" else is_ours)(child, resource.uid)
    }
    pods, gateways = (
        tuple(
            pod
            for ref, pod in seen.items()
            if ref.kind == "Pod"
            and ref not in children
            and is_pod_of(pod, resource.prefix, components)
            and not _is_older(pod, cached, children.get(Ref("Deployment", maker_of(pod))))
        )
        for components in (ENGINES, (Component.GATEWAY,))
    )
    replicas = {}
    for cell in draft_cells(resource):
        deployment = children.get(Ref("Deployment", drafts_name(resource, cell)), {"spec": {}})
        number = resource.spec.draft.replicas
        # The most that this pass may want of the Deployment: a drain shrinks it later.
        replicas[cell] = max(number, int(deployment["spec"].get("replicas", number)))
    refs = dict.fromkeys(map(ref_of, wanted(resource, settings, replicas)))
    # An unwanted Deployment without its labels would never be deleted, but its pods name it.
    refs |= {Ref("Deployment", maker_of(pod)): None for pod in pods if not is_terminating(pod)}
    foreign, former = dict[Ref, str](), set[Ref]()
    for ref in [ref for ref in refs if ref not in children]:
        if (live := await cluster.get(resource.namespace, ref)) is None:
            continue
        owner = controller_of(live)
        if is_ours(live, resource.uid):
            children[ref] = live
        elif (owner.get("kind"), owner.get("name")) == (resource.kind, resource.name):
            former.add(ref)
        else:
            foreign[ref] = f"{owner['kind']} {owner['name']}" if owner else "another owner"
    peers = sorted(cache.peers(resource.key))
    return Snapshot(
        resource=resource,
        now=now,
        children=children,
        pods=(*pods, *_linked_pods(cache, resource)),
        gateways=gateways,
        endpoints=endpoints_of(resource.prefix, seen.values()),
        foreign=foreign,
        former=frozenset(former),
        status=cached.get("status") or {},
        pool=_pool(cache, resource),
        deployments=tuple(name for _, name in peers) if resource.is_pool else (),
    )


def _linked_pods(cache: ObjectCache, resource: Resource) -> Iterator[Object]:
    """Pods at the other end of the links that other resources own."""
    component = Component.TARGET if resource.is_pool else Component.DRAFT
    others = cache.linked if resource.is_pool else cache.peers
    for other in others(resource.key):
        for ref, child in cache.children(other).items():
            is_linked = not resource.is_pool or labels_of(child).get(POOL_LABEL) == resource.prefix
            if ref.kind == "Pod" and is_linked and is_pod_of(child, other[1], (component,)):
                yield child


def _pool(cache: ObjectCache, resource: Resource) -> Resource | None:
    if resource.pool_prefix is None:
        return None
    pool = cache.resource((resource.namespace, resource.pool_prefix))
    if pool is None or pool["kind"] != POOL_KIND or is_terminating(pool):
        return None
    with contextlib.suppress(SpecError):  # the status of the pool has the reason
        return parse(pool)
    return None


def _is_older(pod: Object, resource: Object, deployment: Object | None) -> bool:
    """Whether a pod is of a former resource of this name: nothing that is ours existed before it.

    One that is older than the resource alone came with a Deployment that was left for us to adopt;
    one that is older than its Deployment alone was adopted by that. Clocks of API servers differ.
    """
    makers = [resource] if deployment is None else [resource, deployment]
    return all(made_at(pod) < made_at(maker) - CLOCK_SECONDS for maker in makers)
