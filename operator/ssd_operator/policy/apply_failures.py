"""Applies that did not bring about what was wanted, so that no pass repeats them. Pure.

A failure holds for a while, or until what is wanted, the resource or the uid of the live object
changes. A call that is forbidden (by a quota, a policy or a missing right) is no failure but is
deferred: it is sent again with a back-off of its own, and passes meanwhile repair all other
objects. A forbidden preflight is a failure: it delays one change alone. A forbidden scaling is
neither: the next decision repeats it.

*Decision*: an object that another writer changes again and again is repaired ``MOST_REPAIRS`` times
an hour. Then the changed fields of a Deployment are left as they are for ten minutes, with the pod
template if one of them is in it; other objects are repaired every ten seconds. Fields that a
webhook changes in the apply itself are left for ten minutes, in any object. *Because* each repair
of a template replaces pods: a controller that added one variable after each repair had a lone
target replaced 59 times in 120 s. With ten minutes for all objects, a sixth edit of a Service by
hand left its endpoint broken, and without any limit two controllers write a Service many times a
second. *Not chosen*: a pause before each repair, because a change by hand is to be undone at once.
*Revisit when* users need the six repairs an hour raised.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import HASH_ANNOTATION, HASH_DIGITS, digest
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Ref, RefusedError, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.pod_state import annotations_of, to_text
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.back_off import back_off_seconds

REFUSED_SECONDS = 60.0
"""Time until a refused object is applied again: the cause may be gone without a change of it."""
RETRY_SECONDS = 600.0
"""Time until contested fields are repaired that a webhook changes, or that are of a Deployment."""
PACE_SECONDS = 10.0
"""Time until a contested object without pods is repaired again."""
MOST_REPAIRS = 6
"""Repairs of one object in ``REPAIRS_SECONDS``; the last of them begins a pause."""
REPAIRS_SECONDS = 3600.0

Cause = Literal["Refused", "Forbidden", "Contested"]
Version = tuple[str, int, str]
"""Hash of a wanted object, generation of its resource, uid of the live object."""


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """One object, or some of its fields, that is not applied for now.

    Refused: by the API server. Forbidden: a preflight, by a quota, a policy or a missing right.
    Contested: a webhook changes fields as they are stored, or another writer after each repair.
    """

    cause: Cause
    message: str
    version: Version
    """Version of what was applied."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""
    paths: frozenset[str] = frozenset()
    """The contested fields; other differences of the object are still repaired."""

    @property
    def is_of_template(self) -> bool:
        """Whether the pod template is left as it is."""
        return any(path.startswith("spec.template") for path in self.paths)


class RepairLog(NamedTuple):
    """Repairs of one object, which another writer had changed."""

    applied: str = ""
    """Hash of what was applied last."""
    times: tuple[float, ...] = ()
    """Times of repairs in the last ``REPAIRS_SECONDS``, oldest first."""


class DeferredCall(NamedTuple):
    """A call that was forbidden or, if it is no apply, refused. It waits for its retry."""

    error: ClusterError
    generation: int
    """Generation of the resource, whose change may correct the cause."""
    num_failures: int
    retry_at: float
    """Time of the retry, in seconds since the epoch."""


class Interruption(NamedTuple):
    """A call without an answer, to a busy server, or after another writer who was faster."""

    ref: Ref
    error: ClusterError


@dataclass(slots=True)
class Results:
    """What became of a plan. The execution fills it."""

    applied: set[Ref] = field(default_factory=set)
    """Objects that the API server stored in this pass."""
    stored: dict[Ref, Object] = field(default_factory=dict)
    """Objects as the API server stored them, also if they differ from what was applied."""
    failures: dict[Ref, ApplyFailure] = field(default_factory=dict)
    """Failures that hold after the pass."""
    failed_calls: dict[Ref, ClusterError] = field(default_factory=dict)
    """Errors that the status reports: of deferred calls and scaling, or no answer for long."""
    deferred_calls: dict[Ref, DeferredCall] = field(default_factory=dict)
    """Calls that this pass or an earlier one deferred."""
    interruption: Interruption | None = None
    """The call that ended the pass before its time."""
    is_scaled: bool = False
    """Whether the number of drafts was written to the resource."""
    repairs: dict[Ref, RepairLog] = field(default_factory=dict)
    """Repairs of this pass and of earlier ones."""


