"""Conditions as values, and their form in a status. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ssd_operator.api.spec import Object

LONGEST_MESSAGE = 1024
"""Characters; quotations of registries and schedulers have no bound of their own."""


class Truth(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    """One statement about a resource, without its type; True is good."""

    truth: Truth
    reason: str
    """One word in CamelCase."""
    message: str
    """One sentence: actual value, allowed value, fix."""

    @property
    def holds(self) -> bool:
        """Whether it is True."""
        return self.truth is Truth.TRUE


def yes(reason: str, message: str) -> Condition:
    """A condition that holds."""
    return Condition(Truth.TRUE, reason, message)


def no(reason: str, message: str) -> Condition:
    """A condition that does not hold."""
    return Condition(Truth.FALSE, reason, message)


def unknown(reason: str, message: str) -> Condition:
    """A condition that cannot be decided."""
    return Condition(Truth.UNKNOWN, reason, message)


def condition_in(status: Object, kind: str) -> Object:
    """A condition of a status; empty if it has none of this type."""
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found["type"] == kind), {})


def merge(old: Object, new: Mapping[str, Condition], generation: int, now: str) -> list[Object]:
    """Conditions of the new status: those of ``new``; a transition is a change of ``status``."""
    merged = []
    for kind, condition in new.items():
        found = condition_in(old, kind)
        is_same = found.get("status") == str(condition.truth)
        merged.append(
            {
                "type": kind,
                "status": str(condition.truth),
                "reason": condition.reason,
                "message": condition.message[:LONGEST_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": found.get("lastTransitionTime", now) if is_same else now,
            }
        )
    return merged
