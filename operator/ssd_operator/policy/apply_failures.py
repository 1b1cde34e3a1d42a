"""Applies that did not bring about what was wanted, so that no pass repeats them. Pure.

A failure holds for a while, or until what is wanted, the resource or the uid of the live object
changes. What is forbidden (a quota, a policy, a missing right) is not stored: the next pass sends
it again, with the queue's back-off. A forbidden preflight is: it delays one change alone.

*Decision*: a field of a Deployment that another writer changes again and again is repaired
``MOST_REPAIRS`` times an hour, then left as it is for ten minutes, with the pod template if the
field is in it. In objects without pods it is repaired every ten seconds from then on. A field that
a webhook changes in the apply itself is left for ten minutes, in any object. Fields are counted and
paused one by one. *Because* each repair of a template replaces pods: a controller that added one
variable after each repair had a lone target replaced 59 times in 120 s. With one limit for all
objects and fields, a sixth edit of a Service by hand left its endpoint broken for ten minutes, and
without any limit two controllers write a Service many times a second. *Not chosen*: a pause before
each repair, because a change by hand is to be undone at once. *Revisit when* users need the six
repairs an hour raised.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION
from ssd_operator.children.objects import HASH_DIGITS, digest
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Ref, RefusedError, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.pod_state import annotations_of, to_text
from ssd_operator.observe.snapshot import Snapshot

REFUSED_SECONDS = 60.0
"""Until a refused object is applied again: its cause may be gone without a change of it."""
RETRY_SECONDS = 600.0
"""Until a contested field is repaired again that a webhook changes, or that is of a Deployment."""
PACE_SECONDS = 10.0
"""Until a contested field of an object without pods is repaired again."""
MOST_REPAIRS = 6
"""Repairs of one field in ``REPAIRS_SECONDS``; the last of them begins a pause."""
REPAIRS_SECONDS = 3600.0

Cause = Literal["Refused", "Forbidden", "Contested"]
Version = tuple[str, int, str]
"""Hash of a wanted object, generation of its resource, uid of the live object."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A contested field that is left as it is."""

    message: str
    retry_at: float
    """When it is repaired again, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """One object, or some of its fields, that is not applied for now.

    Refused: by the API server. Forbidden: a preflight, by a quota, a policy or a missing right.
    Contested: a webhook changes fields as they are stored, or another writer after each repair.
    """

    cause: Cause
    message: str
    version: Version
    """That was applied."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""
    fields: Mapping[str, Pause] = field(default_factory=dict)
    """The contested fields, by path; other differences of the object are still repaired."""

    @property
    def is_of_template(self) -> bool:
        """Whether the pod template is left as it is."""
        return any(path.startswith("spec.template") for path in self.fields)


@dataclass(slots=True)
class Results:
    """What became of a plan. The execution fills it."""

    applied: set[Ref] = field(default_factory=set)
    """Objects that the API server stored in this pass."""
    stored: dict[Ref, Object] = field(default_factory=dict)
    """What it stored, also if that differs from what was applied."""
    failures: dict[Ref, ApplyFailure] = field(default_factory=dict)
    """Those that hold after the pass."""
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """Errors of calls (403, or without an answer for long). The next pass repeats these calls."""
    interruption: tuple[Ref, ClusterError] | None = None
    """The object and the error of the call that ended the pass before its time: no answer, a busy
    server, or another writer who was faster."""
    is_scaled: bool = False
    """Whether the number of drafts was written to the resource."""


