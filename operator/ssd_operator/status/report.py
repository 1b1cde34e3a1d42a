"""What a pass reports of a resource: its status, and the Events of its changes. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object, Resource
from ssd_operator.observe.facts import Observed
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import Plan, unanswered_seconds
from ssd_operator.status.events import (
    Event,
    EventLog,
    drain_events,
    due,
    release_events,
    reversion_events,
    status_events,
)
from ssd_operator.status.pass_result import PassResult
from ssd_operator.status.speculating import HOLD_SECONDS, unlinked_since
from ssd_operator.status.status import status_of, status_of_invalid
from ssd_operator.status.status_change import SHORTEST_SECONDS, needs_write


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the report of one pass leaves to the next."""

    log: EventLog = field(default_factory=dict)
    written_at: float = -math.inf
    """Last write of the status, in seconds since the epoch."""
    unlinked_since: float | None = None
    """Begin of a loss of links that may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is published of a pass."""

    status: Object
    """The status that this pass derived."""
    is_written: bool = False
    """Whether the status differs enough from the present one to be written."""
    events: tuple[Event, ...] = ()
    again_after: float = math.inf
    """Seconds until time alone changes the report."""
    memory: Reported = field(default_factory=Reported)


def report_pass(
    resource: Resource,
    observed: Observed,
    decided: Plan,
    results: Results,
    memory: Reported,
    now: float,
) -> Report:
    """Derive the status and the Events of a pass.

    Args:
        resource: what the user specified.
        observed: the state of this pass.
        decided: the plan.
        results: what became of it.
        memory: of the report before.
        now: seconds since the epoch.
    """
    found = PassResult(resource=resource, observed=observed, plan=decided, results=results, now=now)
    events = (
        *drain_events(decided.drains, observed.drains),
        *release_events(decided.adopt),
        *reversion_events(decided.memory.failures, results.failures),
    )
    if (wait := unanswered_seconds(found, decided.memory.began_at)) > 0:
        kept = Report(status=observed.status, again_after=wait, memory=memory)
        return _with_events(kept, events, now)
    lost_at = unlinked_since(found, memory.unlinked_since)
    memory = replace(memory, unlinked_since=lost_at)
    status = status_of(replace(found, unlinked_since=lost_at))
    changed = _change(observed.status, status, memory, now)
    if lost_at is not None and lost_at + HOLD_SECONDS > now:
        wait = min(changed.again_after, lost_at + HOLD_SECONDS - now)
        changed = replace(changed, again_after=wait)
    return _with_events(changed, (*events, *changed.events), now)


def report_invalid(
    old: Object, generation: int, problem: tuple[str, str], memory: Reported, now: float
) -> Report:
    """Report a resource that this operator has never been able to read.

    Args:
        old: its present status.
        generation: of the resource.
        problem: reason and message.
        memory: of the report before.
        now: seconds since the epoch.
    """
    found = _change(old, status_of_invalid(old, generation, problem, now), memory, now)
    return _with_events(found, found.events, now)


def _change(old: Object, new: Object, memory: Reported, now: float) -> Report:
    """The step from one status to the next."""
    age = now - memory.written_at
    if needs_write(old, new, age):
        memory = replace(memory, written_at=now)
        return Report(status=new, is_written=True, events=status_events(old, new), memory=memory)
    is_postponed = needs_write(old, new, max(age, SHORTEST_SECONDS))
    wait = max(SHORTEST_SECONDS - age, 0.0) if is_postponed else math.inf
    return Report(status=new, again_after=wait, memory=memory)


def _with_events(found: Report, events: Iterable[Event], now: float) -> Report:
    """The report with those of these Events that were not reported lately."""
    fresh, log = due(events, found.memory.log, now)
    return replace(found, events=fresh, memory=replace(found.memory, log=log))