def holding(
    failures: Mapping[Ref, ApplyFailure], objects: Iterable[Object], snapshot: Snapshot
) -> dict[Ref, ApplyFailure]:
    """Failures of wanted objects that an apply would repeat; one whose name is taken has none."""
    return {
        ref: failure
        for wanted in objects
        if (failure := failures.get(ref := ref_of(wanted))) is not None
        and ref not in snapshot.foreign
        and failure.version == _version(wanted, snapshot.children.get(ref), snapshot)
        and snapshot.now < failure.retry_at
    }


def still_deferred(
    calls: Mapping[Ref, DeferredCall], planned: Iterable[Ref], snapshot: Snapshot
) -> dict[Ref, DeferredCall]:
    """Deferred calls that are still planned, also those that are due, for the same resource."""
    generation = snapshot.resource.generation
    return {
        ref: call
        for ref in planned
        if (call := calls.get(ref)) is not None and call.generation == generation
    }


def deferred_again(
    ref: Ref, before: DeferredCall | None, error: ClusterError, snapshot: Snapshot
) -> DeferredCall:
    """Defer a call that has failed, each time for longer."""
    resource, num_failures = snapshot.resource, 1 if before is None else before.num_failures + 1
    pause = back_off_seconds((resource.key, ref), num_failures)
    retry_at = snapshot.now + max(error.retry_after_seconds, pause)
    return DeferredCall(error, resource.generation, num_failures, retry_at)


def merged(held: ApplyFailure | None, new: ApplyFailure) -> ApplyFailure:
    """Both failures of a contested object. A pause that holds neither ends nor becomes longer."""
    if held is None:
        return new
    message = held.message if new.paths <= held.paths else f"{held.message} {new.message}"
    return replace(held, version=new.version, message=message, paths=held.paths | new.paths)


def refusal(
    wanted: Object, error: RefusedError | ForbiddenError, snapshot: Snapshot
) -> ApplyFailure:
    """An object that the API server did not store because of this error."""
    version = _version(wanted, snapshot.children.get(ref_of(wanted)), snapshot)
    cause: Cause = "Forbidden" if isinstance(error, ForbiddenError) else "Refused"
    return ApplyFailure(cause, str(error), version, snapshot.now + REFUSED_SECONDS)


def contest(
    sent: Object, wanted: Object, answer: Object, snapshot: Snapshot, repairs: dict[Ref, RepairLog]
) -> ApplyFailure | None:
    """Record an apply; returns its failure if another writer undoes it, as far as is known.

    ``sent`` is what is wanted, with the live template and its hash while the template waits.
    """
    ref, now = ref_of(wanted), snapshot.now
    live = snapshot.children.get(ref)
    # The annotation is the live one's while a template waits, whatever else changes.
    applied, before = digest(sent, HASH_DIGITS), repairs.get(ref, RepairLog())
    is_repair = live is not None and before.applied == applied
    repaired = differences(live or {}, sent) if is_repair else frozenset()
    times = tuple(time for time in before.times if now - time < REPAIRS_SECONDS)
    times += (now,) if repaired else ()
    repairs[ref] = RepairLog(applied, times)
    retry_at = now + RETRY_SECONDS
    end = f"at {to_text(retry_at)}"
    if paths := differences(answer, sent):
        cause = "not stored as applied; look for a webhook."
    elif (paths := repaired) and len(times) >= MOST_REPAIRS:
        cause = "changed again after each repair; look for another writer."
        if ref.kind != "Deployment":
            retry_at, end = now + PACE_SECONDS, f"after {PACE_SECONDS:.0f} s"
    else:
        return None
    verb = "is" if len(paths) == 1 else "are"
    fields = f"{ref.kind} {ref.name}: {', '.join(sorted(paths))} {verb}"
    message = f"{fields} {cause} It is repaired again {end}."
    version = _version(wanted, answer, snapshot)
    return ApplyFailure("Contested", message, version, retry_at, paths)


def _version(wanted: Object, live: Object | None, snapshot: Snapshot) -> Version:
    wanted_hash = str(annotations_of(wanted).get(HASH_ANNOTATION, ""))
    uid = "" if live is None else str(live["metadata"]["uid"])
    return wanted_hash, snapshot.resource.generation, uid
