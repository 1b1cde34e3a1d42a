"""The state of one resource in one pass: its children, pods and links. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.names import (
    COMPONENT_LABEL,
    Component,
    child_name,
    draft_cells,
    draft_deployment,
    targets_service,
)
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    cell_of,
    drain_deadline_of,
    is_live,
    is_ready,
    is_terminating,
    name_of,
)

PROGRESS_EXCEEDED = "ProgressDeadlineExceeded"
"""Reason of the condition Progressing of a Deployment that does not proceed."""
OLDEST_ANSWER_SECONDS = 30.0
"""A target without an answer for longer is unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFact(PoolStatus):
    """One target's report, and when it came (the operator's clock).

    States of links are written as in the status: Active, Connecting, Quarantined, Draining, Lost,
    Refused.
    """

    target_pod: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a resource and of everything around it, as one pass has read it."""

    resource: Resource
    now: float
    """Seconds since the epoch."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that the resource owns (controller owner reference by uid): a preflight's pod is one,
    the pods of Deployments are not."""
    pods: tuple[Object, ...] = ()
    """Pods of engines: the others with the resource's ``ssd.dev/name`` label."""
    gateways: tuple[Object, ...] = ()
    """Pods of gateways."""
    endpoints: frozenset[str] = frozenset()
    """Names of the ready pods of the client Service."""
    foreign: Mapping[Ref, str] = field(default_factory=dict)
    """Wanted names that other owners' objects have, with the owner."""
    former: frozenset[Ref] = frozenset()
    """Wanted names of children that a former resource of this name left; they will be deleted."""
    pools: Mapping[str, PoolFact] = field(default_factory=dict)
    """By target pod; only pods that exist."""
    drains: Mapping[str, str] = field(default_factory=dict)
    """Results by draft pod: Drained, TimedOut, Unreachable; empty while a drain runs."""
    status: Object = field(default_factory=dict)
    """The present status."""

    @cached_property
    def targets(self) -> tuple[Object, ...]:
        """Live target pods of the wanted cells."""
        cells = range(self.resource.spec.num_cells)
        pods = self._pods(Component.TARGET)
        return tuple(pod for pod in pods if is_live(pod) and cell_of(pod) in cells)

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
        """Draft pods that are drained or deleted."""
        terminating = [pod for pod in self._pods(Component.DRAFT) if is_terminating(pod)]
        return len(self.drafts) - len(self.staying_drafts) + len(terminating)

    @cached_property
    def answers(self) -> dict[str, PoolFact]:
        """Answers of ready targets that are not too old, by pod."""
        oldest = self.now - OLDEST_ANSWER_SECONDS
        pools = self.pools
        names = [name_of(pod) for pod in self.ready_targets]
        return {name: pools[name] for name in names if name in pools and pools[name].at >= oldest}

    @cached_property
    def links(self) -> dict[tuple[str, str], LinkStatus]:
        """Links by target and draft; by address before the handshake."""
        return {
            (target, link.draft_pod or link.address): link
            for target, fact in sorted(self.answers.items())
            for link in fact.links
        }

    @cached_property
    def active_drafts(self) -> frozenset[str]:
        """Draft pods with an active link."""
        names = {name_of(pod) for pod in self.drafts}
        linked = {draft for (_, draft), link in self.links.items() if link.state == "Active"}
        return frozenset(names & linked)

    @cached_property
    def gateway_services_lost(self) -> frozenset[Ref]:
        """Services that gateways need and whose names are another owner's."""
        return frozenset(self._gateway_services & self.foreign.keys())

    @property
    def has_gateway_services(self) -> bool:
        """Whether the resource owns the Services that gateways need."""
        return self._gateway_services <= self.children.keys()

    @property
    def _gateway_services(self) -> frozenset[Ref]:
        names = targets_service(self.resource), child_name(self.resource, Component.GATEWAY)
        return frozenset(Ref("Service", name) for name in names)

    @property
    def num_drafts_wanted(self) -> int:
        """Number of drafts of all cells together."""
        return self.resource.spec.draft.replicas

    def cell_targets(self, cell: int) -> tuple[Object, ...]:
        """Target pods of a cell, with those that are being deleted."""
        return tuple(
            pod
            for pod in self._pods(Component.TARGET)
            if cell_of(pod) == cell and (is_live(pod) or is_terminating(pod))
        )

    def target_deployment(self, cell: int) -> Object | None:
        """The Deployment of a cell's target; None if it does not exist."""
        return self._deployment(child_name(self.resource, Component.TARGET, cell))

    @cached_property
    def target_deployments(self) -> tuple[Object, ...]:
        """Target Deployments that exist."""
        cells = range(self.resource.spec.num_cells)
        found = (self.target_deployment(cell) for cell in cells)
        return tuple(deployment for deployment in found if deployment is not None)

    @cached_property
    def draft_deployments(self) -> tuple[Object, ...]:
        """Draft Deployments that exist."""
        names = [draft_deployment(self.resource, cell) for cell in draft_cells(self.resource)]
        found = (self._deployment(name) for name in names)
        return tuple(deployment for deployment in found if deployment is not None)

    def _pods(self, component: Component) -> tuple[Object, ...]:
        return tuple(
            pod
            for pod in sorted(self.pods, key=name_of)
            if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == str(component)
        )

    def _deployment(self, name: str) -> Object | None:
        return self.children.get(Ref("Deployment", name))
