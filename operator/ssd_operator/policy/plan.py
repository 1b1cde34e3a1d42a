"""What one pass does about one resource: a value, made from values. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import KIND, Object, Resource, drafts_of_cell
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
from ssd_operator.observe.facts import DrainFact, Observed, Ref
from ssd_operator.observe.pod_state import is_leaving, name_of
from ssd_operator.observe.snapshot import OLDEST_ANSWER_SECONDS, Planned, Snapshot
from ssd_operator.policy.apply_failures import (
    Rejection,
    Reversion,
    reversion_events,
    standing,
    still_refused,
    still_valid,
)
from ssd_operator.policy.demand import drains_of, policy_of, pool_load
from ssd_operator.policy.drain import DrainPlan, deadline_of, plan_drains
from ssd_operator.policy.preflight import Preflight, preflight
from ssd_operator.policy.rollout import Stage, held_drafts, held_targets, with_template_of
from ssd_operator.policy.scaling import Decision, History, next_replicas
from ssd_operator.status.events import (
    Event,
    EventLog,
    drain_events,
    due,
    release_events,
    status_events,
)
from ssd_operator.status.speculating import HOLD_SECONDS, unlinked_since
from ssd_operator.status.status import status_of
from ssd_operator.status.status_change import SHORTEST_SECONDS, needs_write

DECISION_SECONDS = 10.0
"""Between two decisions of the Internal loop."""
FOREIGN_SECONDS = 10.0
"""Until a name is asked for again that somebody else has; no watch tells when it is free."""
LEAVING_SECONDS = 1.0
"""Until a name is asked for again that a former child still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one pass leaves to the next; an operator that starts anew may do without."""

    began_at: float | None = None
    """When this operator looked at the resource first."""
    history: History = field(default_factory=History)
    decision: Decision | None = None
    decided_at: float = -math.inf
    told: EventLog = field(default_factory=EventLog)
    drains: Mapping[str, DrainFact] = field(default_factory=dict)
    written_at: float = -math.inf
    """When the status was written last."""
    unlinked_since: float | None = None
    """Begin of a loss of links that may pass."""
    rejected: Mapping[Ref, Rejection] = field(default_factory=dict)
    reverted: Mapping[Ref, Reversion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of the fields."""

    apply: tuple[Object, ...] = ()
    adopt: tuple[Object, ...] = ()
    """Pods that their ReplicaSets have let go."""
    drains: DrainPlan = field(default_factory=DrainPlan)
    """Marks, calls and pods to delete; its replicas are in ``apply``."""
    scale: Decision | None = None
    """Number of drafts to write to the resource."""
    delete: tuple[Ref, ...] = ()
    status: Object | None = None
    """To be written; None if the present one will do."""
    judged: Object = field(default_factory=dict)
    """The status as this pass finds it, written or not."""
    events: tuple[Event, ...] = ()
    missing: tuple[Ref, ...] = ()
    """What is wanted and not seen: somebody else may have the name."""
    again_after: float = math.inf
    """Seconds until time alone asks for another pass."""
    memory: Memory = field(default_factory=Memory)

    @property
    def is_writing(self) -> bool:
        """Whether carrying this out changes anything in the cluster."""
        drains = self.drains.marks or self.drains.delete_pods
        return bool(self.apply or self.adopt or drains or self.scale or self.delete or self.status)


