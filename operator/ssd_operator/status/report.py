"""What a pass reports of a resource: its status, and the Events of its changes. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ssd_operator.api.spec import API_VERSION, Object
from ssd_operator.children.objects import OPERATOR, digest
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.diagnosis import mounting_deadline
from ssd_operator.observe.pod_state import condition_in, to_text
from ssd_operator.policy.apply_failures import ApplyFailure
from ssd_operator.policy.drain import DrainPlan
from ssd_operator.policy.plan import PlanState, remembered, unanswered_seconds
from ssd_operator.status.condition_rules import HOLD_SECONDS, TYPES, pending
from ssd_operator.status.pass_result import LONGEST_MESSAGE, PassResult
from ssd_operator.status.pod_rules import USUAL, overdue_at
from ssd_operator.status.status import ROUND_TRIP, status_of, status_of_deleted, status_of_invalid

SHORTEST_SECONDS = 1.0
"""Time between any two writes of one status."""
MEASUREMENT_SECONDS = 60.0
"""Time between two writes only because of measured values."""
Log = Mapping[tuple[str, str], float]
"""Times of Events, by reason and message."""
QUIET_SECONDS = 600.0
"""The same Event of a resource is posted once in this time."""
_VARYING = ("Internal", "TargetUnreachable")
"""Reasons of conditions whose messages may change in each pass."""
_WARNED = (
    "TargetReady",
    "DraftReady",
    "DraftCapacity",
    "Progressing",
    "SpecValid",
    "ResourcesOwned",
)
"""Conditions that post a Warning when they become False for a new reason."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a resource."""

    severity: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What is published of a pass."""

    status: Object
    """The status that this pass derived."""
    is_written: bool
    """Whether the status differs enough from the present one to be written."""
    events: tuple[Event, ...]
    again_after: float
    """Seconds until time alone changes the report."""
    state: PlanState


def report_pass(result: PassResult) -> PassReport:
    """Derive the status and the Events of a pass from its snapshot, plan and results."""
    snapshot, state = result.snapshot, result.state
    now, old = snapshot.now, snapshot.status
    events = (
        *drain_events(result.plan.drains, snapshot.drains),
        *reversion_events(result.plan.state.failures, state.failures),
    )
    if (wait := unanswered_seconds(snapshot, state.began_at)) > 0:
        return _report(old, old, events, state, now, wait)
    changes = pending(result)
    state = replace(state, pending=changes)
    ends = [begin + HOLD_SECONDS[kind] - now for kind, begin in changes.items()]
    pods = (*snapshot.targets, *snapshot.drafts, *snapshot.gateways)
    ends += [mounting_deadline(pod) - now for pod in pods]
    new = status_of(result)
    ends.append(overdue_at(new, snapshot.resource.spec) - now)
    wait = min((end for end in ends if end > 0), default=math.inf)
    return _report(old, new, events, state, now, wait)


def report_invalid(resource: Object, problem: str, state: PlanState, now: float) -> PassReport:
    """Report a resource whose spec cannot be read; its children run on as they are."""
    old, generation = resource.get("status") or {}, resource["metadata"]["generation"]
    state = remembered(state, now)
    return _report(old, status_of_invalid(old, generation, problem, now), (), state, now, math.inf)


def report_deleted(resource: Object, state: PlanState, now: float) -> PassReport:
    """Report a resource that is being deleted, and that finalizers hold."""
    old, metadata = resource.get("status") or {}, resource["metadata"]
    new = status_of_deleted(old, metadata["generation"], metadata["finalizers"], now)
    return _report(old, new, (), remembered(state, now), now, math.inf)


def needs_write(old: Object, new: Object, seconds_since_write: float) -> bool:
    """Whether a status is written: state at once, measured values after a while."""
    seconds = MEASUREMENT_SECONDS if _state(old) == _state(new) else SHORTEST_SECONDS
    return _own(old) != _own(new) and seconds_since_write >= seconds


def _report(
    old: Object, new: Object, events: Iterable[Event], state: PlanState, now: float, wait: float
) -> PassReport:
    age = now - state.written_at
    is_written = needs_write(old, new, age)
    if is_written:
        events = (*events, *status_events(old, new))
        state = replace(state, written_at=now)
    elif _state(old) != _state(new):
        wait = min(wait, SHORTEST_SECONDS - age)
    fresh, posted = due(events, state.posted, now)
    state = replace(state, posted=posted)
    return PassReport(
        status=new, is_written=is_written, events=fresh, again_after=wait, state=state
    )


def _own(status: Object) -> Object:
    """The status without conditions of other writers, which an apply keeps."""
    conditions = status.get("conditions") or []
    return status | {"conditions": [each for each in conditions if each["type"] in TYPES]}


def _state(status: Object) -> Object:
    """The status without measured values; the reason of a link may contain some.

    Errors of calls to a target may alternate.
    """
    links = [
        {**link, ROUND_TRIP: bool(link.get(ROUND_TRIP)), "reason": ""}
        for link in status.get("links") or []
    ]
    conditions = [
        # The present demand; the number that follows from it is in the status of the drafts.
        {**condition, "message": ""} if condition["reason"] in _VARYING else condition
        for condition in _own(status)["conditions"]
    ]
    measured: Object = {"speculation": {}, "sessions": {}}
    return status | measured | {"links": links, "conditions": conditions}


def due(events: Iterable[Event], log: Log, now: float) -> tuple[tuple[Event, ...], Log]:
    """Return the Events that were not posted lately, each once, and the log with them."""
    posted = {key: time for key, time in log.items() if now - time < QUIET_SECONDS}
    fresh = []
    for event in events:
        key = event.reason, event.message
        if key not in posted:
            posted[key] = now
            fresh.append(event)
    return tuple(fresh), posted


def status_events(old: Object, new: Object) -> Iterator[Event]:
    """Events of the step from one status to the next; ``old`` is empty for a new resource."""
    if not old.get("conditions"):
        yield Event("Normal", "Created", "The operator creates the objects of this resource.")
    before, after = (condition_in(status, "Progressing") for status in (old, new))
    is_over = after.get("status") == "True" and after["reason"] not in ("RollingOut", "Preflight")
    was_of, is_of = _revisions(old), _revisions(new)
    if was_of and is_of != was_of:
        yield Event("Normal", "RevisionChanged", f"Wanted is revision {' and '.join(is_of)}.")
    if before.get("reason") == "RollingOut" and is_over:
        yield Event("Normal", "RolledOut", f"All pods are of revision {' and '.join(is_of)}.")
    was, is_now = (status.get("draft", {}).get("desiredReplicas") for status in (old, new))
    if was not in (None, is_now):
        yield Event("Normal", "DraftsScaled", f"From {was} to {is_now} drafts.")
    before, after = (condition_in(status, "SpeculationActive") for status in (old, new))
    was_on, is_on = before.get("status") == "True", after.get("status") == "True"
    # Without wanted drafts nothing is lost; a target that does not serve has its own Event.
    is_serving = is_now != 0 and condition_in(new, "Ready").get("status") != "False"
    if is_on and not was_on:
        yield Event("Normal", "SpeculationOn", after["message"])
    elif was_on and after.get("status") == "False" and is_serving:
        yield Event("Warning", "SpeculationOff", f"{after['reason']}: {after['message']}")
    yield from _warnings(old, new)


def _revisions(status: Object) -> list[str]:
    """Revisions of the wanted pods, each with what they are."""
    revisions = ((part, status.get(part, {}).get("revision")) for part in ("target", "draft"))
    return [f"{revision} ({part}s)" for part, revision in revisions if revision]


def drain_events(plan: DrainPlan, results: Mapping[str, str]) -> Iterator[Event]:
    """Events of drains that begin in this plan, or that have ended."""
    for drain in plan.drains:
        if drain.is_new and drain.address is not None:
            yield Event("Normal", "DraftDraining", f"{drain.pod} accepts no more sessions.")
    for pod, result in sorted(results.items()):
        if result == "Drained":
            yield Event("Normal", "DraftDrained", f"{pod} has no session left.")
        elif result:
            message = f"{pod} did not drain ({result}); its sequences continue without it."
            yield Event("Warning", "DrainTimedOut", message)


def reversion_events(
    before: Mapping[Ref, ApplyFailure], failures: Mapping[Ref, ApplyFailure]
) -> tuple[Event, ...]:
    """Events of fields that are not stored as they were applied, each once."""
    return tuple(
        Event("Warning", "ApplyReverted", failure.message)
        for ref, failure in sorted(failures.items())
        if failure.paths and (ref not in before or before[ref].message != failure.message)
    )


def event_object(about: Object, event: Event, seconds: float) -> Object:
    """The Event as an object of Kubernetes.

    Each is a new object. A count in one object would need a read before each write.
    """
    owner, when = about["metadata"], to_text(seconds)
    text = {"reason": event.reason, "message": event.message[:LONGEST_MESSAGE]}
    suffix = digest({"about": owner["uid"], "at": seconds, **text}, 16)
    involved = {name: owner.get(name, "") for name in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{owner['name']}.{suffix}", "namespace": owner["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": about["kind"],
            "resourceVersion": owner.get("resourceVersion", ""),
            **involved,
        },
        **text,
        "type": event.severity,
        "source": {"component": OPERATOR},
        "reportingComponent": OPERATOR,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }


def _warnings(old: Object, new: Object) -> Iterator[Event]:
    """Conditions that are False for a new reason which a person must act on."""
    for kind in _WARNED:
        before, after = (condition_in(status, kind) for status in (old, new))
        reason = after.get("reason")
        # Drafts wait for the node of their target; DraftCapacity reports a real lack.
        is_usual = reason in USUAL or (kind, reason) == ("DraftReady", "Unschedulable")
        is_wanted = is_usual or reason == "Paused"
        if after.get("status") == "False" and not is_wanted and reason != before.get("reason"):
            yield Event("Warning", after["reason"], after["message"])
