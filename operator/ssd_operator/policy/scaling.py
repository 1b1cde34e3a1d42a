"""How many drafts a resource should have: one decision every ten seconds, from measured demand.

Pure. ``replicas`` is the number of the whole resource, as in ``.spec.draft.replicas``, or of a
pool, as in ``.spec.replicas``; the caller writes the decision there, and nowhere else.

*Decision*: a missing sample counts as demand for the present number. *Because* nothing is
measured in a gap of the window, and a scale-down on the first sample after it would have no
evidence. *Not chosen*: to drop the whole window, which costs the same delay and loses the demand
that was measured. *Revisit when* targets often send no report for half a minute.
"""

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from ssd_operator.api.spec import Autoscaling, Resource
from ssd_operator.children.objects import NAME_LABEL, draft_cells
from ssd_operator.observe.pod_state import is_unschedulable, labels_of, name_of
from ssd_operator.observe.snapshot import Snapshot

DECISION_SECONDS = 10.0
"""Time between two decisions."""
LONGEST_GAP_SECONDS = 3 * DECISION_SECONDS
"""After a longer time without a decision, as of a paused resource, the window begins again."""
TOLERANCE = 0.1
"""Demand within this fraction of the present number changes nothing."""
UP_COOLDOWN_SECONDS = 10.0
"""Shortest time between any change and an increase: a new draft takes a moment to have effect."""


