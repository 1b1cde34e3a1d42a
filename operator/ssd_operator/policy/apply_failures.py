"""Applies that did not bring about what was wanted, remembered so that no pass repeats them. Pure.

Both kinds hold until something changes that may make a difference: what we want of the object, the
resource, or the object itself.

*Decision*: what is refused (422) is sent again every ten minutes besides. *Because* what stood in
the way may be gone without any of our objects having changed: a webhook, a policy. What is
forbidden (403: a quota, a policy, a missing right) is not remembered: the next pass sends it again,
with the queue's back-off. But a preflight that is forbidden holds its change back for a while.

*Decision*: an object that another writer changes again and again is repaired a few times and then
left as it is for ten minutes. *Because* each repair of a template replaces pods: a controller that
added one variable after each repair had a lone target replaced 59 times in 120 s. *Not chosen*: a
pause before each repair, because a change by hand is to be undone at once. *Revisit when* users
need the six repairs an hour raised.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION
from ssd_operator.children.objects import HASH_DIGITS, digest
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, RefusedError, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.policy.preflight import RETRY_SECONDS as PREFLIGHT_SECONDS

RETRY_SECONDS = 600.0
"""Until a refused object is sent again although nothing that we know of has changed."""
MOST_REPAIRS = 6
"""Repairs of one object in ``REPAIRS_SECONDS``; from this one on each is followed by a pause."""
REPAIRS_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The API server refused an object."""

    digest: str
    """Of what was wanted."""
    generation: int
    """Of the resource: editing it asks for another try."""
    uid: str
    """Of the live object; empty if there is none."""
    message: str
    retry_at: float
    """When the same object is sent again all the same, in seconds since the epoch."""
    may_pass: bool = False
    """Whether it is no fault of the resource."""


@dataclass(frozen=True, slots=True)
class Reversion:
    """The API server took an object and stored another: a webhook or a default had its way."""

    digest: str
    generation: int
    fingerprint: str
    """Of what was stored; empty for anything that will be stored."""
    message: str
    retry_at: float = math.inf


@dataclass(slots=True)
class Repairs:
    """Applies of one resource that repaired what another writer had changed. Asyncio loop."""

    _sent: dict[Ref, str] = field(default_factory=dict)
    """Hash of what was sent last."""
    _times: dict[Ref, tuple[float, ...]] = field(default_factory=dict)

    def note(self, wanted: Object, live: Object | None, now: float) -> bool:
        """Note an apply, to an object or of a new one.

        Returns:
            Whether it is a repair, and the object has been repaired too often.
        """
        ref, sent = ref_of(wanted), digest(wanted, HASH_DIGITS)
        is_repair = live is not None and self._sent.get(ref) == sent
        self._sent[ref] = sent
        if is_repair:
            recent = (time for time in self._times.get(ref, ()) if now - time < REPAIRS_SECONDS)
            self._times[ref] = (*recent, now)
        return is_repair and len(self._times[ref]) >= MOST_REPAIRS


@dataclass(slots=True)
class Results:
    """What became of a plan. The execution fills it."""

    applied: set[Ref] = field(default_factory=set)
    """Objects that the API server stored in this pass."""
    rejected: dict[Ref, Rejection] = field(default_factory=dict)
    reverted: dict[Ref, Reversion] = field(default_factory=dict)
    forbidden: dict[Ref, str] = field(default_factory=dict)
    """Messages of the API server (403). The next pass sends these calls again."""
    foreign: set[Ref] = field(default_factory=set)
    """Names that somebody else's objects have, as only the execution has found."""
    interruption: tuple[Ref, ClusterError] | None = None
    """The object and the error of the call that ended the pass before its time: no answer, a busy
    server, or another writer who was faster."""
    is_scaled: bool = False
    """Whether the number of drafts was written to the resource."""


FailureT = TypeVar("FailureT", Rejection, Reversion)


def still_valid(
    failures: Mapping[Ref, FailureT], objects: Sequence[Object], generation: int, now: float
) -> dict[Ref, FailureT]:
    """Those of objects that are wanted as they were, by a resource that is as it was."""
    digests = {ref_of(each): digest_of(each) for each in objects}
    return {
        ref: failure
        for ref, failure in failures.items()
        if (digests.get(ref), generation) == (failure.digest, failure.generation)
        and now < failure.retry_at
    }


def still_refused(
    rejected: Mapping[Ref, Rejection], children: Mapping[Ref, Object]
) -> dict[Ref, Rejection]:
    """Those whose objects are still the same, or still missing."""
    return {ref: each for ref, each in rejected.items() if each.uid == _uid_of(ref, children)}


def rejection_of(
    wanted: Object,
    error: RefusedError | ForbiddenError,
    observed: Observed,
    generation: int,
    now: float,
) -> Rejection:
    """What is remembered of a refusal: of a preflight by a quota or a policy that it may pass."""
    may_pass = isinstance(error, ForbiddenError)
    return Rejection(
        digest=digest_of(wanted),
        generation=generation,
        uid=_uid_of(ref_of(wanted), observed.children),
        message=str(error),
        retry_at=now + (PREFLIGHT_SECONDS if may_pass else RETRY_SECONDS),
        may_pass=may_pass,
    )


def reversion_of(wanted: Object, answer: Object, generation: int) -> Reversion | None:
    """What an apply did not bring about, by its answer; None if it did all."""
    path = next(differences(answer, wanted), None)
    if path is None:
        return None
    ref = ref_of(wanted)
    message = f"{ref.kind} {ref.name}: {path} is not stored as applied; look for a webhook."
    return Reversion(digest_of(wanted), generation, fingerprint_of(answer), message)


def contest_of(wanted: Object, live: Object | None, generation: int, now: float) -> Reversion:
    """An object that has been repaired too often, and how another writer had changed it."""
    ref, path = ref_of(wanted), next(differences(live or {}, wanted), "metadata")
    message = (
        f"{ref.kind} {ref.name}: {path} is changed again after each repair; look for another "
        f"writer. It is not repaired for {RETRY_SECONDS / 60:.0f} minutes."
    )
    retry_at = now + RETRY_SECONDS
    return Reversion(digest_of(wanted), generation, "", message, retry_at=retry_at)


def standing(reversions: Mapping[Ref, Reversion], children: Mapping[Ref, Object]) -> frozenset[Ref]:
    """Those whose objects are left as they are, or as they were: an apply would change nothing."""
    return frozenset(
        ref
        for ref, reversion in reversions.items()
        if ref in children and reversion.fingerprint in ("", fingerprint_of(children[ref]))
    )


def digest_of(wanted: Object) -> str:
    """The hash of all that we want of an object."""
    # A preflight that has passed is wanted as it is, and somebody may have edited it.
    return str((wanted["metadata"].get("annotations") or {}).get(HASH_ANNOTATION, ""))


def fingerprint_of(live: Object) -> str:
    """Hash of what hands and webhooks edit of an object.

    Not its resource version, which each new status moves.
    """
    edited = ("uid", "labels", "annotations", "ownerReferences")
    metadata = {name: live["metadata"].get(name) for name in edited}
    rest = {name: value for name, value in live.items() if name not in ("metadata", "status")}
    text = json.dumps([metadata, rest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _uid_of(ref: Ref, children: Mapping[Ref, Object]) -> str:
    live = children.get(ref)
    return "" if live is None else str(live["metadata"].get("uid", ""))
