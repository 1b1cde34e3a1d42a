"""What a pass reports of a resource: its status, and the Events of its changes. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ssd_operator.api.spec import Object, Resource
from ssd_operator.observe.facts import DrainFact, Observed
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import Plan, unanswered_seconds
from ssd_operator.policy.snapshot import Planned, Snapshot
from ssd_operator.status.events import (
    Event,
    EventLog,
    drain_events,
    due,
    release_events,
    reversion_events,
    status_events,
)
from ssd_operator.status.speculating import HOLD_SECONDS, unlinked_since
from ssd_operator.status.status import status_of, status_of_invalid
from ssd_operator.status.status_change import SHORTEST_SECONDS, needs_write


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the report of one pass leaves to the next."""

    log: EventLog = field(default_factory=EventLog)
    drains: Mapping[str, DrainFact] = field(default_factory=dict)
    written_at: float = -math.inf
    """When the status was written last."""
    unlinked_since: float | None = None
    """Begin of a loss of links that may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is published of a pass."""

    status: Object
    """As this pass finds it."""
    is_written: bool = False
    """Whether the status differs enough from the present one to be written."""
    events: tuple[Event, ...] = ()
    again_after: float = math.inf
    """Seconds until time alone changes the report."""
    memory: Reported = field(default_factory=Reported)


def report(
    resource: Resource,
    observed: Observed,
    decided: Plan,
    results: Results,
    memory: Reported,
    now: float,
) -> Report:
    """Derive the status and the Events of a pass.

    Args:
        resource: what the user asked for.
        observed: the snapshot of this pass.
        decided: the plan.
        results: what became of it.
        memory: of the report before.
        now: seconds since the epoch.
    """
    messages = {ref: each.message for ref, each in results.rejected.items()}
    # A rejection that may pass is no fault of the resource.
    rejected = {ref: each.message for ref, each in results.rejected.items() if not each.may_pass}
    foreign = observed.foreign | results.foreign
    observed = replace(observed, rejected=rejected, forbidden=results.forbidden, foreign=foreign)
    snapshot = Snapshot(resource=resource, observed=observed, planned=Planned(), now=now)
    events = drain_events(decided.drains, memory.drains, observed.drains)
    events += release_events(decided.adopt)
    events += reversion_events(decided.memory.reverted, results.reverted)
    memory = replace(memory, drains=dict(observed.drains))
    if (wait := unanswered_seconds(snapshot, decided.memory.began_at)) > 0:
        return _with_events(
            Report(status=observed.status, again_after=wait, memory=memory), events, now
        )
    lost_at = unlinked_since(snapshot, memory.unlinked_since)
    planned = Planned(
        unlinked_since=lost_at,
        revisions=decided.revisions,
        decision=decided.memory.decision,
        is_scaling=results.is_scaled,
        preflight=decided.preflight.heeding(messages),
        makes=frozenset(results.applied),
    )
    status = status_of(resource, observed, planned, now)
    found = _change(observed.status, status, replace(memory, unlinked_since=lost_at), now)
    if lost_at is not None and lost_at + HOLD_SECONDS > now:
        found = replace(found, again_after=min(found.again_after, lost_at + HOLD_SECONDS - now))
    return _with_events(found, (*events, *found.events), now)


def report_invalid(
    old: Object, generation: int, problem: tuple[str, str], memory: Reported, now: float
) -> Report:
    """Report a resource that cannot be read and never could.

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
