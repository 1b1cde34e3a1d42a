"""What a pass reports of a resource: its status, and the Events of its changes. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import mounting_deadline
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import Plan, unanswered_seconds
from ssd_operator.status.condition_rules import (
    HOLD_SECONDS,
    TURN_SECONDS,
    turned_since,
    unlinked_since,
)
from ssd_operator.status.events import (
    Event,
    EventLog,
    drain_events,
    due,
    release_events,
    reversion_events,
    status_events,
)
from ssd_operator.status.pass_result import PassResult, Unreported, result_of
from ssd_operator.status.status import ROUND_TRIP, status_of, status_of_invalid

SHORTEST_SECONDS = 1.0
"""Between any two writes of one status."""
MEASUREMENT_SECONDS = 60.0
"""Between two writes only because of measured values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the report of one pass leaves to the next. Times are in seconds since the epoch."""

    log: EventLog = field(default_factory=dict)
    written_at: float = -math.inf
    """Last write of the status."""
    unreported: Unreported = field(default_factory=Unreported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is published of a pass."""

    status: Object
    """The status that this pass derived."""
    is_written: bool
    """Whether the status differs enough from the present one to be written."""
    events: tuple[Event, ...]
    again_after: float
    """Seconds until time alone changes the report."""
    memory: Reported


def report_pass(snapshot: Snapshot, plan: Plan, results: Results, memory: Reported) -> Report:
    """Derive the status and the Events of a pass from what it found, decided and brought about."""
    now, old = snapshot.now, snapshot.status
    events = (
        *drain_events(plan.drains, snapshot.drains),
        *release_events(plan.adopt),
        *reversion_events(plan.memory.failures, results.failures),
    )
    if (wait := unanswered_seconds(snapshot, plan.memory.began_at)) > 0:
        return _report(old, old, events, memory, now, wait)
    result: PassResult = result_of(snapshot, plan, results, memory.unreported)
    since = Unreported(unlinked_since=unlinked_since(result), turned_since=turned_since(result))
    memory = replace(memory, unreported=since)
    holds = [(since.unlinked_since, HOLD_SECONDS), (since.turned_since, TURN_SECONDS)]
    ends = [begin + seconds - now for begin, seconds in holds if begin is not None]
    pods = (*snapshot.targets, *snapshot.drafts, *snapshot.gateways)
    ends += [mounting_deadline(pod) - now for pod in pods]
    wait = min((each for each in ends if each > 0), default=math.inf)
    return _report(old, status_of(result), events, memory, now, wait)


def report_invalid(
    old: Object, generation: int, problem: str, memory: Reported, now: float
) -> Report:
    """Report a resource that this operator has never been able to read."""
    return _report(old, status_of_invalid(old, generation, problem, now), (), memory, now, math.inf)


def needs_write(old: Object, new: Object, seconds_since_write: float) -> bool:
    """Whether a status is written: state at once, measured values after a while."""
    seconds = MEASUREMENT_SECONDS if _state(old) == _state(new) else SHORTEST_SECONDS
    return old != new and seconds_since_write >= seconds


def _report(
    old: Object, new: Object, events: Iterable[Event], memory: Reported, now: float, wait: float
) -> Report:
    age = now - memory.written_at
    is_written = needs_write(old, new, age)
    if is_written:
        events = (*events, *status_events(old, new))
        memory = replace(memory, written_at=now)
    elif _state(old) != _state(new):
        wait = min(wait, SHORTEST_SECONDS - age)
    fresh, log = due(events, memory.log, now)
    memory = replace(memory, log=log)
    return Report(status=new, is_written=is_written, events=fresh, again_after=wait, memory=memory)


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
