"""What one pass does about one resource. Pure."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object
from ssd_operator.children.manifests import wanted
from ssd_operator.children.objects import (
    COMPONENT_LABEL,
    ENGINES,
    Component,
    Workload,
    drafts_name,
)
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.pod_state import (
    condition_in,
    drain_deadline_of,
    is_orphan,
    is_owned_by,
    is_terminating,
    labels_of,
    name_of,
    revision_of,
    unready_deadline,
)
from ssd_operator.observe.snapshot import CLOCK_SECONDS, OLDEST_ANSWER_SECONDS, Snapshot
from ssd_operator.policy.apply_failures import ApplyFailure, DeferredCall, RepairLog, holding
from ssd_operator.policy.drain import DrainPlan, plan_drains
from ssd_operator.policy.rollout import (
    UNLINKED_SECONDS,
    AwaitedGateway,
    Preflight,
    awaited_gateway,
    held_drafts,
    held_targets,
    outdated_targets,
    preflight_state,
    stopped,
    unlinked_targets,
    waiting_targets,
    with_template_of,
)
from ssd_operator.policy.scaling import (
    DECISION_SECONDS,
    Decision,
    History,
    internal_scaling,
    measure,
    next_replicas,
)
from ssd_operator.policy.services import (
    differing,
    has_channel,
    keeps_ports,
    keeps_protocol,
    labels_fit,
    ports_of,
    protocols_of,
)
from ssd_operator.settings import OperatorSettings

FOREIGN_SECONDS = 10.0
"""Time until another owner's object is read again: no watch reports that its name is free."""
FORMER_SECONDS = 1.0
"""Time until a name is read again that a child of a former resource still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What one pass leaves to the next. Times are in seconds since the epoch.

    A restarted operator begins with an empty one: a pass is then slower, and still correct.
    """

    uid: str = ""
    """Uid of the resource."""
    passed_at: float = -math.inf
    """Begin of the latest pass."""
    began_at: float | None = None
    """First pass of this operator over the resource."""
    history: History = field(default_factory=History)
    failures: Mapping[Ref, ApplyFailure] = field(default_factory=dict)
    repairs: Mapping[Ref, RepairLog] = field(default_factory=dict)
    deferred_calls: Mapping[Ref, DeferredCall] = field(default_factory=dict)
    failing_since: float | None = None
    """First of the latest passes that were all interrupted by a call without an answer."""
    posted: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Times of Events, by reason and message."""
    written_at: float = -math.inf
    """Last write of the status."""
    pending: Mapping[str, float] = field(default_factory=dict)
    """Begin of changes of conditions that the status does not report yet, by type."""
    unlinked: Mapping[str, float] = field(default_factory=dict)
    """From ``unlinked_targets``."""
    waiting: Mapping[str, float] = field(default_factory=dict)
    """Since when targets of a pool have waited for a new draft, by target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """What to do, in the order of the fields, and what the report uses of it."""

    apply: tuple[Object, ...] = ()
    held: frozenset[Ref] = frozenset()
    """Objects that stay as they are until a preflight has passed, another cell or a new gateway is
    up, or a former target is gone."""
    drains: DrainPlan = field(default_factory=DrainPlan)
    """Drains, and pods to delete; its replicas are in ``apply``."""
    scale: Decision | None = None
    """Number of drafts to write to the resource."""
    delete: tuple[Ref, ...] = ()
    wanted: Mapping[Ref, Object] = field(default_factory=dict)
    """All objects, also those that wait."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Wanted revision of each Deployment's pods, by its name."""
    preflight: Preflight = field(default_factory=Preflight)
    waiting: Mapping[str, str] = field(default_factory=dict)
    """From ``waiting_targets``; the rollout of a pool's drafts is stopped unless it is empty."""
    gateway: AwaitedGateway = "None"
    """What targets that serve and are outdated wait for."""
    again_after: float = math.inf
    """Seconds until another pass is due without any change."""
    state: PlanState = field(default_factory=PlanState)

    @property
    def is_writing(self) -> bool:
        """Whether carrying this out changes anything in the cluster."""
        drains = any(drain.is_new for drain in self.drains.drains) or self.drains.delete_pods
        return bool(self.apply or drains or self.scale or self.delete)


