"""Removal of drafts without a failed request: mark, drain, shrink. Pure.

All state is on the pods, so a restarted operator continues. A *victim* is marked with the time at
which its drain ends at the latest and with the lowest deletion cost, which its ReplicaSet prefers.
It is *done* when it has drained or when that time has come. A Deployment shrinks by done victims
only. The ReplicaSet then removes one of them, or a draft that serves nothing.

*Decision*: a cell shrinks when all its marked pods are done, and marks no other pod before the
ReplicaSet has followed. *Because* marked pods are equal to a ReplicaSet: with one done and one
draining it may remove the draining one. *Not chosen*: a still lower cost for done pods, one more
write whose arrival before the shrink nothing guarantees. *Revisit when* drains take so long that
waiting for all of them matters.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object, Sharing, drafts_of_cell
from ssd_operator.children.names import cell_of, draft_cells, draft_deployment
from ssd_operator.children.placement import effective_policy
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    DRAIN_DEADLINE_ANNOTATION,
    drain_deadline_of,
    is_ready,
    is_scheduled,
    name_of,
    to_text,
)
from ssd_operator.observe.snapshot import Snapshot

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""On a victim: its ReplicaSet deletes it before equal pods."""
VICTIM_COST = "-1000"
_ENDED = frozenset({"Drained", "TimedOut"})
"""Results after which a draft serves nothing; one that was not reached may still serve."""
_NODE = "kubernetes.io/hostname"
"""The only topology that is known without reading nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A pod to annotate as a victim."""

    pod: str
    deadline: float
    """Seconds since the epoch; the past for a pod that has nothing to drain."""

    @property
    def annotations(self) -> dict[str, str]:
        """What to write on the pod."""
        return {DRAIN_DEADLINE_ANNOTATION: to_text(self.deadline), COST_ANNOTATION: VICTIM_COST}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCall:
    """A Drain call to a draft; repeating it is harmless."""

    pod: str
    host: str
    """Its pod's address, without a port."""
    seconds: float
    """How long its sessions may take to leave, > 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """What to do about the number of drafts, in the order of the fields."""

    marks: tuple[Mark, ...] = ()
    calls: tuple[DrainCall, ...] = ()
    replicas: Mapping[int, int] = field(default_factory=dict)
    """Replicas of each cell's Deployment from now on."""
    delete_pods: tuple[str, ...] = ()
    """Drained pods whose replica stays: their Deployment creates new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDrafts:
    """The drafts of one cell, and the state of their drains."""

    pods: Sequence[Object]
    """Live pods."""
    wanted: int
    replicas: int
    """Of the live Deployment; the wanted number without one."""
    results: Mapping[str, str] = field(default_factory=dict)
    """Of drains, by pod; empty while one runs."""
    sessions: Mapping[str, int] = field(default_factory=dict)
    """Sessions that a draft serves, by pod."""
    misplaced: AbstractSet[str] = frozenset()
    """Pods on another node than their target, to be replaced one at a time."""
    is_rolling: bool = False
    """Whether the Deployment is between two revisions. Its controller shrinks the ReplicaSets in
    proportion and could remove a draft that serves, so the cell does not shrink."""
    drain_seconds: float = 20.0
    """Longest drain, > 0."""
    now: float
    """Seconds since the epoch."""

    def plan(self, cell: int) -> DrainPlan:
        """Bring the drafts one step towards the wanted number."""
        marked = [pod for pod in self.pods if drain_deadline_of(pod) is not None]
        going = [pod for pod in marked if not self._is_done(pod)]
        if len(self.pods) > self.replicas:  # the ReplicaSet has yet to follow the last shrink
            return self._plan(cell, going, [], max(self.wanted, self.replicas))
        excess = self.replicas - self.wanted
        if excess <= 0:
            # A victim is not reactivated, but its replica stays.
            victims = [] if marked else self._misplaced()
            plan = self._plan(cell, going, victims, self.wanted)
            done = tuple(name_of(pod) for pod in marked if pod not in going)
            return replace(plan, delete_pods=done)
        if self.is_rolling:
            return self._plan(cell, going, [], self.replicas)
        num_missing = self.replicas - len(self.pods)
        victims = self._victims()[: max(0, excess - num_missing - len(marked))]
        num_done = 0 if going or victims else len(marked)
        return self._plan(cell, going, victims, self.replicas - min(excess, num_missing + num_done))

    def _plan(
        self, cell: int, going: Sequence[Object], victims: Sequence[Object], replicas: int
    ) -> DrainPlan:
        last = math.ceil(self.now + self.drain_seconds)
        marks = tuple(
            Mark(pod=name_of(pod), deadline=last if is_ready(pod) else math.floor(self.now))
            for pod in victims
        )
        deadlines = {name_of(pod): drain_deadline_of(pod) or 0.0 for pod in going}
        deadlines |= {mark.pod: mark.deadline for mark in marks}
        hosts = {name_of(pod): pod.get("status", {}).get("podIP", "") for pod in self.pods}
        calls = tuple(
            DrainCall(pod=pod, host=hosts[pod], seconds=deadline - self.now)
            for pod, deadline in deadlines.items()
            if deadline > self.now and hosts[pod]
        )
        return DrainPlan(marks=marks, calls=calls, replicas={cell: replicas})

    def _is_done(self, pod: Object) -> bool:
        deadline = drain_deadline_of(pod)
        has_ended = self.results.get(name_of(pod)) in _ENDED
        return has_ended or (deadline is not None and deadline <= self.now)

    def _victims(self) -> list[Object]:
        """Pods without a mark, in the order of a ReplicaSet and then of the smallest loss."""
        free = [pod for pod in self.pods if drain_deadline_of(pod) is None]
        free.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
        return sorted(
            free,
            key=lambda pod: (
                is_scheduled(pod),
                is_ready(pod),
                name_of(pod) not in self.misplaced,
                self.sessions.get(name_of(pod), 0),
            ),
        )

    def _misplaced(self) -> list[Object]:
        """One pod to replace; none before the replacement of the last one is ready."""
        names = self.misplaced
        placed = [pod for pod in self.pods if name_of(pod) not in names]
        # Misplaced pods that are not ready may never be: they go first and delay no other.
        misplaced = sorted((pod for pod in self.pods if name_of(pod) in names), key=is_ready)
        may_go = all(is_ready(pod) for pod in placed) and len(self.pods) == self.replicas
        return misplaced[:1] if may_go else []


def plan_drains(snapshot: Snapshot) -> DrainPlan:
    """The next step of all drains of a resource."""
    resource, children = snapshot.resource, snapshot.children
    cells, misplaced = draft_cells(resource), misplaced_drafts(snapshot)
    sessions: Counter[str] = Counter()
    for (_, draft), link in snapshot.links.items():
        sessions[draft] += link.sessions
    plans = []
    for cell in cells:
        wanted = drafts_of_cell(snapshot.num_drafts_wanted, len(cells), cell)
        live = children.get(Ref("Deployment", draft_deployment(resource, cell)))
        drafts = CellDrafts(
            pods=[pod for pod in snapshot.drafts if cell_of(pod) == cell],
            wanted=wanted,
            replicas=wanted if live is None else int(live["spec"]["replicas"]),
            results=snapshot.drains,
            sessions=sessions,
            misplaced=misplaced,
            is_rolling=snapshot.is_rolling_drafts(cell),
            drain_seconds=resource.spec.draft.drain_seconds,
            now=snapshot.now,
        )
        plans.append(drafts.plan(cell))
    return DrainPlan(
        marks=tuple(mark for plan in plans for mark in plan.marks),
        calls=tuple(call for plan in plans for call in plan.calls),
        replicas={cell: number for plan in plans for cell, number in plan.replicas.items()},
        delete_pods=tuple(pod for plan in plans for pod in plan.delete_pods),
    )


def misplaced_drafts(snapshot: Snapshot) -> frozenset[str]:
    """Drafts that must be on the node of their cell's target and are not: the target has moved."""
    spec = snapshot.resource.spec
    is_bound = effective_policy(snapshot.resource) == "Required"
    if not is_bound or spec.placement.topology_key != _NODE or spec.draft.sharing is Sharing.POOL:
        return frozenset()
    nodes = {cell_of(pod): pod["spec"]["nodeName"] for pod in snapshot.targets if is_scheduled(pod)}
    return frozenset(
        name_of(pod)
        for pod in snapshot.drafts
        if is_scheduled(pod)
        and nodes.get(cell_of(pod), pod["spec"]["nodeName"]) != pod["spec"]["nodeName"]
    )
