"""Applies that did not bring about what was wanted, so that no pass repeats them. Pure.

A failure holds until what is wanted, the resource or the live object changes.

*Decision*: what is refused (422) is also sent again every ten minutes. *Because* the cause may be
gone without a change of any of our objects: a webhook, a policy. What is forbidden (403: a quota, a
policy, a missing right) is not stored: the next pass sends it again, with the queue's back-off.
A forbidden preflight is, for a minute: it delays one change, and no other work of the resource.

*Decision*: an object that another writer changes again and again is repaired ``MOST_REPAIRS`` times
an hour, then left as it is for ten minutes. *Because* each repair of a template replaces pods: a
controller that added one variable after each repair had a lone target replaced 59 times in 120 s.
*Not chosen*: a pause before each repair, because a change by hand is to be undone at once. *Revisit
when* users need the six repairs an hour raised.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ssd_operator.api.spec import Object
from ssd_operator.children.names import HASH_ANNOTATION
from ssd_operator.children.objects import HASH_DIGITS, digest
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, RefusedError, ref_of
from ssd_operator.observe.diff import differences
from ssd_operator.observe.facts import Observed, Ref

RETRY_SECONDS = 600.0
"""Until a refused or contested object is applied again although nothing has changed."""
FORBIDDEN_SECONDS = 60.0
"""Until a forbidden preflight is created again."""
MOST_REPAIRS = 6
"""Repairs of one object in ``REPAIRS_SECONDS``; the last of them begins a pause."""
REPAIRS_SECONDS = 3600.0


class Cause(StrEnum):
    """Why an apply did not bring about what was wanted."""

    REFUSED = "Refused"
    """The API server refused the object."""
    FORBIDDEN = "Forbidden"
    """A quota, a policy or a missing right prevents a preflight."""
    REVERTED = "Reverted"
    """The API server stored something else: a webhook or a default changed it."""
    CONTESTED = "Contested"
    """Another writer changes the object after each repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyFailure:
    """One object that is not applied for now."""

    cause: Cause
    message: str
    digest: str
    """Of what was wanted; empty if its annotation was edited away."""
    generation: int
    """Of the resource."""
    fingerprint: str
    """Of the live object; empty without one. It does not matter for contested objects."""
    retry_at: float
    """When the apply is repeated although nothing has changed, in seconds since the epoch."""

    def holds(self, wanted: Object, live: Object | None, generation: int, now: float) -> bool:
        """Whether applying ``wanted`` now would fail in the same way."""
        is_same = (self.digest, self.generation) == (_digest_of(wanted), generation)
        is_contested = self.cause is Cause.CONTESTED and live is not None
        is_unchanged = is_contested or self.fingerprint == _fingerprint_of(live)
        return is_same and now < self.retry_at and is_unchanged


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

    _sent: dict[Ref, str] = field(default_factory=dict)
    """Hash of the last apply."""
    _times: dict[Ref, tuple[float, ...]] = field(default_factory=dict)

    def note(self, wanted: Object, live: Object | None, now: float) -> bool:
        """Note an apply; returns whether the object has been repaired too often."""
        ref, sent = ref_of(wanted), digest(wanted, HASH_DIGITS)
        is_repair = live is not None and self._sent.get(ref) == sent
        self._sent[ref] = sent
        if is_repair:
            recent = (time for time in self._times.get(ref, ()) if now - time < REPAIRS_SECONDS)
            self._times[ref] = (*recent, now)
        return is_repair and len(self._times[ref]) >= MOST_REPAIRS


def holding(
    failures: Mapping[Ref, ApplyFailure],
    objects: Iterable[Object],
    observed: Observed,
    generation: int,
    now: float,
) -> dict[Ref, ApplyFailure]:
    """Failures of wanted objects that still hold."""
    wanted = {ref_of(each): each for each in objects}
    return {
        ref: failure
        for ref, failure in failures.items()
        if ref in wanted and failure.holds(wanted[ref], observed.children.get(ref), generation, now)
    }


def refusal(
    wanted: Object,
    live: Object | None,
    error: RefusedError | ForbiddenError,
    generation: int,
    now: float,
) -> ApplyFailure:
    """An object that the API server did not store because of this error."""
    cause, seconds = Cause.REFUSED, RETRY_SECONDS
    if isinstance(error, ForbiddenError):
        cause, seconds = Cause.FORBIDDEN, FORBIDDEN_SECONDS
    return _failure(cause, wanted, live, generation, now + seconds, str(error))


def reversion(wanted: Object, answer: Object, generation: int) -> ApplyFailure | None:
    """The failure of an apply that was answered with other contents; None if all is as wanted."""
    path = next(differences(answer, wanted), None)
    if path is None:
        return None
    message = f"{_title(wanted)}: {path} is not stored as applied; look for a webhook."
    return _failure(Cause.REVERTED, wanted, answer, generation, math.inf, message)


def contest(wanted: Object, live: Object | None, generation: int, now: float) -> ApplyFailure:
    """An object that has been repaired too often; ``live`` is as the other writer changed it."""
    path = next(differences(live or {}, wanted), "metadata")
    message = (
        f"{_title(wanted)}: {path} is changed again after each repair; look for another "
        f"writer. It is not repaired for {RETRY_SECONDS / 60:.0f} minutes."
    )
    return _failure(Cause.CONTESTED, wanted, live, generation, now + RETRY_SECONDS, message)


def _failure(
    cause: Cause,
    wanted: Object,
    live: Object | None,
    generation: int,
    retry_at: float,
    message: str,
) -> ApplyFailure:
    return ApplyFailure(
        cause=cause,
        message=message,
        digest=_digest_of(wanted),
        generation=generation,
        fingerprint=_fingerprint_of(live),
        retry_at=retry_at,
    )


def _digest_of(wanted: Object) -> str:
    return str((wanted["metadata"].get("annotations") or {}).get(HASH_ANNOTATION, ""))


def _fingerprint_of(live: Object | None) -> str:
    """Hash of what people and webhooks edit of an object: not its status and resource version."""
    if live is None:
        return ""
    edited = ("uid", "labels", "annotations", "ownerReferences")
    metadata = {name: live["metadata"].get(name) for name in edited}
    rest = {name: value for name, value in live.items() if name not in ("metadata", "status")}
    return hashlib.sha256(json.dumps([metadata, rest], sort_keys=True).encode()).hexdigest()


def _title(wanted: Object) -> str:
    return f"{wanted['kind']} {wanted['metadata']['name']}"