def plan(snapshot: Snapshot, settings: OperatorSettings, state: PlanState) -> PassPlan:
    """Decide on everything but the status; ``state`` is of the pass before."""
    resource, state = snapshot.resource, remembered(state, snapshot.now)
    state = replace(state, began_at=snapshot.now if state.began_at is None else state.began_at)
    state = replace(state, unlinked=unlinked_targets(snapshot, state.unlinked))
    waiting = waiting_targets(snapshot, state.unlinked, state.waiting)
    since = {target: state.waiting.get(target, snapshot.now) for target in waiting}
    state = replace(state, waiting=since)
    is_stopped = bool(waiting) or _keeps_stop(snapshot, state)
    drains = plan_drains(snapshot, is_stopped=is_stopped)
    objects = wanted(
        resource,
        settings,
        drains.replicas,
        selects_engine=labels_fit(snapshot),
        opens_channel=has_channel(snapshot),
    )
    if snapshot.gateway_services_lost:
        objects = [child for child in objects if not _is_gateway(child)]
    deployments = [child for child in objects if child["kind"] == "Deployment"]
    targets, drafts = (
        [child for child in deployments if labels_of(child).get(COMPONENT_LABEL) == component]
        for component in ENGINES
    )
    if is_stopped:
        objects = [stopped(child) if child in drafts else child for child in objects]
    failures = holding(state.failures, targets, snapshot)
    # An apply would not change a contested template.
    outdated = [
        target
        for target in outdated_targets(targets, snapshot)
        if (failure := failures.get(ref_of(target))) is None or not failure.is_of_template
    ]
    pods = Workload(resource=resource, settings=settings, component=Component.PREFLIGHT)
    preflight = preflight_state(pods, targets, outdated, snapshot, state.failures)
    objects += [] if preflight.pod is None else [preflight.pod]
    state = replace(state, failures=holding(state.failures, objects, snapshot))
    revisions = {name_of(deployment): revision_of(deployment) for deployment in deployments}
    by_ref = {ref_of(child): child for child in objects}
    if resource.spec.paused:
        return PassPlan(wanted=by_ref, revisions=revisions, preflight=preflight, state=state)
    state = replace(state, history=_decide(snapshot, state))
    decision, is_new = state.history.decision, state.history.decided_at == snapshot.now
    is_changed = decision is not None and decision.replicas != snapshot.num_drafts_wanted
    gateways = next(filter(_is_gateway, objects), None)
    gateway = awaited_gateway(gateways, targets, outdated, snapshot)
    targets_held = held_targets(targets, outdated, snapshot, preflight.stage, gateway)
    drafts_held = held_drafts(drafts, targets, snapshot, targets_held, preflight.stage)
    keeps_engine = keeps_ports(targets, snapshot, targets_held)
    held = targets_held
    if keeps_engine:
        held |= differing(objects, snapshot, ports_of)
    if keeps_protocol(targets, snapshot, targets_held):
        held |= differing(objects, snapshot, protocols_of)
    kept = {Component.DRAFT} if _refers_elsewhere(targets, snapshot) else set()
    # Gateways call the ports that the Services keep. One without its Service is removed.
    kept |= {Component.GATEWAY} if keeps_engine and not snapshot.gateway_services_lost else set()
    return PassPlan(
        apply=tuple(_to_apply(objects, held, drafts_held, snapshot, state)),
        held=held,
        drains=drains,
        scale=decision if is_new and is_changed else None,
        delete=tuple(_to_delete(by_ref, snapshot, kept)),
        wanted=by_ref,
        revisions=revisions,
        preflight=preflight,
        waiting=waiting,
        gateway=gateway,
        again_after=min(preflight.again_after, *_waits(snapshot, state)),
        state=state,
    )


def remembered(state: PlanState, now: float) -> PlanState:
    """What a pass uses of the pass before: nothing if the clock has been set back since.

    All its times would be in the future, and every wait would last until the clock reaches them.
    """
    is_set_back = now < state.passed_at - CLOCK_SECONDS
    return replace(PlanState(uid=state.uid) if is_set_back else state, passed_at=now)


def _to_apply(
    objects: Iterable[Object],
    held: frozenset[Ref],
    drafts_held: frozenset[Ref],
    snapshot: Snapshot,
    state: PlanState,
) -> Iterator[Object]:
    """The objects that are sent to the API server in this pass."""
    contested = {
        ref: failure for ref, failure in state.failures.items() if failure.cause == "Contested"
    }
    failed = state.failures.keys() - contested.keys()
    skipped = held | snapshot.foreign.keys() | snapshot.former | failed
    # The number of pods follows the resource also while their template waits.
    waiting = drafts_held | {ref for ref, failure in contested.items() if failure.is_of_template}
    for child in objects:
        ref = ref_of(child)
        if ref in skipped:
            continue
        live = snapshot.children.get(ref) if ref in waiting else None
        sent = child if live is None else with_template_of(live, child)
        if _is_needed(sent, snapshot, contested):
            yield sent


def _to_delete(
    wanted_refs: Container[Ref], snapshot: Snapshot, kept: Container[str]
) -> Iterator[Ref]:
    """The children that are not wanted any more, without children of ``kept`` components."""
    for ref, child in sorted(snapshot.children.items()):
        # A person's copy of a child has our labels, but neither our owner nor the name of a child.
        is_ours = is_owned_by(child, snapshot.resource.uid) or is_orphan(child)
        is_kept = labels_of(child).get(COMPONENT_LABEL) in kept
        if ref not in wanted_refs and is_ours and not is_terminating(child) and not is_kept:
            yield ref