@dataclass(frozen=True, slots=True)
class RepairLog:
    """Repairs of one object, which another writer had changed."""

    applied: str = ""
    """Hash of what was applied last."""
    times: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of each field in the last ``REPAIRS_SECONDS``, oldest first."""

    def is_first_pause(self, paths: Iterable[str]) -> bool:
        """Whether one of these fields, which are paused now, was not paused lately."""
        return any(len(self.times.get(path, ())) <= MOST_REPAIRS for path in paths)


Repairs = dict[Ref, RepairLog]


def holding(
    failures: Mapping[Ref, ApplyFailure], objects: Iterable[Object], snapshot: Snapshot
) -> dict[Ref, ApplyFailure]:
    """Failures of wanted objects that an apply would repeat; one whose name is taken has none."""
    return {
        ref: rest
        for each in objects
        if (found := failures.get(ref := ref_of(each))) is not None
        and ref not in snapshot.foreign
        and found.version == _version(each, snapshot.children.get(ref), snapshot)
        and (rest := _rest(found, snapshot.now)) is not None
    }


def merged(held: ApplyFailure | None, new: ApplyFailure) -> ApplyFailure:
    """Both failures of a contested object. A pause that holds neither ends nor becomes longer."""
    return new if held is None else _contested(new.version, {**new.fields, **held.fields})


def refusal(
    wanted: Object, error: RefusedError | ForbiddenError, snapshot: Snapshot
) -> ApplyFailure:
    """An object that the API server did not store because of this error."""
    version = _version(wanted, snapshot.children.get(ref_of(wanted)), snapshot)
    cause: Cause = "Forbidden" if isinstance(error, ForbiddenError) else "Refused"
    return ApplyFailure(cause, str(error), version, snapshot.now + REFUSED_SECONDS)


def contest(
    sent: Object, wanted: Object, answer: Object, snapshot: Snapshot, repairs: Repairs
) -> ApplyFailure | None:
    """Record an apply; returns its failure if another writer undoes it, as far as is known.

    ``sent`` is what is wanted, with the live template and its hash while the template waits.
    """
    ref, now = ref_of(wanted), snapshot.now
    live = snapshot.children.get(ref)
    # The annotation is the live one's while a template waits, whatever else changes.
    applied, before = digest(sent, HASH_DIGITS), repairs.get(ref, RepairLog())
    is_repair = live is not None and before.applied == applied
    repaired = frozenset(differences(live or {}, sent)) if is_repair else frozenset()
    times = _times(before, repaired, now)
    repairs[ref] = RepairLog(applied, times)
    retry_at = now + RETRY_SECONDS
    end = f"at {to_text(retry_at)}"
    if reverted := frozenset(differences(answer, sent)):
        cause = "is not stored as applied; look for a webhook."
    elif reverted := frozenset(path for path in repaired if len(times[path]) >= MOST_REPAIRS):
        cause = "is changed again after each repair; look for another writer."
        if ref.kind != "Deployment":
            retry_at, end = now + PACE_SECONDS, f"after {PACE_SECONDS:.0f} s"
    else:
        return None
    fields = {
        path: Pause(f"{ref.kind} {ref.name}: {path} {cause} It is repaired again {end}.", retry_at)
        for path in reverted
    }
    return _contested(_version(wanted, answer, snapshot), fields)


def _contested(version: Version, fields: Mapping[str, Pause]) -> ApplyFailure:
    retry_at = min(each.retry_at for each in fields.values())
    return ApplyFailure("Contested", fields[min(fields)].message, version, retry_at, fields)


def _rest(failure: ApplyFailure, now: float) -> ApplyFailure | None:
    """What still holds of a failure; None if nothing does."""
    if now < failure.retry_at:
        return failure
    fields = {path: each for path, each in failure.fields.items() if now < each.retry_at}
    return _contested(failure.version, fields) if fields else None


def _times(before: RepairLog, repaired: frozenset[str], now: float) -> dict[str, tuple[float, ...]]:
    """The latest repairs of each field, with those of now."""
    kept = {
        path: tuple(each for each in before.times.get(path, ()) if now - each < REPAIRS_SECONDS)
        for path in before.times.keys() | repaired
    }
    found = {path: (*times, now) if path in repaired else times for path, times in kept.items()}
    return {path: times for path, times in found.items() if times}


def _version(wanted: Object, live: Object | None, snapshot: Snapshot) -> Version:
    sent = str(annotations_of(wanted).get(HASH_ANNOTATION, ""))
    uid = "" if live is None else str(live["metadata"]["uid"])
    return sent, snapshot.resource.generation, uid
