"""Applies that did not bring about what was wanted, so that no pass repeats them. Pure.

A failure holds for a while, or until what is wanted, the resource or the uid of the live object
changes. What is forbidden (a quota, a policy, a missing right) is not stored: the next pass sends
it again, with the queue's back-off. A forbidden preflight is: it delays one change alone.

*Decision*: an object that another writer changes again and again is repaired ``MOST_REPAIRS`` times
an hour, then left as it is for ten minutes; so is one that a webhook changes in the apply itself.
*Because* each repair of a template replaces pods: a controller that added one variable after each
repair had a lone target replaced 59 times in 120 s. *Not chosen*: a pause before each repair,
because a change by hand is to be undone at once. *Revisit when* users need the six repairs an hour
raised.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION
from ssd_operator.children.objects import HASH_DIGITS, digest
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Ref, RefusedError, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.pod_state import annotations_of
from ssd_operator.observe.snapshot import Snapshot

REFUSED_SECONDS = 60.0
"""Until a refused object is applied again: its cause may be gone without a change of it."""
RETRY_SECONDS = 600.0
"""Until a contested object is applied again."""
MOST_REPAIRS = 6
"""Repairs of one object in ``REPAIRS_SECONDS``; the last of them begins a pause."""
REPAIRS_SECONDS = 3600.0


class Cause(StrEnum):
    """Why an apply did not bring about what was wanted."""

    REFUSED = "Refused"
    """The API server refused the object."""
    FORBIDDEN = "Forbidden"
    """A quota, a policy or a missing right prevents a preflight."""
    CONTESTED = "Contested"
    """A webhook changes the object as it is stored, or another writer after each repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyFailure:
    """One object that is not applied for now."""

    cause: Cause
    message: str
    digest: str
    """Of what was wanted; empty if its annotation was edited away."""
    generation: int
    """Of the resource."""
    uid: str
    """Of the live object; empty without one."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""

    def holds(self, wanted: Object, snapshot: Snapshot) -> bool:
        """Whether applying ``wanted`` now would fail in the same way."""
        live = snapshot.children.get(ref_of(wanted))
        now = _digest_of(wanted), snapshot.resource.generation, _uid_of(live)
        is_same = (self.digest, self.generation, self.uid) == now
        return is_same and snapshot.now < self.retry_at


@dataclass(slots=True)
class Results:
    """What became of a plan. The execution fills it."""

    applied: set[Ref] = field(default_factory=set)
    """Objects that the API server stored in this pass."""
    failures: dict[Ref, ApplyFailure] = field(default_factory=dict)
    """Those that hold after the pass."""
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """Errors of calls (403, or without an answer for long). The next pass repeats these calls."""
    foreign: set[Ref] = field(default_factory=set)
    """Names of other owners' objects, as only the execution has found."""
    interruption: tuple[Ref, ClusterError] | None = None
    """The object and the error of the call that ended the pass before its time: no answer, a busy
    server, or another writer who was faster."""
    is_scaled: bool = False
    """Whether the number of drafts was written to the resource."""


@dataclass(slots=True)
class Repairs:
    """Applies of one resource that repaired what another writer had changed. Asyncio loop."""

    _applies: dict[Ref, tuple[str, tuple[float, ...]]] = field(default_factory=dict)
    """Hash of the last apply, and the times of the latest repairs."""

    def note(self, wanted: Object, live: Object | None, now: float) -> bool:
        """Note an apply; returns whether the object has been repaired too often."""
        ref, sent = ref_of(wanted), digest(wanted, HASH_DIGITS)
        before, times = self._applies.get(ref, ("", ()))
        is_repair = live is not None and before == sent
        if is_repair:
            times = (*(time for time in times if now - time < REPAIRS_SECONDS), now)
        self._applies[ref] = sent, times
        return is_repair and len(times) >= MOST_REPAIRS


def holding(
    failures: Mapping[Ref, ApplyFailure], objects: Iterable[Object], snapshot: Snapshot
) -> dict[Ref, ApplyFailure]:
    """Failures of wanted objects that still hold."""
    found = ((ref_of(each), each) for each in objects)
    return {
        ref: failures[ref]
        for ref, each in found
        if ref in failures and failures[ref].holds(each, snapshot)
    }


def refusal(
    wanted: Object, error: RefusedError | ForbiddenError, snapshot: Snapshot
) -> ApplyFailure:
    """An object that the API server did not store because of this error."""
    cause = Cause.FORBIDDEN if isinstance(error, ForbiddenError) else Cause.REFUSED
    live = snapshot.children.get(ref_of(wanted))
    return _failure(cause, wanted, live, snapshot, REFUSED_SECONDS, str(error))


def contest(
    wanted: Object, live: Object | None, answer: Object, snapshot: Snapshot, repairs: Repairs
) -> ApplyFailure | None:
    """The failure of an apply that another writer undoes; None if it stays as far as is known."""
    is_too_often = repairs.note(wanted, live, snapshot.now)
    if (path := next(differences(answer, wanted), None)) is not None:
        cause = f"{path} is not stored as applied; look for a webhook."
    elif is_too_often:
        path = next(differences(live or {}, wanted), "metadata")
        cause = f"{path} is changed again after each repair; look for another writer."
    else:
        return None
    minutes = f"It is not repaired for {RETRY_SECONDS / 60:.0f} minutes."
    message = f"{wanted['kind']} {wanted['metadata']['name']}: {cause} {minutes}"
    return _failure(Cause.CONTESTED, wanted, answer, snapshot, RETRY_SECONDS, message)


def _failure(
    cause: Cause,
    wanted: Object,
    live: Object | None,
    snapshot: Snapshot,
    seconds: float,
    message: str,
) -> ApplyFailure:
    return ApplyFailure(
        cause=cause,
        message=message,
        digest=_digest_of(wanted),
        generation=snapshot.resource.generation,
        uid=_uid_of(live),
        retry_at=snapshot.now + seconds,
    )


def _digest_of(wanted: Object) -> str:
    return str(annotations_of(wanted).get(HASH_ANNOTATION, ""))


def _uid_of(live: Object | None) -> str:
    return "" if live is None else str(live["metadata"]["uid"])