def plan(
    resource: Resource, observed: Observed, config: OperatorConfig, memory: Memory, now: float
) -> Plan:
    """Decide on everything.

    Args:
        resource: what the user asked for.
        observed: the snapshot of this pass.
        config: of the installation.
        memory: what the last pass left.
        now: seconds since the epoch.

    Returns:
        The plan; its memory holds if all of it is carried out.
    """
    snapshot = Snapshot(resource=resource, observed=observed, planned=Planned(), now=now)
    drains = _plan_drains(snapshot)
    objects = _served(wanted(resource, config, drains.replicas), observed)
    factory = ChildFactory(resource=resource, config=config)
    known = still_valid(memory.reverted, objects, resource.generation, now)
    observed = replace(observed, reverted=standing(known, observed.children))
    flight = preflight(factory, _targets(objects), observed, now)
    objects += flight.children
    rejected = still_valid(memory.rejected, objects, resource.generation, now)
    memory = replace(
        memory,
        began_at=now if memory.began_at is None else memory.began_at,
        rejected=still_refused(rejected, observed.children),
        reverted=still_valid(memory.reverted, objects, resource.generation, now),
    )
    flight = flight.heeding({ref: each.message for ref, each in memory.rejected.items()})
    if resource.spec.paused:
        judged = _judge(snapshot, objects, flight, memory, apply=(), is_scaling=False)
        missing = _missing([each for each in objects if each["kind"] != "Pod"], observed, memory)
        return replace(_telling(judged, judged.events, now), missing=missing)
    memory = _decide(snapshot, memory)
    is_scaling = _is_scaling(snapshot, memory)
    apply = _to_apply(objects, observed, flight.stage, memory)
    judged = _judge(snapshot, objects, flight, memory, apply=apply, is_scaling=is_scaling)
    told = drain_events(drains, memory.drains, observed.drains)
    told += release_events(observed.released)
    told = (*told, *reversion_events(memory.reverted), *judged.events)
    judged = _telling(judged, told, now)
    return replace(
        judged,
        apply=apply,
        adopt=observed.released,
        drains=drains,
        scale=memory.decision if is_scaling else None,
        delete=_surplus(resource, objects, observed),
        missing=_missing(objects, observed, memory),
        again_after=min(judged.again_after, flight.again_after, *_waits(snapshot, judged.memory)),
        memory=replace(
            judged.memory,
            drains=dict(observed.drains),
            reverted={ref: replace(each, is_told=True) for ref, each in memory.reverted.items()},
        ),
    )


def _telling(judged: Plan, events: Iterable[Event], now: float) -> Plan:
    """The plan with those of these events that were not told lately."""
    fresh, log = due(events, judged.memory.told, now)
    return replace(judged, events=fresh, memory=replace(judged.memory, told=log))


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
    """Without the kinds that the cluster does not know; the status tells of those."""
    absent = OPTIONAL_KINDS - observed.optional_apis
    return [each for each in objects if each["kind"] not in absent]


def _decide(snapshot: Snapshot, memory: Memory) -> Memory:
    """Let the Internal loop decide, if it is on and due."""
    policy = policy_of(snapshot.resource.spec.draft)
    if policy is None:
        return replace(memory, history=History(), decision=None, decided_at=-math.inf)
    is_early = snapshot.now - memory.decided_at < DECISION_SECONDS
    if is_early or _blind_seconds(snapshot, memory) > 0:
        return memory
    decision, history = next_replicas(policy, pool_load(snapshot), memory.history, snapshot.now)
    return replace(memory, decision=decision, history=history, decided_at=snapshot.now)


def _is_scaling(snapshot: Snapshot, memory: Memory) -> bool:
    """Whether a decision was made just now, is not the present number, and can be written."""
    decision, is_new = memory.decision, memory.decided_at == snapshot.now
    is_kept = (
        snapshot.observed.is_cut_short or _resource_ref(snapshot) in snapshot.observed.forbidden
    )
    is_other = decision is not None and decision.replicas != snapshot.num_drafts_wanted
    return is_new and is_other and not is_kept


def _resource_ref(snapshot: Snapshot) -> Ref:
    return Ref(KIND, snapshot.resource.name)


def _judge(
    snapshot: Snapshot,
    objects: Sequence[Object],
    flight: Preflight,
    memory: Memory,
    *,
    apply: Sequence[Object],
    is_scaling: bool,
) -> Plan:
    """What the status has to say, and the events that its step from the old one tells."""
    resource, now, old = snapshot.resource, snapshot.now, snapshot.observed.status
    if (blind_seconds := _blind_seconds(snapshot, memory)) > 0:
        return Plan(judged=old, memory=memory, again_after=blind_seconds)
    lost_at = unlinked_since(snapshot, memory.unlinked_since)
    memory = replace(memory, unlinked_since=lost_at)
    planned = Planned(
        unlinked_since=lost_at,
        revisions={name_of(each): revision_of(each) for each in objects if _is_engine(each)},
        decision=memory.decision,
        is_scaling=is_scaling,
        preflight=flight,
        makes=_made(apply, snapshot.observed),
    )
    # What may pass is no fault of the resource.
    rejected = {
        ref: rejection.message
        for ref, rejection in memory.rejected.items()
        if not rejection.may_pass
    }
    status = status_of(resource, replace(snapshot.observed, rejected=rejected), planned, now)
    age = now - memory.written_at
    if needs_write(old, status, age):
        memory = replace(memory, written_at=now)
        events = status_events(old, status)
        return Plan(status=status, judged=status, events=events, memory=memory)
    is_postponed = needs_write(old, status, max(age, SHORTEST_SECONDS))
    wait = SHORTEST_SECONDS - age if is_postponed else math.inf
    return Plan(judged=status, memory=memory, again_after=max(wait, 0.0))


