"""What scaling and draining are fed: the user's bounds, and the load as targets told it. Pure."""

import math
from collections import Counter

from ssd_operator.api.spec import Draft, ScalingMode, Sharing
from ssd_operator.children.names import cell_of, draft_cells
from ssd_operator.children.placement import effective_policy
from ssd_operator.observe.facts import PoolFact
from ssd_operator.observe.pod_state import is_scheduled, is_unschedulable, name_of
from ssd_operator.observe.snapshot import Census
from ssd_operator.policy.drain import Drains
from ssd_operator.policy.scaling import Policy, PoolLoad, TargetLoad

_NODE = "kubernetes.io/hostname"
"""The only topology that can be told without reading nodes."""


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


def drains_of(census: Census) -> Drains:
    """What the drains of this pass have to know."""
    sessions: Counter[str] = Counter()
    for (_, draft), link in census.links.items():
        sessions[draft] += link.sessions
    return Drains(
        facts=census.observed.drains,
        sessions=dict(sessions),
        misplaced=_misplaced(census),
        rolling=frozenset(filter(census.is_rolling_drafts, draft_cells(census.resource))),
        drain_seconds=census.resource.spec.draft.drain_seconds,
    )


def _misplaced(census: Census) -> frozenset[str]:
    """Drafts that must be beside their cell's target and are not, since the target moved."""
    spec = census.resource.spec
    is_bound = effective_policy(census.resource) == "Required"
    if not is_bound or spec.placement.topology_key != _NODE or spec.draft.sharing is Sharing.POOL:
        return frozenset()
    nodes = {cell_of(pod): pod["spec"]["nodeName"] for pod in census.targets if is_scheduled(pod)}
    return frozenset(
        name_of(pod)
        for pod in census.drafts
        if is_scheduled(pod)
        and nodes.get(cell_of(pod), pod["spec"]["nodeName"]) != pod["spec"]["nodeName"]
    )


def _load(fact: PoolFact | None, now: float) -> TargetLoad:
    if fact is None:
        return TargetLoad(age_seconds=math.inf, eligible=0.0)
    return TargetLoad(
        age_seconds=now - fact.at,
        eligible=fact.eligible_sequences,
        speculating=fact.speculating,
    )
