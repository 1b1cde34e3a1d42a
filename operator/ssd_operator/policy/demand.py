"""What scaling and draining are fed: the user's bounds, and the load as targets told it. Pure."""

import math
from collections import Counter

from ssd_operator.api.spec import Draft, ScalingMode, Sharing
from ssd_operator.children.names import cell_of, draft_cells
from ssd_operator.children.placement import effective_policy
from ssd_operator.observe.facts import PoolFact
from ssd_operator.observe.pod_state import is_scheduled, is_unschedulable, name_of
from ssd_operator.policy.drain import Drains
from ssd_operator.policy.scaling import Policy, PoolLoad, TargetLoad
from ssd_operator.policy.snapshot import Snapshot

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
        occupancy=float(autoscaling.target_occupancy),
        window_seconds=autoscaling.scale_down_stabilization_seconds,
        cooldown_seconds=autoscaling.cooldown_seconds,
        default_capacity=draft.sequences_per_replica,
    )


def pool_load(snapshot: Snapshot) -> PoolLoad:
    """The load of all ready targets; a draft that several measured has the least of its values."""
    capacities: dict[str, int] = {}
    for (_, draft), link in snapshot.links.items():
        if link.state == "Active":
            capacities[draft] = min(
                link.sustainable_sessions, capacities.get(draft, link.sustainable_sessions)
            )
    pools = snapshot.observed.pools
    return PoolLoad(
        replicas=snapshot.num_drafts_wanted,
        unschedulable=sum(is_unschedulable(pod) for pod in snapshot.staying_drafts),
        draining=snapshot.num_draining,
        targets=tuple(
            _load(pools.get(name_of(pod)), snapshot.now) for pod in snapshot.ready_targets
        ),
        capacities=capacities,
    )


def drains_of(snapshot: Snapshot) -> Drains:
    """What the drains of this pass have to know."""
    sessions: Counter[str] = Counter()
    for (_, draft), link in snapshot.links.items():
        sessions[draft] += link.sessions
    return Drains(
        facts=snapshot.observed.drains,
        sessions=dict(sessions),
        misplaced=_misplaced(snapshot),
        rolling=frozenset(filter(snapshot.is_rolling_drafts, draft_cells(snapshot.resource))),
        drain_seconds=snapshot.resource.spec.draft.drain_seconds,
    )


def _misplaced(snapshot: Snapshot) -> frozenset[str]:
    """Drafts that must be beside their cell's target and are not, since the target moved."""
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


def _load(fact: PoolFact | None, now: float) -> TargetLoad:
    if fact is None:
        return TargetLoad(age_seconds=math.inf, eligible=0.0)
    return TargetLoad(
        age_seconds=now - fact.at,
        eligible=fact.eligible_sequences,
        speculating=fact.speculating,
    )
