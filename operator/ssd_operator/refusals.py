"""What the API server does not take, and how long that is believed. Pure.

A refused object (422) is not sent again in each pass. *Decision*: but every ten minutes, and at
once when the resource changes, we want another object, or the live one is another. *Because* what
stood in the way may be gone without any of our objects having changed: a webhook, an immutable
field of an object that somebody has deleted. What is forbidden (403: a quota, a policy, a missing
right) is sent again by the next pass, which comes with the queue's back-off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssd_operator.census import Census
from ssd_operator.cluster import ForbiddenError, RefusedError, ref_of
from ssd_operator.facts import Observed, Ref
from ssd_operator.names import HASH_ANNOTATION
from ssd_operator.preflight import RETRY_SECONDS as PREFLIGHT_SECONDS
from ssd_operator.spec import Object

RETRY_SECONDS = 600.0
"""Until a refused object is sent again although nothing that we know of has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The API server refused an object: not to be sent again while all this holds."""

    digest: str
    """Of all that we want of it."""
    generation: int
    """Of the resource."""
    uid: str
    """Of the live object; empty if there is none."""
    retry_at: float
    """Seconds since the epoch."""
    message: str
    may_pass: bool = False
    """Whether it is no fault of the resource."""


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
        digest=_digest_of(wanted),
        generation=generation,
        uid=_uid_of(ref_of(wanted), observed),
        retry_at=now + (PREFLIGHT_SECONDS if may_pass else RETRY_SECONDS),
        message=str(error),
        may_pass=may_pass,
    )


def still_refused(
    rejected: Mapping[Ref, Rejection], objects: Sequence[Object], census: Census
) -> dict[Ref, Rejection]:
    """Those of the last passes that hold for what is wanted now."""
    digests = {ref_of(each): _digest_of(each) for each in objects}
    return {
        ref: rejection
        for ref, rejection in rejected.items()
        if digests.get(ref) == rejection.digest
        and rejection.generation == census.resource.generation
        and rejection.uid == _uid_of(ref, census.observed)
        and census.now < rejection.retry_at
    }


def _digest_of(wanted: Object) -> str:
    return str(wanted["metadata"]["annotations"][HASH_ANNOTATION])


def _uid_of(ref: Ref, observed: Observed) -> str:
    live = observed.children.get(ref)
    return "" if live is None else str(live["metadata"].get("uid", ""))
