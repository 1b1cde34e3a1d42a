"""Which Events tell of a pass: what changed in the status, and what became of drains. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.children.names import OPERATOR
from ssd_operator.children.objects import digest
from ssd_operator.observe.facts import DrainFact, Ref
from ssd_operator.observe.pod_state import to_text
from ssd_operator.policy.apply_failures import Reversion
from ssd_operator.policy.drain import DrainPlan
from ssd_operator.status.conditions import condition_in

QUIET_SECONDS = 600.0
"""The same Event of a resource is reported once in this time."""
LONGEST_EVENT = 1024
"""Characters of an Event's message that an API server accepts."""


class Severity(StrEnum):
    """Type of an Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a resource."""

    severity: Severity
    reason: str
    message: str


_NOT_BY_ITSELF = (
    "ConfigurationError",
    "CrashLoop",
    "ImagePull",
    "NoDevice",
    "PodForbidden",
    "StartupTimeout",
)
"""Reasons of pods that are not ready which somebody has to look into."""
_NOT_CARRIED_OUT = ("ObjectRefused", "PodTemplateInvalid", "ReservedEnv", "SpecInvalid")


@dataclass(frozen=True, slots=True)
class EventLog:
    """When what was told of one resource."""

    told: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By reason and message."""


def due(events: Iterable[Event], log: EventLog, now: float) -> tuple[tuple[Event, ...], EventLog]:
    """Those that were not told lately, each once, and the log with them.

    Args:
        events: of this pass, in order.
        log: of the pass before; ``EventLog()`` at first.
        now: seconds, of the clock that the log has.
    """
    told = {key: time for key, time in log.told.items() if now - time < QUIET_SECONDS}
    fresh = []
    for event in events:
        key = event.reason, event.message
        if key not in told:
            told[key] = now
            fresh.append(event)
    return tuple(fresh), EventLog(told)


def status_events(old: Object, new: Object) -> tuple[Event, ...]:
    """What the step from one status to the next tells; ``old`` is empty for a new resource."""
    events = [] if old.get("conditions") else [_normal("Created", "The resource is taken on.")]
    events += _rollout(old, new)
    events += _scale(old, new)
    events += _speculation(old, new)
    events += _troubles(old, new)
    events += _refusals(old, new)
    return tuple(events)


def drain_events(
    plan: DrainPlan, before: Mapping[str, DrainFact], facts: Mapping[str, DrainFact]
) -> tuple[Event, ...]:
    """What became of drains since the pass before.

    Args:
        plan: of this pass.
        before: facts of the pass before, by pod.
        facts: those of this pass.
    """
    called = {call.pod for call in plan.calls}
    begun = [mark.pod for mark in plan.marks if mark.pod in called]
    events = [_normal("DraftDraining", f"{pod} takes no more sessions.") for pod in begun]
    for pod, fact in sorted(facts.items()):
        if not fact.is_done or (pod in before and before[pod].is_done):
            continue
        if fact.result == "Drained":
            events.append(_normal("DraftDrained", f"{pod} has no session left."))
        else:
            events.append(
                _warning(
                    "DrainTimedOut", f"{pod} did not drain ({fact.result}); its rows go on plain."
                )
            )
    return tuple(events)


def release_events(pods: Iterable[Object]) -> tuple[Event, ...]:
    """Pods that a change of their labels took out of their Deployment."""
    return tuple(
        _warning(
            "PodReleased",
            f"Labels of {pod['metadata']['name']} were changed, so its Deployment replaces it. It "
            "is not counted any more, keeps running, and is deleted with the resource.",
        )
        for pod in pods
    )


def reversion_events(
    before: Mapping[Ref, Reversion], reversions: Mapping[Ref, Reversion]
) -> tuple[Event, ...]:
    """Objects that are not stored as they were applied, each once.

    Args:
        before: those of the pass before.
        reversions: those of this pass.
    """
    return tuple(
        _warning("ApplyReverted", reversion.message)
        for ref, reversion in sorted(reversions.items())
        if before.get(ref) != reversion
    )


def event_object(about: Object, event: Event, seconds: float) -> Object:
    """The Event as an object of Kubernetes.

    Each report is an object of its own: nothing is counted up, so nothing has to be read first.

    Args:
        about: the resource.
        event: what happened to it.
        seconds: when, since the epoch.
    """
    owner, when = about["metadata"], to_text(seconds)
    text = {"reason": event.reason, "message": event.message[:LONGEST_EVENT]}
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
        "type": str(event.severity),
        "source": {"component": OPERATOR},
        "reportingComponent": OPERATOR,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }


def _normal(reason: str, message: str) -> Event:
    return Event(Severity.NORMAL, reason, message)


def _warning(reason: str, message: str) -> Event:
    return Event(Severity.WARNING, reason, message)


def _has_begun(old: Object, new: Object, kind: str, reason: str) -> bool:
    """Whether a condition has this reason now, and had not before."""
    is_now = condition_in(new, kind).get("reason") == reason
    return is_now and condition_in(old, kind).get("reason") != reason


def _rollout(old: Object, new: Object) -> list[Event]:
    was_rolling = condition_in(old, "Progressing").get("reason") == "RollingOut"
    is_rolling = condition_in(new, "Progressing").get("reason") in ("RollingOut", "Preflight")
    is_held_up = condition_in(new, "Progressing").get("status") != "True"
    if not was_rolling or is_rolling or is_held_up:
        return []
    target, draft = (new.get(name, {}).get("revision", "unknown") for name in ("target", "draft"))
    return [_normal("RolledOut", f"All pods are of target {target} and draft {draft}.")]


def _scale(old: Object, new: Object) -> list[Event]:
    before, after = (status.get("draft", {}).get("desiredReplicas") for status in (old, new))
    if before is None or before == after:
        return []
    return [_normal("DraftsScaled", f"From {before} to {after} drafts.")]


def _speculation(old: Object, new: Object) -> list[Event]:
    before, after = (condition_in(status, "SpeculationActive") for status in (old, new))
    was_on, is_on = before.get("status") == "True", after.get("status") == "True"
    if is_on and not was_on:
        return [_normal("SpeculationOn", after["message"])]
    # Where no drafts are asked for nothing is lost; a target that does not serve has its own Event.
    is_asked = new.get("draft", {}).get("desiredReplicas") != 0
    is_serving = condition_in(new, "Ready").get("status") != "False"
    if was_on and after.get("status") == "False" and is_asked and is_serving:
        return [_warning("SpeculationOff", f"{after['reason']}: {after['message']}")]
    return []


def _troubles(old: Object, new: Object) -> list[Event]:
    watched = [
        *(("TargetReady", reason, reason) for reason in _NOT_BY_ITSELF),
        *(("DraftReady", reason, reason) for reason in _NOT_BY_ITSELF),
        *(("SpecValid", reason, reason) for reason in _NOT_CARRIED_OUT),
        ("ResourcesOwned", "Forbidden", "Forbidden"),
        ("ResourcesOwned", "NameTaken", "NameTaken"),
        ("Progressing", "PreflightFailed", "PreflightFailed"),
        ("TargetReady", "Unschedulable", "Unschedulable"),
        ("DraftCapacity", "Unschedulable", "Unschedulable"),
        ("DraftCapacity", "InsufficientLocalGPUs", "Unschedulable"),
    ]
    return [
        _warning(event, condition_in(new, kind)["message"])
        for kind, reason, event in watched
        if _has_begun(old, new, kind, reason)
    ]


def _refusals(old: Object, new: Object) -> list[Event]:
    before, after = (
        {
            (link["target"], link["draft"]): link.get("reason", "no reason given")
            for link in status.get("links") or []
            if link.get("state") == "Refused"
        }
        for status in (old, new)
    )
    return [
        _warning("LinkRefused", f"{target} and {draft}: {after[target, draft]}.")
        for target, draft in sorted(after.keys() - before)
    ]
