"""Events of a pass: changes of the status, drains, reverted applies. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.children.names import OPERATOR
from ssd_operator.children.objects import digest
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import to_text
from ssd_operator.policy.apply_failures import ApplyFailure
from ssd_operator.policy.drain import DrainPlan
from ssd_operator.status.conditions import LONGEST_MESSAGE, condition_in
from ssd_operator.status.pass_result import EventLog

QUIET_SECONDS = 600.0
"""The same Event of a resource is posted once in this time."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a resource."""

    severity: Literal["Normal", "Warning"]
    reason: str
    message: str


_USUAL = frozenset({"Loading", "FetchingModel", "RollingOut", "Draining", "Scaling", "Paused"})
"""Reasons of conditions that are False without a Warning: they pass, or a person wants them."""
_WARNED = (
    "TargetReady",
    "DraftReady",
    "DraftCapacity",
    "Progressing",
    "SpecValid",
    "ResourcesOwned",
)
"""Conditions that post a Warning when they become False for a new reason."""


_CREATED = Event("Normal", "Created", "The operator creates the objects of this resource.")


def due(events: Iterable[Event], log: EventLog, now: float) -> tuple[tuple[Event, ...], EventLog]:
    """Those that were not posted lately, each once, and the log with them."""
    posted = {key: time for key, time in log.items() if now - time < QUIET_SECONDS}
    fresh = []
    for event in events:
        key = event.reason, event.message
        if key not in posted:
            posted[key] = now
            fresh.append(event)
    return tuple(fresh), posted


def status_events(old: Object, new: Object) -> tuple[Event, ...]:
    """Events of the step from one status to the next; ``old`` is empty for a new resource."""
    events = [] if old.get("conditions") else [_CREATED]
    before, after = (condition_in(status, "Progressing") for status in (old, new))
    is_over = after.get("status") == "True" and after["reason"] not in ("RollingOut", "Preflight")
    if before.get("reason") == "RollingOut" and is_over:
        target, draft = (new.get(name, {}).get("revision", "") for name in ("target", "draft"))
        message = f"All pods are of revision {target} (targets) and {draft} (drafts)."
        events.append(Event("Normal", "RolledOut", message))
    was, is_now = (status.get("draft", {}).get("desiredReplicas") for status in (old, new))
    if was is not None and was != is_now:
        events.append(Event("Normal", "DraftsScaled", f"From {was} to {is_now} drafts."))
    return (*events, *_speculation(old, new), *_warnings(old, new))


def drain_events(plan: DrainPlan, results: Mapping[str, str]) -> tuple[Event, ...]:
    """Events of drains that begin in this plan, or that have ended."""
    begun = [each.pod for each in plan.drains if each.is_new and each.address is not None]
    events = [Event("Normal", "DraftDraining", f"{pod} accepts no more sessions.") for pod in begun]
    for pod, result in sorted(results.items()):
        if result == "Drained":
            events.append(Event("Normal", "DraftDrained", f"{pod} has no session left."))
        elif result:
            message = f"{pod} did not drain ({result}); its sequences continue without it."
            events.append(Event("Warning", "DrainTimedOut", message))
    return tuple(events)


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
            "kind": KIND,
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


def _speculation(old: Object, new: Object) -> list[Event]:
    before, after = (condition_in(status, "SpeculationActive") for status in (old, new))
    was_on, is_on = before.get("status") == "True", after.get("status") == "True"
    if is_on and not was_on:
        return [Event("Normal", "SpeculationOn", after["message"])]
    # Without wanted drafts nothing is lost; a target that does not serve has its own Event.
    is_wanted = new.get("draft", {}).get("desiredReplicas") != 0
    is_serving = condition_in(new, "Ready").get("status") != "False"
    if was_on and after.get("status") == "False" and is_wanted and is_serving:
        return [Event("Warning", "SpeculationOff", f"{after['reason']}: {after['message']}")]
    return []


def _warnings(old: Object, new: Object) -> list[Event]:
    """Conditions that are False for a new reason which a person must act on."""
    found = [(kind, condition_in(new, kind)) for kind in _WARNED]
    return [
        Event("Warning", after["reason"], after["message"])
        for kind, after in found
        if after.get("status") == "False"
        and after["reason"] not in _USUAL
        # Drafts wait for the node of their target; DraftCapacity reports a real lack.
        and (kind, after["reason"]) != ("DraftReady", "Unschedulable")
        and after["reason"] != condition_in(old, kind).get("reason")
    ]
