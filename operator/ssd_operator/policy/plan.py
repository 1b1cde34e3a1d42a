"""What one pass does about one resource: a value, made from values. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object, Resource, drafts_of_cell
from ssd_operator.children.config import OperatorConfig
from ssd_operator.children.manifests import OPTIONAL_KINDS, wanted
from ssd_operator.children.names import (
    COMPONENT_LABEL,
    Component,
    cell_of,
    draft_cells,
    draft_deployment,
    revision_of,
)
from ssd_operator.children.objects import ChildFactory
from ssd_operator.observe.cluster import is_owned_by, ref_of
from ssd_operator.observe.diff import covers
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.pod_state import is_leaving, name_of
from ssd_operator.policy.apply_failures import (
    Rejection,
    Reversion,
    standing,
    still_refused,
    still_valid,
)
from ssd_operator.policy.demand import drains_of, policy_of, pool_load
from ssd_operator.policy.drain import DrainPlan, deadline_of, plan_drains
from ssd_operator.policy.preflight import Preflight, preflight
from ssd_operator.policy.rollout import Stage, held_drafts, held_targets, with_template_of
from ssd_operator.policy.scaling import Decision, History, next_replicas
from ssd_operator.policy.snapshot import OLDEST_ANSWER_SECONDS, Planned, Snapshot

DECISION_SECONDS = 10.0
"""Between two decisions of the Internal loop."""
FOREIGN_SECONDS = 10.0
"""Until a name of somebody else's object is read again. No watch reports when it is free."""
LEAVING_SECONDS = 1.0
"""Until a name is read again that a child of a former resource still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one pass leaves to the next. An operator that has just started does without."""

    began_at: float | None = None
    """When this operator looked at the resource first."""
    history: History = field(default_factory=History)
    decision: Decision | None = None
    decided_at: float = -math.inf
    rejected: Mapping[Ref, Rejection] = field(default_factory=dict)
    reverted: Mapping[Ref, Reversion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of the fields, and what the report needs to know of it."""

    apply: tuple[Object, ...] = ()
    adopt: tuple[Object, ...] = ()
    """Pods that their ReplicaSets have released."""
    drains: DrainPlan = field(default_factory=DrainPlan)
    """Marks, calls and pods to delete; its replicas are in ``apply``."""
    scale: Decision | None = None
    """Number of drafts to write to the resource."""
    delete: tuple[Ref, ...] = ()
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Revision wanted of each Deployment's pods, by its name."""
    preflight: Preflight = field(default_factory=Preflight)
    again_after: float = math.inf
    """Seconds until time alone asks for another pass."""
    memory: Memory = field(default_factory=Memory)

    @property
    def is_writing(self) -> bool:
        """Whether carrying this out changes anything in the cluster."""
        drains = self.drains.marks or self.drains.delete_pods
        return bool(self.apply or self.adopt or drains or self.scale or self.delete)


def plan(
    resource: Resource, observed: Observed, config: OperatorConfig, memory: Memory, now: float
) -> Plan:
    """Decide on everything but the status.

    Args:
        resource: what the user asked for.
        observed: the snapshot of this pass, names included.
        config: of the installation.
        memory: of the pass before.
        now: seconds since the epoch.
    """
    snapshot = Snapshot(resource=resource, observed=observed, planned=Planned(), now=now)
    drains = _plan_drains(snapshot)
    objects = _served(wanted(resource, config, drains.replicas), observed)
    factory = ChildFactory(resource=resource, config=config)
    known = still_valid(memory.reverted, objects, resource.generation, now)
    observed = replace(observed, reverted=standing(known, observed.children))
    flight = preflight(factory, _engines(objects, Component.TARGET), observed, now)
    objects += flight.children
    rejected = still_valid(memory.rejected, objects, resource.generation, now)
    memory = replace(
        memory,
        began_at=now if memory.began_at is None else memory.began_at,
        rejected=still_refused(rejected, observed.children),
        reverted=still_valid(memory.reverted, objects, resource.generation, now),
    )
    flight = flight.heeding({ref: each.message for ref, each in memory.rejected.items()})
    revisions = {name_of(each): revision_of(each) for each in objects if _is_engine(each)}
    if resource.spec.paused:
        return Plan(revisions=revisions, preflight=flight, memory=memory)
    memory = _decide(snapshot, memory)
    return Plan(
        apply=_to_apply(objects, observed, flight.stage, memory),
        adopt=observed.released,
        drains=drains,
        scale=memory.decision if _is_scaling(snapshot, memory) else None,
        delete=_surplus(resource, objects, observed),
        revisions=revisions,
        preflight=flight,
        again_after=min(flight.again_after, *_waits(snapshot, memory)),
        memory=memory,
    )


def unanswered_seconds(snapshot: Snapshot, began_at: float | None) -> float:
    """How long the present status may be more accurate than an operator that has just started.

    Until a target has answered it, the target's links would seem to be gone and its load unknown.

    Args:
        snapshot: of this pass.
        began_at: when this operator looked at the resource first; None for now.
    """
    known = {link["target"] for link in snapshot.observed.status.get("links") or []}
    serving = {name_of(pod) for pod in snapshot.ready_targets}
    if policy_of(snapshot.resource.spec.draft) is not None and _was_scaling(
        snapshot.observed.status
    ):
        known = serving
    if not known & serving - snapshot.observed.pools.keys():
        return 0.0
    began_at = snapshot.now if began_at is None else began_at
    return max(began_at + OLDEST_ANSWER_SECONDS - snapshot.now, 0.0)


def _was_scaling(status: Object) -> bool:
    conditions = status.get("conditions") or []
    return any((each["type"], each["status"]) == ("ScalingActive", "True") for each in conditions)


def _plan_drains(snapshot: Snapshot) -> DrainPlan:
    resource, children = snapshot.resource, snapshot.observed.children
    cells = draft_cells(resource)
    number = snapshot.num_drafts_wanted
    deployments = {
        cell: int(children[ref]["spec"]["replicas"])
        for cell in cells
        if (ref := Ref("Deployment", draft_deployment(resource, cell))) in children
    }
    pods: dict[int, list[Object]] = {}
    for pod in snapshot.drafts:
        pods.setdefault(cell_of(pod), []).append(pod)
    return plan_drains(
        {cell: drafts_of_cell(number, len(cells), cell) for cell in cells},
        deployments,
        {cell: pods.get(cell, []) for cell in cells},
        drains_of(snapshot),
        snapshot.now,
    )


def _served(objects: Sequence[Object], observed: Observed) -> list[Object]:
    """Without the kinds that the cluster does not serve; the status reports those."""
    absent = OPTIONAL_KINDS - observed.optional_apis
    return [each for each in objects if each["kind"] not in absent]


def _decide(snapshot: Snapshot, memory: Memory) -> Memory:
    """Let the Internal loop decide, if it is on and due."""
    policy = policy_of(snapshot.resource.spec.draft)
    if policy is None:
        return replace(memory, history=History(), decision=None, decided_at=-math.inf)
    is_early = snapshot.now - memory.decided_at < DECISION_SECONDS
    if is_early or unanswered_seconds(snapshot, memory.began_at) > 0:
        return memory
    decision, history = next_replicas(policy, pool_load(snapshot), memory.history, snapshot.now)
    return replace(memory, decision=decision, history=history, decided_at=snapshot.now)


def _is_scaling(snapshot: Snapshot, memory: Memory) -> bool:
    """Whether a decision was made just now and is not the present number."""
    decision, is_new = memory.decision, memory.decided_at == snapshot.now
    return is_new and decision is not None and decision.replicas != snapshot.num_drafts_wanted


def _is_engine(child: Object) -> bool:
    return bool(child["kind"] == "Deployment")


def _engines(objects: Sequence[Object], component: Component) -> list[Object]:
    """Deployments of a component, by cell."""
    return [
        each
        for each in objects
        if _is_engine(each) and each["metadata"]["labels"].get(COMPONENT_LABEL) == str(component)
    ]


def _to_apply(
    objects: Sequence[Object], observed: Observed, stage: Stage, memory: Memory
) -> tuple[Object, ...]:
    targets, drafts = (_engines(objects, each) for each in (Component.TARGET, Component.DRAFT))
    held = held_targets(targets, observed, stage)
    kept = held_drafts(drafts, targets, observed, held, stage)
    reverted = standing(memory.reverted, observed.children)
    skipped = held | reverted | observed.foreign | observed.leaving | memory.rejected.keys()
    allowed = [
        # Their number follows the resource also while their template waits.
        with_template_of(observed.children[ref], each)
        if (ref := ref_of(each)) in kept & observed.children.keys()
        else each
        for each in objects
        if ref_of(each) not in skipped
    ]
    return tuple(each for each in allowed if _is_needed(each, observed))


def _is_needed(wanted_object: Object, observed: Observed) -> bool:
    live = observed.children.get(ref_of(wanted_object))
    if live is None:
        # Half a deployment beside somebody else's Service would serve nobody.
        return not observed.foreign
    return not is_leaving(live) and not covers(live, wanted_object)


def _surplus(resource: Resource, objects: Sequence[Object], observed: Observed) -> tuple[Ref, ...]:
    """Children that are not wanted; a person's copy of one has our labels, but not our owner."""
    kept = {ref_of(each) for each in objects}
    return tuple(
        ref
        for ref, child in sorted(observed.children.items())
        if ref not in kept and not is_leaving(child) and is_owned_by(child, resource.uid)
    )


def _waits(snapshot: Snapshot, memory: Memory) -> list[float]:
    """Seconds until something is due that no event announces."""
    waits = [math.inf]
    if memory.decision is not None:
        due = memory.decided_at + DECISION_SECONDS - snapshot.now
        waits.append(max(due, unanswered_seconds(snapshot, memory.began_at)))
    waits += [each.retry_at - snapshot.now for each in memory.rejected.values()]
    deadlines = [deadline_of(pod) for pod in snapshot.drafts]
    waits += [each - snapshot.now for each in deadlines if each is not None and each > snapshot.now]
    if snapshot.observed.leaving:
        waits.append(LEAVING_SECONDS)
    if snapshot.observed.foreign:
        waits.append(FOREIGN_SECONDS)
    return waits