Reason = Literal[
    "Bounds",
    "NoSamples",
    "Unschedulable",
    "CoolingDown",
    "ScaleUp",
    "Stabilizing",
    "ScaleDown",
    "Steady",
]
"""Why a number was kept or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Measured demand of a resource, and the state of its drafts."""

    replicas: int
    """Present number of drafts."""
    eligible: float | None
    """Running sequences that speculate, with or without a draft, of all targets but the refused
    ones; mean of 30 s. None if no target is ready, or one of them has not answered for 30 s or does
    not report it."""
    sustainable_sessions: float
    """Sustainable sessions of a draft: the mean of those with active links; ``sequencesPerReplica``
    if none is measured. > 0."""
    num_refused: int = 0
    """Targets with such sequences that drafts refuse. Each needs one draft, as in the metric
    ``ssd_desired_draft_replicas``: no number of drafts would fit it."""
    num_unschedulable: int = 0
    """Draft pods without a node."""
    num_draining: int = 0
    """Draft pods that are drained or deleted."""
    is_partial: bool = False
    """Whether a resource that refers to the pool has no ready target now, so no demand."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number from now on, and why."""

    replicas: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Memory from decision to decision. A restarted operator begins with an empty one."""

    first_seen: float | None = None
    """First decision since the last gap."""
    wanted: tuple[tuple[float, int], ...] = ()
    """Time and number, oldest first, no older than the window."""
    last_change: float = -math.inf
    decision: Decision | None = None
    """The newest decision."""
    demand: Demand | None = None
    """Demand of this decision."""
    decided_at: float = -math.inf


def internal_scaling(resource: Resource) -> Autoscaling | None:
    """The bounds of the Internal loop; None if the user or another scaler writes the number.

    A cell has links only to drafts of its own, so the lower one is a draft for each cell, unless it
    is 0 or the upper one is less.
    """
    bounds = resource.spec.draft.autoscaling
    if bounds is None or bounds.mode != "Internal":
        return None
    low = max(bounds.min_replicas, len(draft_cells(resource))) if bounds.min_replicas else 0
    return bounds.changed(min_replicas=min(low, bounds.max_replicas))


def measure(snapshot: Snapshot) -> Demand:
    """The demand of all ready targets; of a pool, those of all resources that refer to it."""
    sustainable: dict[str, int] = {}
    for (_, draft), link in snapshot.active_links.items():
        if link.sustainable_sessions > 0:
            # If several targets measured a draft, the lowest value counts.
            sustainable[draft] = min(
                link.sustainable_sessions, sustainable.get(draft, link.sustainable_sessions)
            )
    targets, answers = snapshot.ready_targets, snapshot.answers
    serving = {labels_of(pod)[NAME_LABEL] for pod in targets}
    # A pool to which nothing refers has no demand.
    is_used = bool(snapshot.deployments) or not snapshot.resource.is_pool
    is_known = (bool(targets) or not is_used) and all(name_of(pod) in answers for pod in targets)
    need = {name: answer.eligible_sequences for name, answer in answers.items()}
    refused = snapshot.refused_targets
    eligible = sum(number for name, number in need.items() if name not in refused)
    default = snapshot.resource.spec.draft.sequences_per_replica
    return Demand(
        replicas=snapshot.num_drafts_wanted,
        eligible=eligible if is_known else None,
        sustainable_sessions=fmean(sustainable.values()) if sustainable else default,
        num_refused=sum(need[name] > 0 for name in refused),
        num_unschedulable=sum(map(is_unschedulable, snapshot.staying_drafts)),
        num_draining=snapshot.num_draining,
        is_partial=not serving.issuperset(snapshot.deployments),
    )


def next_replicas(bounds: Autoscaling, demand: Demand, history: History, now: float) -> History:
    """Decide on the number of drafts."""
    number, present = _needed(bounds, demand), demand.replicas
    oldest = now - bounds.scale_down_stabilization_seconds
    recent = tuple(entry for entry in history.wanted if entry[0] >= oldest)
    is_after_gap = LONGEST_GAP_SECONDS < now - history.decided_at < math.inf
    history = replace(
        history,
        first_seen=now if history.first_seen is None or is_after_gap else history.first_seen,
        wanted=(*recent, (now, present if number is None else number)),
    )
    decision = _decide(bounds, demand, history, number, now)
    changed_at = now if decision.replicas != present else history.last_change
    return replace(
        history, decision=decision, demand=demand, decided_at=now, last_change=changed_at
    )


def _needed(bounds: Autoscaling, demand: Demand) -> int | None:
    """Number of drafts for the present demand, within the bounds; None if it is unknown."""
    if demand.eligible is None:
        return None
    drafts = demand.eligible / (demand.sustainable_sessions * float(bounds.target_occupancy))
    drafts += demand.num_refused
    is_near = abs(drafts - demand.replicas) <= TOLERANCE * demand.replicas
    number = demand.replicas if is_near else math.ceil(drafts)
    # A target that is replaced comes back with its demand.
    return _within(bounds, max(number, demand.replicas) if demand.is_partial else number)


def _within(bounds: Autoscaling, number: int) -> int:
    return min(max(number, bounds.min_replicas), bounds.max_replicas)


def _decide(
    bounds: Autoscaling, demand: Demand, history: History, number: int | None, now: float
) -> Decision:
    present, quiet = demand.replicas, now - history.last_change
    needed, nearest = present if number is None else number, _within(bounds, present)
    largest = max(wanted for _, wanted in history.wanted)
    seen = now - (now if history.first_seen is None else history.first_seen)
    is_early = largest >= present or seen < bounds.scale_down_stabilization_seconds
    is_busy = demand.num_draining > 0 or quiet < bounds.cooldown_seconds
    is_up, is_down = needed > present, needed < present
    rules: tuple[tuple[bool, int, Reason], ...] = (
        (nearest != present, nearest, "Bounds"),
        (number is None, present, "NoSamples"),
        (is_up and demand.num_unschedulable > 0, present, "Unschedulable"),
        (is_up and quiet < UP_COOLDOWN_SECONDS, present, "CoolingDown"),
        (is_up, min(needed, present + max(2, math.ceil(present / 2))), "ScaleUp"),
        (is_down and is_early, present, "Stabilizing"),
        (is_down and is_busy, present, "CoolingDown"),
        (is_down, max(largest, present - max(1, present // 4)), "ScaleDown"),
        (True, present, "Steady"),
    )
    return next(Decision(replicas, reason) for applies, replicas, reason in rules if applies)
