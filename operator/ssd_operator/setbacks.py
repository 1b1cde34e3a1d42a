"""Applies that did not bring about what was wanted, remembered so that no pass repeats them. Pure.

Both kinds hold until something changes that may make a difference: what we want of the object, the
resource, or, for what somebody reverted, the object itself.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ssd_operator.cluster import ref_of
from ssd_operator.covers import differences
from ssd_operator.events import Event, Severity
from ssd_operator.facts import Ref
from ssd_operator.names import HASH_ANNOTATION
from ssd_operator.spec import Object


@dataclass(frozen=True, slots=True)
class Rejection:
    """The API server refused an object."""

    digest: str
    """Of what was wanted."""
    generation: int
    """Of the resource: editing it asks for another try."""
    message: str
    retry_at: float = math.inf
    """When the same object may be sent again all the same: the refusal may have passed."""


@dataclass(frozen=True, slots=True)
class Reversion:
    """The API server took an object and stored another: a webhook or a default had its way."""

    digest: str
    generation: int
    fingerprint: str
    """Of what was stored."""
    message: str
    is_told: bool = False
    retry_at: float = math.inf


SetbackT = TypeVar("SetbackT", Rejection, Reversion)


def still_valid(
    setbacks: Mapping[Ref, SetbackT], objects: Sequence[Object], generation: int, now: float
) -> dict[Ref, SetbackT]:
    """Those of objects that are wanted as they were, by a resource that is as it was."""
    digests = {ref_of(each): digest_of(each) for each in objects}
    return {
        ref: setback
        for ref, setback in setbacks.items()
        if (digests.get(ref), generation) == (setback.digest, setback.generation)
        and now < setback.retry_at
    }


def reversion_of(wanted: Object, answer: Object, generation: int) -> Reversion | None:
    """What an apply did not bring about, by its answer; None if it did all."""
    path = next(differences(answer, wanted), None)
    if path is None:
        return None
    ref = ref_of(wanted)
    message = f"{ref.kind} {ref.name}: {path} is not stored as applied; look for a webhook."
    return Reversion(digest_of(wanted), generation, fingerprint_of(answer), message)


def standing(reversions: Mapping[Ref, Reversion], children: Mapping[Ref, Object]) -> frozenset[Ref]:
    """Those whose objects nobody has edited since: another apply would change nothing."""
    return frozenset(
        ref
        for ref, reversion in reversions.items()
        if ref in children and fingerprint_of(children[ref]) == reversion.fingerprint
    )


def reversion_events(reversions: Mapping[Ref, Reversion]) -> list[Event]:
    """Of those that have not been told."""
    return [
        Event(Severity.WARNING, "ApplyReverted", reversion.message)
        for _, reversion in sorted(reversions.items())
        if not reversion.is_told
    ]


def digest_of(wanted: Object) -> str:
    """The hash of all that we want of an object."""
    return str(wanted["metadata"]["annotations"][HASH_ANNOTATION])


def fingerprint_of(live: Object) -> str:
    """Hash of what hands and webhooks edit of an object.

    Not its resource version, which each new status moves.
    """
    edited = ("uid", "labels", "annotations", "ownerReferences")
    metadata = {name: live["metadata"].get(name) for name in edited}
    rest = {name: value for name, value in live.items() if name not in ("metadata", "status")}
    text = json.dumps([metadata, rest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
