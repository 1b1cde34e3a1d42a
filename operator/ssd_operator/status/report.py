"""What a pass reports of a resource: its status, and the Events of its changes. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import mounting_deadline
from ssd_operator.policy.plan import unanswered_seconds
from ssd_operator.status.condition_rules import (
    HOLD_SECONDS,
    TURN_SECONDS,
    turned_since,
    unlinked_since,
)
from ssd_operator.status.events import Event, drain_events, due, reversion_events, status_events
from ssd_operator.status.pass_result import PassResult, ReportState
from ssd_operator.status.status import ROUND_TRIP, status_of, status_of_invalid

SHORTEST_SECONDS = 1.0
"""Between any two writes of one status."""
MEASUREMENT_SECONDS = 60.0
"""Between two writes only because of measured values."""


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
    state: ReportState


def report_pass(result: PassResult) -> PassReport:
    """Derive the status and the Events of a pass from its snapshot, plan and results."""
    snapshot, plan = result.snapshot, result.plan
    now, old = snapshot.now, snapshot.status
    events = (
        *drain_events(plan.drains, snapshot.drains),
        *reversion_events(plan.state.failures, result.results.failures),
    )
    if (wait := unanswered_seconds(snapshot, plan.state.began_at)) > 0:
        return _report(old, old, events, result.before, now, wait)
    unlinked, turned = unlinked_since(result), turned_since(result)
    state = replace(result.before, unlinked_since=unlinked, turned_since=turned)
    holds = ((unlinked, HOLD_SECONDS), (turned, TURN_SECONDS))
    ends = [begin + seconds - now for begin, seconds in holds if begin is not None]
    pods = (*snapshot.targets, *snapshot.drafts, *snapshot.gateways)
    ends += [mounting_deadline(pod) - now for pod in pods]
    wait = min((each for each in ends if each > 0), default=math.inf)
    return _report(old, status_of(result), events, state, now, wait)


def report_invalid(found: Object, problem: str, state: ReportState, now: float) -> PassReport:
    """Report a resource whose spec cannot be read; its children run on as they are."""
    old, generation = found.get("status") or {}, found["metadata"]["generation"]
    return _report(old, status_of_invalid(old, generation, problem, now), (), state, now, math.inf)


def needs_write(old: Object, new: Object, seconds_since_write: float) -> bool:
    """Whether a status is written: state at once, measured values after a while."""
    seconds = MEASUREMENT_SECONDS if _state(old) == _state(new) else SHORTEST_SECONDS
    return old != new and seconds_since_write >= seconds


def _report(
    old: Object, new: Object, events: Iterable[Event], state: ReportState, now: float, wait: float
) -> PassReport:
    age = now - state.written_at
    is_written = needs_write(old, new, age)
    if is_written:
        events = (*events, *status_events(old, new))
        state = replace(state, written_at=now)
    elif _state(old) != _state(new):
        wait = min(wait, SHORTEST_SECONDS - age)
    fresh, log = due(events, state.log, now)
    state = replace(state, log=log)
    return PassReport(
        status=new, is_written=is_written, events=fresh, again_after=wait, state=state
    )


def _state(status: Object) -> Object:
    """The status without measured values; the reason of a link may contain some."""
    links = [
        {**link, ROUND_TRIP: bool(link.get(ROUND_TRIP)), "reason": ""}
        for link in status.get("links") or []
    ]
    conditions = [
        # The present demand; the number that follows from it is in the status of the drafts.
        {**each, "message": ""} if each["reason"] == "Internal" else each
        for each in status.get("conditions") or []
    ]
    return {**status, "links": links, "speculation": {}, "conditions": conditions}
