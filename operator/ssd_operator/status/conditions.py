"""Conditions as values, and how they become those of a status."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ssd_operator.api.spec import Object

LONGEST_MESSAGE = 1024
"""Characters; the words of registries and schedulers have no bound of their own."""


class Truth(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One statement about a resource; True is good."""

    kind: str
    truth: Truth
    reason: str
    """One word in CamelCase."""
    message: str
    """One sentence: what was found, what is allowed, the cure."""

    @property
    def holds(self) -> bool:
        """Whether it is True."""
        return self.truth is Truth.TRUE


def yes(kind: str, reason: str, message: str) -> Condition:
    """A condition that holds."""
    return Condition(kind, Truth.TRUE, reason, message)


def no(kind: str, reason: str, message: str) -> Condition:
    """A condition that does not hold."""
    return Condition(kind, Truth.FALSE, reason, message)


def unknown(kind: str, reason: str, message: str) -> Condition:
    """A condition about which nothing can be said."""
    return Condition(kind, Truth.UNKNOWN, reason, message)


def condition_in(status: Object, kind: str) -> Object:
    """A condition of a status; empty if it has none of this kind."""
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found["type"] == kind), {})


def first_not_true(conditions: Iterable[Condition]) -> Condition | None:
    """The first that does not hold, for one that stands on others."""
    return next((condition for condition in conditions if not condition.holds), None)


def merge(
    old: Sequence[Object], new: Sequence[Condition], generation: int, now: str
) -> list[Object]:
    """Conditions of the new status: those of ``new``, and no other.

    Args:
        old: of the present status.
        new: each kind once.
        generation: of the resource that they speak of.
        now: RFC 3339; the time of a transition, which is a change of the truth and nothing less.
    """
    before = {found.get("type"): found for found in old}
    return [
        {
            "type": condition.kind,
            "status": str(condition.truth),
            "reason": condition.reason,
            "message": condition.message[:LONGEST_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": _since(condition, before.get(condition.kind, {}), now),
        }
        for condition in new
    ]


def _since(condition: Condition, before: Object, now: str) -> str:
    has_flipped = before.get("status") != str(condition.truth)
    return now if has_flipped else str(before.get("lastTransitionTime", now))
