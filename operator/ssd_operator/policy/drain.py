"""Taking drafts away without a request noticing: mark, drain, shrink. Pure.

All that must be remembered is on the pods, so an operator that starts anew goes on where the last
one was. A victim is *marked*: it carries the time at which it is given up at the latest, and the
lowest deletion cost, by which its ReplicaSet prefers it. It is *done* when it has drained, when
its process has ended since, or when that time has come. A Deployment shrinks by done victims only;
what the ReplicaSet then takes is one of them, or a draft that was serving nothing.

*Decision*: a cell shrinks when all its marked pods are done, and marks nobody new before the
ReplicaSet has followed. *Because* marked pods are equals to a ReplicaSet: with one done and one
draining it may take the draining one. *Not chosen*: a still lower cost for done pods, one more
write whose arrival before the shrink nothing guarantees. *Revisit when* drains take so long that
the first of several is waited for.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import GROUP, Object
from ssd_operator.observe.facts import DrainFact
from ssd_operator.observe.pod_state import (
    ended_at,
    is_live,
    is_ready,
    is_scheduled,
    name_of,
    to_seconds,
    to_text,
)

DEADLINE_ANNOTATION = f"{GROUP}/drain-deadline"
"""On a victim: when it is given up at the latest, RFC 3339."""
COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""On a victim: makes it the first that its ReplicaSet deletes among its equals."""
VICTIM_COST = "-1000"
_ROUNDING_SECONDS = 2.0
"""Deadlines are rounded up to seconds, and ends of containers down."""
_ENDED = frozenset({"Drained", "TimedOut"})
"""Results after which a draft serves nothing more; one that was not reached may still serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A pod to annotate as a victim."""

    pod: str
    deadline: float
    """Seconds since the epoch; the past for a pod that has nothing to drain."""

    @property
    def annotations(self) -> dict[str, str]:
        """What to write on the pod."""
        return {DEADLINE_ANNOTATION: to_text(self.deadline), COST_ANNOTATION: VICTIM_COST}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCall:
    """A draft that is to be told to drain; telling it twice is harmless."""

    pod: str
    host: str
    """Its pod's address, without a port."""
    seconds: float
    """How long its sessions may take to leave, > 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    """What to do about the drafts' number, in the order of the fields."""

    marks: tuple[Mark, ...] = ()
    calls: tuple[DrainCall, ...] = ()
    replicas: Mapping[int, int] = field(default_factory=dict)
    """Replicas of each cell's Deployment from now on."""
    delete_pods: tuple[str, ...] = ()
    """Drained pods whose replica stays: their Deployment makes fresh ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drains:
    """What is known about drains and drafts, and how long a drain may take."""

    facts: Mapping[str, DrainFact] = field(default_factory=dict)
    """By pod."""
    sessions: Mapping[str, int] = field(default_factory=dict)
    """Sessions that a draft serves, by pod."""
    misplaced: AbstractSet[str] = frozenset()
    """Pods to be replaced, one at a time in a cell: those away from their target."""
    rolling: AbstractSet[int] = frozenset()
    """Cells whose Deployment is between two revisions: its controller shrinks the ReplicaSets in
    proportion and would take a draft that serves, so nothing is taken away until it is through."""
    drain_seconds: float = 20.0
    """Longest drain, > 0."""


def plan_drains(
    wanted: Mapping[int, int],
    deployments: Mapping[int, int],
    pods: Mapping[int, Sequence[Object]],
    drains: Drains,
    now: float,
) -> DrainPlan:
    """Bring each cell's drafts towards the number wanted; each call is one step.

    Args:
        wanted: drafts by cell.
        deployments: replicas of the draft Deployments by cell, as they are; a cell without one
            gets its number at once.
        pods: draft pods by cell, of whatever state.
        drains: see there.
        now: seconds since the epoch.
    """
    plans = []
    for cell in sorted(wanted.keys() | deployments.keys()):
        number = wanted.get(cell, 0)
        live = tuple(pod for pod in pods.get(cell, ()) if is_live(pod))
        drafts = _Drafts(live, number, deployments.get(cell, number), drains, now)
        plans.append(drafts.plan(cell))
    return DrainPlan(
        marks=tuple(mark for plan in plans for mark in plan.marks),
        calls=tuple(call for plan in plans for call in plan.calls),
        replicas={cell: number for plan in plans for cell, number in plan.replicas.items()},
        delete_pods=tuple(pod for plan in plans for pod in plan.delete_pods),
    )


def deadline_of(pod: Object) -> float | None:
    """When a victim is given up; None for a pod that is none, or whose mark is no time."""
    return to_seconds((pod["metadata"].get("annotations") or {}).get(DEADLINE_ANNOTATION))


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The drafts of one cell."""

    live: tuple[Object, ...]
    wanted: int
    replicas: int
    drains: Drains
    now: float

    def plan(self, cell: int) -> DrainPlan:
        marked = [pod for pod in self.live if deadline_of(pod) is not None]
        going = [pod for pod in marked if not self._is_done(pod)]
        done = [pod for pod in marked if self._is_done(pod)]
        if len(self.live) > self.replicas:  # the ReplicaSet has yet to follow the last shrink
            return self._plan(cell, going, [], max(self.wanted, self.replicas))
        excess = self.replicas - self.wanted
        if excess <= 0:
            # Whoever was marked is not called back, but its replica stays.
            marks = [] if marked else self._marks(self._misplaced())
            plan = self._plan(cell, going, marks, self.wanted)
            return replace(plan, delete_pods=tuple(name_of(pod) for pod in done))
        if cell in self.drains.rolling:
            return self._plan(cell, going, [], self.replicas)
        num_missing = self.replicas - len(self.live)
        victims = self._victims()[: max(0, excess - num_missing - len(marked))]
        num_done = 0 if going or victims else len(done)
        shrink = min(excess, num_missing + num_done)
        return self._plan(cell, going, self._marks(victims), self.replicas - shrink)

    def _plan(
        self, cell: int, going: Sequence[Object], marks: Sequence[Mark], replicas: int
    ) -> DrainPlan:
        deadlines = {name_of(pod): deadline_of(pod) or 0.0 for pod in going}
        deadlines |= {mark.pod: mark.deadline for mark in marks}
        hosts = {name_of(pod): pod.get("status", {}).get("podIP", "") for pod in self.live}
        calls = tuple(
            DrainCall(pod=pod, host=hosts[pod], seconds=deadline - self.now)
            for pod, deadline in deadlines.items()
            if deadline > self.now and hosts[pod]
        )
        return DrainPlan(marks=tuple(marks), calls=calls, replicas={cell: replicas})

    def _is_done(self, pod: Object) -> bool:
        fact = self.drains.facts.get(name_of(pod))
        has_ended = fact is not None and fact.is_done and fact.result in _ENDED
        deadline = deadline_of(pod)
        is_late = deadline is not None and deadline <= self.now
        return has_ended or is_late or self._has_restarted(pod)

    def _has_restarted(self, pod: Object) -> bool:
        """Whether the process that was to drain has ended, and the one after it serves nothing.

        A drained draft exits, the kubelet starts it again, and nobody may have seen it in between.
        """
        deadline, ended = deadline_of(pod), ended_at(pod)
        if deadline is None or ended is None or self.drains.sessions.get(name_of(pod), 0):
            return False
        return ended >= deadline - self.drains.drain_seconds - _ROUNDING_SECONDS

    def _marks(self, victims: Sequence[Object]) -> list[Mark]:
        last = math.ceil(self.now + self.drains.drain_seconds)
        return [
            Mark(pod=name_of(pod), deadline=last if is_ready(pod) else math.floor(self.now))
            for pod in victims
        ]

    def _victims(self) -> list[Object]:
        """Who goes first: what a ReplicaSet would take, and then whoever is missed least."""
        free = [pod for pod in self.live if deadline_of(pod) is None]
        free.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
        return sorted(
            free,
            key=lambda pod: (
                is_scheduled(pod),
                is_ready(pod),
                name_of(pod) not in self.drains.misplaced,
                self.drains.sessions.get(name_of(pod), 0),
            ),
        )

    def _misplaced(self) -> list[Object]:
        """One pod to be replaced, and none before the last one's replacement serves."""
        names = self.drains.misplaced
        placed = [pod for pod in self.live if name_of(pod) not in names]
        # Of misplaced pods some may never be ready again: what ended there must not hold the rest.
        misplaced = sorted((pod for pod in self.live if name_of(pod) in names), key=is_ready)
        may_go = all(is_ready(pod) for pod in placed) and len(self.live) == self.replicas
        return misplaced[:1] if may_go else []
