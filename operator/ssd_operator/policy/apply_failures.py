"""Applies that did not bring about what was wanted, so that no pass repeats them. Pure.

A failure holds for a while, or until what is wanted, the resource or the uid of the live object
changes. What is forbidden (a quota, a policy, a missing right) is not stored: the next pass sends
it again, with the queue's back-off. A forbidden preflight is: it delays one change alone.

*Decision*: a field of a Deployment that another writer changes again and again is repaired
``MOST_REPAIRS`` times an hour, then left as it is for ten minutes, with the pod template if the
field is in it. Fields are counted one by one, and fields of objects without pods have no limit. A
field that a webhook changes in the apply itself is left for ten minutes, in any object. *Because*
each repair of a template replaces pods: a controller that added one variable after each repair had
a lone target replaced 59 times in 120 s. With one limit for all objects and fields, a sixth edit of
a Service by hand left its endpoint broken for ten minutes. *Not chosen*: a pause before each
repair, because a change by hand is to be undone at once. *Revisit when* users need the six repairs
an hour raised.
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
"""Until a contested field is repaired again."""
MOST_REPAIRS = 6
"""Repairs of one field in ``REPAIRS_SECONDS``; the last of them begins a pause."""
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
    """That was applied."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""
    fields: frozenset[str] = frozenset()
    """Paths of the contested fields; other differences of the object are still repaired."""

    @property
    def is_of_template(self) -> bool:
        """Whether the pod template is left as it is."""
        return any(path.startswith("spec.template") for path in self.fields)


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


@dataclass(frozen=True, slots=True)
class RepairLog:
    """Repairs of one object, which another writer had changed."""

    applied: str = ""
    """Hash of what was applied last."""
    times: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of each field in the last ``REPAIRS_SECONDS``, oldest first."""


Repairs = dict[Ref, RepairLog]


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
    """Record an apply; returns its failure if another writer undoes it, as far as is known."""
    ref, now = ref_of(wanted), snapshot.now
    # The annotation is the live one's while a template waits, whatever else changes.
    sent, before = digest(wanted, HASH_DIGITS), repairs.get(ref, RepairLog())
    is_repair = live is not None and before.applied == sent
    repaired = frozenset(differences(live or {}, wanted)) if is_repair else frozenset()
    times = _times(before, repaired, now)
    repairs[ref] = RepairLog(sent, times)
    retry_at = now + RETRY_SECONDS
    if reverted := frozenset(differences(answer, wanted)):
        cause = f"{min(reverted)} is not stored as applied; look for a webhook."
    elif reverted := frozenset(path for path in repaired if len(times[path]) >= MOST_REPAIRS):
        cause = f"{min(reverted)} is changed again after each repair; look for another writer."
        retry_at = retry_at if ref.kind == "Deployment" else now
    else:
        return None
    pause = f" It is repaired again at {to_text(retry_at)}." if retry_at > now else ""
    version = _version(wanted, answer, snapshot)
    return ApplyFailure(
        "Contested", f"{ref.kind} {ref.name}: {cause}{pause}", version, retry_at, reverted
    )


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
