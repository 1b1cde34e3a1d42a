"""How many drafts a resource should have: one decision every ten seconds, from measured demand.

Pure. ``replicas`` is the number of the whole resource, as in ``.spec.draft.replicas``; the caller
writes the decision there, and nowhere else.

*Decision*: a sample that is missing counts as a wish for the present number. *Because* a window
with a hole in it says nothing about the hole, and a scale-down on the first sample after it would
be one on no evidence. *Not chosen*: to forget the whole window, which costs the same delay and
would forget a demand that was seen. *Revisit when* targets are often silent for half a minute.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

OLDEST_SAMPLE_SECONDS = 30.0
"""A target that has been silent for longer is unknown, and the unknown never scales."""
TOLERANCE = 0.1
"""Demand within this fraction of the present number asks for nothing."""
UP_COOLDOWN_SECONDS = 10.0
"""Shortest time between any change and a rise: a new draft needs a moment to show."""


class Reason(StrEnum):
    """Why a number was kept or changed."""

    BOUNDS = "Bounds"
    NO_SAMPLES = "NoSamples"
    UNSCHEDULABLE = "Unschedulable"
    COOLING_DOWN = "CoolingDown"
    SCALE_UP = "ScaleUp"
    STABILIZING = "Stabilizing"
    SCALE_DOWN = "ScaleDown"
    STEADY = "Steady"


class Limit(StrEnum):
    """What kept a decision from following the demand at once."""

    NOTHING = ""
    MINIMUM = "Minimum"
    MAXIMUM = "Maximum"
    STEP = "Step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user allows."""

    minimum: int
    """Fewest drafts, >= 0."""
    maximum: int
    """Most drafts, >= ``minimum``."""
    occupancy: float = 0.8
    """Sessions wanted per unit of capacity, 0 < occupancy <= 1."""
    window_seconds: float = 300.0
    """Demand must have been lower for this long before a draft goes."""
    cooldown_seconds: float = 30.0
    """Shortest time between any change and a fall."""
    default_capacity: int = 32
    """Sessions of one draft while no link has measured it, >= 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLoad:
    """What one ready target last said."""

    age_seconds: float
    """Since the answer; infinite if there was none."""
    eligible: float
    """Running sequences that may speculate, drafted or not, mean of 30 s."""
    speculating: bool = True
    """False if its controller finds that speculation does not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """All targets and drafts of a resource."""

    replicas: int
    """Present number."""
    unschedulable: int = 0
    """Draft pods that the scheduler found no place for."""
    draining: int = 0
    """Draft pods on their way out."""
    targets: tuple[TargetLoad, ...] = ()
    """The ready ones."""
    capacities: Mapping[str, int] = field(default_factory=dict)
    """Sessions a draft can serve, by draft, of active links; each draft once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What must be remembered from decision to decision; a restart may forget it."""

    first_seen: float | None = None
    wanted: tuple[tuple[float, int], ...] = ()
    """Time and number, oldest first, no older than the window."""
    last_change: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The number from now on, and why."""

    replicas: int
    reason: Reason
    limited_by: Limit = Limit.NOTHING


def next_replicas(
    policy: Policy, pool: PoolLoad, history: History, now: float
) -> tuple[Decision, History]:
    """Decide on the number of drafts.

    Args:
        policy: bounds and tempo.
        pool: present number and load.
        history: of the decision before; ``History()`` at first.
        now: seconds, of any clock that never goes back.

    Returns:
        The decision, and the history for the next one. ``last_change`` moves when the number does.
    """
    if history.first_seen is None:
        history = replace(history, first_seen=now)
    wish = _wish(policy, pool)
    history = _remember(history, wish if wish is not None else pool.replicas, now, policy)
    decision = _decide(policy, pool, history, wish, now)
    if decision.replicas != pool.replicas:
        history = replace(history, last_change=now)
    return decision, history


def _wish(policy: Policy, pool: PoolLoad) -> int | None:
    """Number that the present demand asks for, within the bounds; None if it is unknown."""
    if not pool.targets or any(t.age_seconds > OLDEST_SAMPLE_SECONDS for t in pool.targets):
        return None
    measured = [capacity for capacity in pool.capacities.values() if capacity > 0]
    capacity = fmean(measured) if measured else policy.default_capacity
    demand = sum(target.eligible for target in pool.targets if target.speculating)
    drafts = demand / (capacity * policy.occupancy)
    is_near = abs(drafts - pool.replicas) <= TOLERANCE * pool.replicas
    number = pool.replicas if is_near else math.ceil(drafts)
    return min(max(number, policy.minimum), policy.maximum)


def _remember(history: History, number: int, now: float, policy: Policy) -> History:
    oldest = now - policy.window_seconds
    kept = tuple(entry for entry in history.wanted if entry[0] >= oldest)
    return replace(history, wanted=(*kept, (now, number)))


def _decide(
    policy: Policy, pool: PoolLoad, history: History, wish: int | None, now: float
) -> Decision:
    present = pool.replicas
    if present < policy.minimum:
        return Decision(replicas=policy.minimum, reason=Reason.BOUNDS, limited_by=Limit.MINIMUM)
    if present > policy.maximum:
        return Decision(replicas=policy.maximum, reason=Reason.BOUNDS, limited_by=Limit.MAXIMUM)
    if wish is None:
        return Decision(replicas=present, reason=Reason.NO_SAMPLES)
    if wish > present:
        return _up(policy, pool, history, wish, now)
    if wish < present:
        return _down(policy, pool, history, now)
    return Decision(replicas=present, reason=Reason.STEADY)


def _up(policy: Policy, pool: PoolLoad, history: History, wish: int, now: float) -> Decision:
    present = pool.replicas
    if pool.unschedulable > 0:
        return Decision(replicas=present, reason=Reason.UNSCHEDULABLE)
    if now - history.last_change < UP_COOLDOWN_SECONDS:
        return Decision(replicas=present, reason=Reason.COOLING_DOWN)
    highest = present + max(2, math.ceil(present / 2))
    limit = Limit.MAXIMUM if wish == policy.maximum else Limit.NOTHING
    return Decision(
        replicas=min(wish, highest),
        reason=Reason.SCALE_UP,
        limited_by=Limit.STEP if highest < wish else limit,
    )


def _down(policy: Policy, pool: PoolLoad, history: History, now: float) -> Decision:
    present = pool.replicas
    most = max(number for _, number in history.wanted)
    seen_seconds = now - (now if history.first_seen is None else history.first_seen)
    if most >= present or seen_seconds < policy.window_seconds:
        return Decision(replicas=present, reason=Reason.STABILIZING)
    if pool.draining > 0 or now - history.last_change < policy.cooldown_seconds:
        return Decision(replicas=present, reason=Reason.COOLING_DOWN)
    lowest = present - max(1, present // 4)
    limit = Limit.MINIMUM if most == policy.minimum else Limit.NOTHING
    return Decision(
        replicas=max(most, lowest),
        reason=Reason.SCALE_DOWN,
        limited_by=Limit.STEP if lowest > most else limit,
    )
