"""Conditions as values, and their form in a status. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ssd_operator.api.spec import Object

LONGEST_MESSAGE = 1024
"""Characters, of an Event too; quotations of registries and schedulers have no bound."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One statement about a resource, without its type; True is good."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word in CamelCase."""
    message: str
    """One sentence: actual value, allowed value, fix."""


def yes(reason: str, message: str) -> Condition:
    """A condition that holds."""
    return Condition("True", reason, message)


def no(reason: str, message: str) -> Condition:
    """A condition that does not hold."""
    return Condition("False", reason, message)


def unknown(reason: str, message: str) -> Condition:
    """A condition that cannot be decided."""
    return Condition("Unknown", reason, message)


def condition_in(status: Object, kind: str) -> Object:
    """A condition of a status; empty if it has none of this type."""
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found["type"] == kind), {})


def merge(old: Object, new: Mapping[str, Condition], generation: int, now: str) -> list[Object]:
    """Conditions of the new status: those of ``new``; a transition is a change of ``status``."""
    merged = []
    for kind, condition in new.items():
        found = condition_in(old, kind)
        is_same = found.get("status") == condition.status
        merged.append(
            {
                "type": kind,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message[:LONGEST_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": found.get("lastTransitionTime", now) if is_same else now,
            }
        )
    return merged