def _refers_elsewhere(targets: Iterable[Object], snapshot: Snapshot) -> bool:
    """Whether a target still has a template that refers to other drafts than it is to have.

    Its apply may wait, or be refused in this pass, so its drafts are deleted in a later one.
    """
    return any(
        not _drafts_of(target).items() <= _drafts_of(live).items()
        for target in targets
        if (live := snapshot.children.get(ref_of(target))) is not None
    )


def _drafts_of(target: Object) -> dict[str, object]:
    """By container of a Deployment of targets, what names its drafts: arguments and a variable."""
    return {
        container["name"]: (
            container.get("args"),
            [each for each in container.get("env") or () if each["name"] == "SSD_TARGET_DRAFTS"],
        )
        for container in target["spec"]["template"]["spec"]["containers"]
    }


def _keeps_stop(snapshot: Snapshot, state: PlanState) -> bool:
    """Whether a restarted operator keeps the rollout of a pool stopped until targets answer it."""
    live = snapshot.children.get(Ref("Deployment", drafts_name(snapshot.resource, 0)))
    is_paused = live is not None and bool(live["spec"].get("paused"))
    is_unanswered = unanswered_seconds(snapshot, state.began_at) > 0.0
    return snapshot.resource.is_pool and is_paused and is_unanswered


def unanswered_seconds(snapshot: Snapshot, began_at: float | None) -> float:
    """How long a restarted operator keeps the present status and number of drafts.

    They come from answers of targets, some of which have not answered this operator yet. A target
    that is new in the status is not waited for.
    """
    status = snapshot.status
    is_scaled = internal_scaling(snapshot.resource) is not None
    serving = {name_of(pod) for pod in snapshot.ready_targets}
    awaited = {link["target"] for link in status.get("links") or []}
    if is_scaled and condition_in(status, "ScalingActive").get("status") == "True":
        awaited = serving
    if not awaited & serving - snapshot.pools.keys():
        return 0.0
    began_at = snapshot.now if began_at is None else began_at
    return max(began_at + OLDEST_ANSWER_SECONDS - snapshot.now, 0.0)


def _decide(snapshot: Snapshot, state: PlanState) -> History:
    """Run the Internal loop, if it is on and due."""
    bounds = internal_scaling(snapshot.resource)
    if bounds is None:
        return History()
    is_early = snapshot.now - state.history.decided_at < DECISION_SECONDS
    if is_early or unanswered_seconds(snapshot, state.began_at) > 0:
        return state.history
    return next_replicas(bounds, measure(snapshot), state.history, snapshot.now)


def _is_needed(sent: Object, snapshot: Snapshot, contested: Mapping[Ref, ApplyFailure]) -> bool:
    live = snapshot.children.get(ref := ref_of(sent))
    if live is None:
        # While another owner has a wanted name, nothing new is created, because no client could
        # reach it. A gateway starts after its Services: until then, their names could lead to the
        # pods of another owner.
        has_services = snapshot.gateway_services <= snapshot.children.keys()
        return not snapshot.foreign and (has_services or not _is_gateway(sent))
    unrepaired = contested[ref].paths if ref in contested else frozenset()
    is_different = not differences(live, sent) <= unrepaired
    return is_different and not is_terminating(live)


def _is_gateway(child: Object) -> bool:
    """Whether an object is the Deployment of the gateways."""
    component = child["metadata"]["labels"].get(COMPONENT_LABEL)
    return (child["kind"], component) == ("Deployment", Component.GATEWAY)


def _waits(snapshot: Snapshot, state: PlanState) -> list[float]:
    """Seconds until a pass is due that no watch triggers."""
    waits = [failure.retry_at - snapshot.now for failure in state.failures.values()]
    if state.history.decision is not None:
        due = state.history.decided_at + DECISION_SECONDS - snapshot.now
        waits.append(max(due, unanswered_seconds(snapshot, state.began_at)))
    if _keeps_stop(snapshot, state):
        waits.append(unanswered_seconds(snapshot, state.began_at))
    drain_ends = (drain_deadline_of(pod) for pod in snapshot.drafts)
    waits += [end - snapshot.now for end in drain_ends if end is not None and end > snapshot.now]
    broken_at = (unready_deadline(pod, snapshot.now) for pod in snapshot.targets)
    waits += [end - snapshot.now for end in broken_at if end is not None]
    since = (*state.unlinked.values(), *state.waiting.values())
    waits += [
        end - snapshot.now for begin in since if (end := begin + UNLINKED_SECONDS) > snapshot.now
    ]
    if snapshot.former:
        waits.append(FORMER_SECONDS)
    if snapshot.foreign:
        waits.append(FOREIGN_SECONDS)
    return [*waits, math.inf]
