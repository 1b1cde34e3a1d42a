"""What the scaling loop is fed: the user's bounds, and the load as targets told it. Pure."""

import math

from ssd_operator.census import Census
from ssd_operator.facts import PoolFact
from ssd_operator.pod_state import is_unschedulable, name_of
from ssd_operator.scaling import Policy, PoolLoad, TargetLoad
from ssd_operator.spec import Draft, ScalingMode


def policy_of(draft: Draft) -> Policy | None:
    """Policy of the Internal loop; None if another, or nobody, writes the number."""
    autoscaling = draft.autoscaling
    if autoscaling is None or autoscaling.mode is not ScalingMode.INTERNAL:
        return None
    return Policy(
        minimum=autoscaling.min_replicas,
        maximum=autoscaling.max_replicas,
        occupancy=autoscaling.target_occupancy,
        window_seconds=autoscaling.scale_down_stabilization_seconds,
        cooldown_seconds=autoscaling.cooldown_seconds,
        default_capacity=draft.sequences_per_replica,
    )


def pool_load(census: Census) -> PoolLoad:
    """The load of all ready targets; a draft that several measured has the least of its values."""
    capacities: dict[str, int] = {}
    for (_, draft), link in census.links.items():
        if link.state == "Active":
            capacities[draft] = min(link.capacity, capacities.get(draft, link.capacity))
    pools = census.observed.pools
    return PoolLoad(
        replicas=census.num_drafts_wanted,
        unschedulable=sum(is_unschedulable(pod) for pod in census.staying_drafts),
        draining=census.num_draining,
        targets=tuple(_load(pools.get(name_of(pod)), census.now) for pod in census.ready_targets),
        capacities=capacities,
    )


def _load(fact: PoolFact | None, now: float) -> TargetLoad:
    if fact is None:
        return TargetLoad(age_seconds=math.inf, eligible=0.0)
    return TargetLoad(age_seconds=now - fact.at, eligible=fact.running)
