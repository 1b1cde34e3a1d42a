"""Who is there: the pods and links of one resource, counted once for all that is said of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.names import (
    COMPONENT_LABEL,
    Component,
    cell_of,
    draft_cells,
    draft_deployment,
    revision_of,
    target_deployment,
)
from ssd_operator.observe.facts import Observed, PoolFact, Ref
from ssd_operator.observe.pod_state import (
    condition_of,
    is_leaving,
    is_live,
    is_ready,
    name_of,
    to_seconds,
)
from ssd_operator.policy.drain import deadline_of
from ssd_operator.policy.preflight import Preflight
from ssd_operator.policy.scaling import Decision

PROGRESS_EXCEEDED = "ProgressDeadlineExceeded"
"""Word of a Deployment that does not get on."""
OLDEST_ANSWER_SECONDS = 30.0
"""A target that has said nothing for longer is unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What this pass has decided, as far as the status tells of it."""

    revisions: Mapping[str, str] = field(default_factory=dict)
    """Revision wanted of each Deployment's pods, by its name."""
    decision: Decision | None = None
    """The newest of the Internal loop; None if it has not run."""
    is_scaling: bool = False
    """Whether this pass writes that decision's number."""
    preflight: Preflight = field(default_factory=Preflight)
    """Of the targets' revision wanted."""
    unlinked_since: float | None = None
    """Begin of a loss of links that may pass, in seconds since the epoch."""
    makes: frozenset[Ref] = frozenset()
    """Objects that are there after this pass, if they are not already."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A resource, and everything that was seen of it; ``now`` in seconds since the epoch."""

    resource: Resource
    observed: Observed
    planned: Planned
    now: float

    @cached_property
    def targets(self) -> tuple[Object, ...]:
        """Live target pods of the cells wanted."""
        cells = range(self.resource.spec.num_cells)
        pods = self._pods(Component.TARGET)
        return tuple(pod for pod in pods if is_live(pod) and cell_of(pod) in cells)

    @cached_property
    def ready_targets(self) -> tuple[Object, ...]:
        """Those that serve."""
        return tuple(pod for pod in self.targets if is_ready(pod))

    @cached_property
    def drafts(self) -> tuple[Object, ...]:
        """Live draft pods of all cells, victims of a drain among them."""
        return tuple(pod for pod in self._pods(Component.DRAFT) if is_live(pod))

    @cached_property
    def staying_drafts(self) -> tuple[Object, ...]:
        """Live draft pods that are not being drained."""
        return tuple(pod for pod in self.drafts if deadline_of(pod) is None)

    @cached_property
    def ready_drafts(self) -> tuple[Object, ...]:
        """Those that take sessions."""
        return tuple(pod for pod in self.staying_drafts if is_ready(pod))

    @cached_property
    def num_draining(self) -> int:
        """Draft pods on their way out: victims, and those that are being deleted."""
        leaving = [pod for pod in self._pods(Component.DRAFT) if is_leaving(pod)]
        return len(self.drafts) - len(self.staying_drafts) + len(leaving)

    @cached_property
    def answers(self) -> dict[str, PoolFact]:
        """What ready targets said lately, by pod."""
        oldest = self.now - OLDEST_ANSWER_SECONDS
        pools = self.observed.pools
        names = [name_of(pod) for pod in self.ready_targets]
        return {name: pools[name] for name in names if name in pools and pools[name].at >= oldest}

    @cached_property
    def links(self) -> dict[tuple[str, str], LinkStatus]:
        """Links by target and draft; by address while a draft has not said its name."""
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

    @property
    def num_drafts_wanted(self) -> int:
        """Of all cells together."""
        return self.resource.spec.draft.replicas

    @cached_property
    def has_endpoint(self) -> bool:
        """Whether clients find the resource by its name: the Service is there, and ours."""
        ref = Ref("Service", self.resource.name)
        live = self.observed.children.get(ref)
        is_there = ref in self.planned.makes or (live is not None and not is_leaving(live))
        return is_there and ref not in self.observed.foreign

    @cached_property
    def reached_targets(self) -> tuple[Object, ...]:
        """Targets that serve and to which the client Service leads."""
        endpoints = self.observed.endpoints
        return tuple(pod for pod in self.ready_targets if name_of(pod) in endpoints)

    def cell_targets(self, cell: int) -> tuple[Object, ...]:
        """Target pods of a cell, those that leave included."""
        return tuple(
            pod
            for pod in self._pods(Component.TARGET)
            if cell_of(pod) == cell and (is_live(pod) or is_leaving(pod))
        )

    @cached_property
    def is_replacing_targets(self) -> bool:
        """Whether a target of an older revision is on its way out, its successor still to come."""
        cells = range(self.resource.spec.num_cells)
        pods = [pod for cell in cells for pod in self.cell_targets(cell)]
        return any(is_leaving(pod) and self._is_outdated(pod) for pod in pods)

    def target_deployment(self, cell: int) -> Object | None:
        """The Deployment of a cell's target, if it exists."""
        return self._deployment(target_deployment(self.resource, cell))

    @cached_property
    def target_deployments(self) -> tuple[Object, ...]:
        """Those that exist."""
        cells = range(self.resource.spec.num_cells)
        found = (self.target_deployment(cell) for cell in cells)
        return tuple(deployment for deployment in found if deployment is not None)

    @cached_property
    def draft_deployments(self) -> tuple[Object, ...]:
        """Those that exist."""
        names = [draft_deployment(self.resource, cell) for cell in draft_cells(self.resource)]
        found = (self._deployment(name) for name in names)
        return tuple(deployment for deployment in found if deployment is not None)

    def is_rolling_drafts(self, cell: int) -> bool:
        """Whether a cell's drafts are of several revisions, and are getting on to be of one."""
        deployment = self._deployment(draft_deployment(self.resource, cell))
        if deployment is None:
            return False
        is_stuck = condition_of(deployment, "Progressing").get("reason") == PROGRESS_EXCEEDED
        pods = [pod for pod in self.drafts if cell_of(pod) == cell]
        return not is_stuck and len({revision_of(each) for each in (deployment, *pods)}) > 1

    def revision(self, component: Component) -> str:
        """Revision wanted of the first cell's pods; of the others only the cell differs."""
        name = target_deployment if component is Component.TARGET else draft_deployment
        return self.planned.revisions.get(name(self.resource, 0), "")

    def updated(self, pods: tuple[Object, ...]) -> int:
        """How many of these are of the revision wanted."""
        return sum(1 for pod in pods if not self._is_outdated(pod))

    def is_linked(self, target: Object) -> bool:
        """Whether a target has an active link."""
        fact = self.answers.get(name_of(target))
        return fact is not None and any(link.state == "Active" for link in fact.links)

    def ready_seconds(self, pod: Object) -> float | None:
        """Since when a pod is ready."""
        since = to_seconds(condition_of(pod, "Ready").get("lastTransitionTime"))
        return None if since is None else self.now - since

    def _pods(self, component: Component) -> tuple[Object, ...]:
        return tuple(
            pod
            for pod in sorted(self.observed.pods, key=name_of)
            if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == str(component)
        )

    def _deployment(self, name: str) -> Object | None:
        return self.observed.children.get(Ref("Deployment", name))

    def _is_outdated(self, pod: Object) -> bool:
        is_target = pod["metadata"]["labels"][COMPONENT_LABEL] == str(Component.TARGET)
        name = target_deployment if is_target else draft_deployment
        wanted = self.planned.revisions.get(name(self.resource, cell_of(pod)))
        return wanted is not None and revision_of(pod) != wanted
