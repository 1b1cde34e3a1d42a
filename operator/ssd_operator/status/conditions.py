"""Conditions as values, and their form in a status. Pure."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

from ssd_operator.api.spec import Object

LONGEST_MESSAGE = 1024
"""Characters, of an Event too; quotations of registries and schedulers have no bound."""


class Condition(NamedTuple):
    """One statement about a resource, without its type; True is good, except for NotWorthwhile."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word in CamelCase."""
    message: str
    """One sentence: actual value, allowed value, fix."""


yes = partial(Condition, "True")
no = partial(Condition, "False")
unknown = partial(Condition, "Unknown")


def condition_in(status: Object, kind: str) -> Object:
    """A condition of a status; empty if it has none of this type."""
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found["type"] == kind), {})


def merge(old: Object, new: Mapping[str, Condition], generation: int, now: str) -> list[Object]:
    """Return the conditions ``new`` as objects.

    ``lastTransitionTime`` changes only if ``status`` changes.
    """
    return [
        {
            "type": kind,
            "status": each.status,
            "reason": each.reason,
            "message": each.message[:LONGEST_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": found.get("lastTransitionTime", now)
            if (found := condition_in(old, kind)).get("status") == each.status
            else now,
        }
        for kind, each in new.items()
    ]
