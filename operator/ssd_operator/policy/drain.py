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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ssd_operator.api.spec import Object, drafts_of_cell
from ssd_operator.children.objects import draft_cells, drafts_name
from ssd_operator.children.placement import effective_policy
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import (
    DRAIN_DEADLINE_ANNOTATION,
    Address,
    address_of,
    cell_of,
    drain_deadline_of,
    is_ready,
    is_scheduled,
    name_of,
    to_text,
)
from ssd_operator.observe.snapshot import Snapshot

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a victim: its ReplicaSet deletes it before equal pods."""
VICTIM_COST = "-1000"
_ENDED = frozenset({"Drained", "TimedOut"})
"""Results after which a draft serves nothing; one that was not reached may still serve."""
_NODE = "kubernetes.io/hostname"
"""The only topology that is known without reading nodes."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A draft whose drain begins or has not ended."""

    pod: str
    deadline: float
    """Seconds since the epoch; the past for a pod that has nothing to drain."""
    address: Address | None
    """Where Drain is called, which may be repeated; None for a pod that has nothing to drain."""
    is_new: bool = False
    """Whether the pod has yet to be marked as a victim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """What to do about the number of drafts, in the order of the fields."""

    drains: tuple[Drain, ...] = ()
    replicas: Mapping[int, int] = field(default_factory=dict)
    """Replicas of each cell's Deployment from now on."""
    delete_pods: tuple[str, ...] = ()
    """Drained pods whose replica stays: their Deployment creates new ones."""


def victim_annotations(deadline: float) -> dict[str, str]:
    """What is written on a victim."""
    return {DRAIN_DEADLINE_ANNOTATION: to_text(deadline), COST_ANNOTATION: VICTIM_COST}


def plan_drains(snapshot: Snapshot, *, is_stopped: bool = False) -> DrainPlan:
    """The next step of all drains of a resource; ``is_stopped`` keeps the number of drafts."""
    sessions: Counter[str] = Counter()
    for (_, draft), link in snapshot.links.items():
        sessions[draft] += link.sessions
    misplaced = misplaced_drafts(snapshot)
    plans = [
        plan_cell(snapshot, cell, misplaced, sessions, is_stopped=is_stopped)
        for cell in draft_cells(snapshot.resource)
    ]
    return DrainPlan(
        drains=tuple(drain for plan in plans for drain in plan.drains),
        replicas={cell: number for plan in plans for cell, number in plan.replicas.items()},
        delete_pods=tuple(pod for plan in plans for pod in plan.delete_pods),
    )


def plan_cell(
    snapshot: Snapshot,
    cell: int,
    misplaced: Collection[str],
    sessions: Mapping[str, int],
    *,
    is_stopped: bool = False,
) -> DrainPlan:
    """Bring the drafts of a cell, 0 for a Pool, one step towards the wanted number.

    Pods that are misplaced, on another node than their target, are replaced one at a time. Of two
    victims, the one that serves fewer sessions, by pod, goes first.
    """
    resource, num_cells = snapshot.resource, len(draft_cells(snapshot.resource))
    wanted = drafts_of_cell(resource.spec.draft.replicas, num_cells, cell)
    live = snapshot.children.get(Ref("Deployment", drafts_name(resource, cell)))
    replicas = wanted if live is None else int(live["spec"]["replicas"])
    wanted = replicas if is_stopped else wanted
    pods = [pod for pod in snapshot.drafts if cell_of(pod) == cell]
    marked = [pod for pod in pods if drain_deadline_of(pod) is not None]
    done = [pod for pod in marked if _is_done(pod, snapshot)]
    victims, deleted = list[Object](), list[Object]()
    num_excess, num_missing = replicas - wanted, replicas - len(pods)
    if num_missing < 0:  # the ReplicaSet has yet to follow the last shrink
        replicas = max(wanted, replicas)
    elif num_excess <= 0:
        # A victim is not reactivated, but its replica stays.
        victims = [] if marked or num_missing else _to_replace(pods, misplaced)
        replicas, deleted = wanted, done
    else:
        # In the order of a ReplicaSet and then of the smallest loss.
        free = [pod for pod in pods if pod not in marked]
        free.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
        free.sort(
            key=lambda pod: (
                is_scheduled(pod),
                is_ready(pod),
                name_of(pod) not in misplaced,
                sessions.get(name_of(pod), 0),
            )
        )
        victims = free[: max(0, num_excess - num_missing - len(marked))]
        num_done = len(done) if len(done) == len(marked) and not victims else 0
        replicas -= min(num_excess, num_missing + num_done)
    return DrainPlan(
        drains=tuple(_drains(snapshot, pods, victims, sessions)),
        replicas={cell: replicas},
        delete_pods=tuple(map(name_of, deleted)),
    )


def _drains(
    snapshot: Snapshot,
    pods: Sequence[Object],
    victims: Sequence[Object],
    sessions: Mapping[str, int],
) -> Iterator[Drain]:
    """Drains of the victims, and of all pods whose drain has not ended.

    A draft that is not ready may have sessions still: a busy one answers a probe too late.
    """
    now, seconds = snapshot.now, snapshot.resource.spec.draft.drain_seconds
    for pod in (*victims, *(pod for pod in pods if pod not in victims)):
        deadline, is_new = drain_deadline_of(pod), pod in victims
        if is_new:
            has_work = is_ready(pod) or bool(sessions.get(name_of(pod)))
            deadline = math.ceil(now + seconds) if has_work else math.floor(now)
        if deadline is not None:
            is_over = _is_done(pod, snapshot) or deadline <= now
            address = None if is_over else address_of(pod)
            if is_new or address is not None:
                yield Drain(name_of(pod), deadline, address, is_new)


def _is_done(pod: Object, snapshot: Snapshot) -> bool:
    """Whether a draft serves nothing any more, or its time has come."""
    deadline = drain_deadline_of(pod)
    has_ended = snapshot.drains.get(name_of(pod)) in _ENDED
    return has_ended or (deadline is not None and deadline <= snapshot.now)


def _to_replace(pods: Sequence[Object], misplaced: Collection[str]) -> list[Object]:
    """One misplaced pod; none before the replacement of the last one is ready."""
    are_placed_ready = all(is_ready(pod) for pod in pods if name_of(pod) not in misplaced)
    # Misplaced pods that are not ready may never be: they go first and delay no other.
    misplaced_pods = sorted((pod for pod in pods if name_of(pod) in misplaced), key=is_ready)
    return misplaced_pods[:1] if are_placed_ready else []


def misplaced_drafts(snapshot: Snapshot) -> frozenset[str]:
    """Drafts that must be on the node of their cell's target and are not: the target has moved."""
    spec = snapshot.resource.spec
    is_bound = effective_policy(snapshot.resource) == "Required"
    if not is_bound or spec.placement.topology_key != _NODE or spec.draft.sharing == "Pool":
        return frozenset()
    nodes = {cell_of(pod): pod["spec"]["nodeName"] for pod in snapshot.targets if is_scheduled(pod)}
    return frozenset(
        name_of(pod)
        for pod in snapshot.drafts
        if is_scheduled(pod)
        and nodes.get(cell_of(pod), pod["spec"]["nodeName"]) != pod["spec"]["nodeName"]
    )