def _blind_seconds(snapshot: Snapshot, memory: Memory) -> float:
    """How long the present status may know better than an operator that has just started.

    Until a target has answered it, its links would seem to be gone, and its load unknown.
    """
    known = {link["target"] for link in snapshot.observed.status.get("links") or []}
    serving = {name_of(pod) for pod in snapshot.ready_targets}
    if policy_of(snapshot.resource.spec.draft) is not None and _was_scaling(
        snapshot.observed.status
    ):
        known = serving
    if not known & serving - snapshot.observed.pools.keys():
        return 0.0
    began_at = snapshot.now if memory.began_at is None else memory.began_at
    return began_at + OLDEST_ANSWER_SECONDS - snapshot.now


def _was_scaling(status: Object) -> bool:
    conditions = status.get("conditions") or []
    return any((each["type"], each["status"]) == ("ScalingActive", "True") for each in conditions)


def _is_engine(child: Object) -> bool:
    return bool(child["kind"] == "Deployment")


def _targets(objects: Sequence[Object]) -> list[Object]:
    """Target Deployments, by cell."""
    return _engines(objects, Component.TARGET)


def _engines(objects: Sequence[Object], component: Component) -> list[Object]:
    return [
        each
        for each in objects
        if _is_engine(each) and each["metadata"]["labels"].get(COMPONENT_LABEL) == str(component)
    ]


def _to_apply(
    objects: Sequence[Object], observed: Observed, stage: Stage, memory: Memory
) -> tuple[Object, ...]:
    targets, drafts = _targets(objects), _engines(objects, Component.DRAFT)
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


def _made(apply: Sequence[Object], observed: Observed) -> frozenset[Ref]:
    """What will be there after this pass, if nothing is known to be in the way."""
    if observed.is_cut_short:
        return frozenset()
    return frozenset(map(ref_of, apply)) - observed.forbidden.keys()


def _missing(objects: Sequence[Object], observed: Observed, memory: Memory) -> tuple[Ref, ...]:
    refs = map(ref_of, objects)
    known = observed.children.keys() | memory.rejected.keys()
    return tuple(ref for ref in refs if ref not in known)


def _surplus(resource: Resource, objects: Sequence[Object], observed: Observed) -> tuple[Ref, ...]:
    """Children that are not wanted; a copy that a person made of one has our labels only."""
    kept = {ref_of(each) for each in objects}
    return tuple(
        ref
        for ref, child in sorted(observed.children.items())
        if ref not in kept and not is_leaving(child) and is_owned_by(child, resource.uid)
    )


def _waits(snapshot: Snapshot, memory: Memory) -> list[float]:
    """Seconds until something is due that no event announces."""
    waits = [math.inf]
    if memory.unlinked_since is not None and memory.unlinked_since + HOLD_SECONDS > snapshot.now:
        waits.append(memory.unlinked_since + HOLD_SECONDS - snapshot.now)
    if memory.decision is not None:
        due = memory.decided_at + DECISION_SECONDS - snapshot.now
        waits.append(max(due, _blind_seconds(snapshot, memory)))
    waits += [each.retry_at - snapshot.now for each in memory.rejected.values()]
    deadlines = [deadline_of(pod) for pod in snapshot.drafts]
    waits += [each - snapshot.now for each in deadlines if each is not None and each > snapshot.now]
    if snapshot.observed.leaving:
        waits.append(LEAVING_SECONDS)
    if snapshot.observed.foreign:
        waits.append(FOREIGN_SECONDS)
    return waits
