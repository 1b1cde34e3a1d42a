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
from typing import Literal

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

Cause = Literal["Refused", "Forbidden", "Contested"]
Version = tuple[str, int, str]
"""Hash of a wanted object, generation of its resource, uid of the live object."""


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """One object that is not applied for now.

    Refused: by the API server. Forbidden: a preflight, by a quota, a policy or a missing right.
    Contested: a webhook changes it as it is stored, or another writer after each repair.
    """

    cause: Cause
    message: str
    version: Version
    """That was applied."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""


@dataclass(slots=True)
class Results:
    """What became of a plan. The execution fills it."""

    applied: set[Ref] = field(default_factory=set)
    """Objects that the API server stored in this pass."""
    failures: dict[Ref, ApplyFailure] = field(default_factory=dict)
    """Those that hold after the pass."""
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """Errors of calls (403, or without an answer for long). The next pass repeats these calls."""
    interruption: tuple[Ref, ClusterError] | None = None
    """The object and the error of the call that ended the pass before its time: no answer, a busy
    server, or another writer who was faster."""
    is_scaled: bool = False
    """Whether the number of drafts was written to the resource."""


Repairs = dict[Ref, tuple[str, tuple[float, ...]]]
"""Of each object the hash of what was applied last, and the times of the latest repairs of what
another writer had changed."""


def holding(
    failures: Mapping[Ref, ApplyFailure], objects: Iterable[Object], snapshot: Snapshot
) -> dict[Ref, ApplyFailure]:
    """Failures of wanted objects that an apply would repeat; one whose name is taken has none."""
    return {
        ref: found
        for each in objects
        if (found := failures.get(ref := ref_of(each))) is not None
        and ref not in snapshot.foreign
        and found.version == _version(each, snapshot.children.get(ref), snapshot)
        and snapshot.now < found.retry_at
    }


def refusal(
    wanted: Object, error: RefusedError | ForbiddenError, snapshot: Snapshot
) -> ApplyFailure:
    """An object that the API server did not store because of this error."""
    version = _version(wanted, snapshot.children.get(ref_of(wanted)), snapshot)
    cause: Cause = "Forbidden" if isinstance(error, ForbiddenError) else "Refused"
    return ApplyFailure(cause, str(error), version, snapshot.now + REFUSED_SECONDS)


def contest(
    wanted: Object, live: Object | None, answer: Object, snapshot: Snapshot, repairs: Repairs
) -> ApplyFailure | None:
    """Note an apply; returns its failure if another writer undoes it, as far as is known."""
    ref, version = ref_of(wanted), _version(wanted, answer, snapshot)
    # The annotation is the live one's while a template waits, whatever else changes.
    sent = digest(wanted, HASH_DIGITS)
    before, times = repairs.get(ref, ("", ()))
    is_repair = live is not None and before == sent
    if is_repair:
        times = (*(each for each in times if snapshot.now - each < REPAIRS_SECONDS), snapshot.now)
    repairs[ref] = sent, times
    if (path := next(differences(answer, wanted), None)) is not None:
        cause = f"{path} is not stored as applied; look for a webhook."
    elif is_repair and len(times) >= MOST_REPAIRS:
        path = next(differences(live or {}, wanted), "metadata")
        cause = f"{path} is changed again after each repair; look for another writer."
    else:
        return None
    minutes = f"It is not repaired for {RETRY_SECONDS / 60:.0f} minutes."
    message = f"{wanted['kind']} {wanted['metadata']['name']}: {cause} {minutes}"
    return ApplyFailure("Contested", message, version, snapshot.now + RETRY_SECONDS)


def _version(wanted: Object, live: Object | None, snapshot: Snapshot) -> Version:
    sent = str(annotations_of(wanted).get(HASH_ANNOTATION, ""))
    uid = "" if live is None else str(live["metadata"]["uid"])
    return sent, snapshot.resource.generation, uid
