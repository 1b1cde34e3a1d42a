"""Whether a status is worth a write: what a person or a machine waits for is, at once."""

import re
from collections.abc import Iterator, Mapping

from ssd_operator.api.spec import Object

SHORTEST_SECONDS = 1.0
"""Between any two writes of one status."""
LINK_SECONDS = 30.0
"""Between two writes for the sake of links' words and first measurements."""
MEASUREMENT_SECONDS = 300.0
"""Between two writes for the sake of links' later measurements and the numbers in their words."""
MEASUREMENT_FACTOR = 2.0
"""By which a link's measurement must move to be told: less is noise, also on an idle machine."""
SPECULATION_SECONDS = 60.0
"""Between two writes for the sake of speculation's figures."""
SPECULATION_MOVEMENT = 0.05
"""By how much a figure of speculation must move to be told."""
_TIMES = frozenset({"lastTransitionTime", "lastScaleTime"})
_ROUND_TRIP = "roundTripMicroseconds"
_LINK_WORDS = "reason"
"""It may hold numbers, which are new each time a link is tried; its state says when it matters."""
_NUMBER = re.compile(r"[\d.]+")


def needs_write(old: Object, new: Object, seconds_since_write: float = float("inf")) -> bool:
    """Whether ``new`` is to be written over ``old``.

    Args:
        old: the status as it is.
        new: as it would be.
        seconds_since_write: since the last write; a movement that must wait is found again by the
            next pass.
    """
    if seconds_since_write < SHORTEST_SECONDS:
        return False
    return (
        _facts(old) != _facts(new)
        or (seconds_since_write >= LINK_SECONDS and _have_links_news(old, new))
        or (seconds_since_write >= MEASUREMENT_SECONDS and _have_links_moved(old, new))
        or (seconds_since_write >= SPECULATION_SECONDS and _has_speculation_moved(old, new))
    )


def _facts(status: Object) -> Object:
    """The status without times and without measurements."""
    kept = {name: _timeless(value) for name, value in status.items() if name != "speculation"}
    links = status.get("links") or []
    kept["links"] = [
        {name: value for name, value in link.items() if name not in (_ROUND_TRIP, _LINK_WORDS)}
        for link in links
    ]
    return kept


def _timeless(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _timeless(part) for name, part in value.items() if name not in _TIMES}
    if isinstance(value, list):
        return [_timeless(part) for part in value]
    return value


def _pairs(old: Object, new: Object) -> Iterator[tuple[Object, Object]]:
    return zip(old.get("links") or [], new.get("links") or [], strict=True)


def _have_links_news(old: Object, new: Object) -> bool:
    """Whether a link has other words, numbers in them aside, or its first measurement."""
    return any(
        _NUMBER.sub("", before.get(_LINK_WORDS, "")) != _NUMBER.sub("", after.get(_LINK_WORDS, ""))
        or (after.get(_ROUND_TRIP) and not before.get(_ROUND_TRIP))
        for before, after in _pairs(old, new)
    )


def _have_links_moved(old: Object, new: Object) -> bool:
    return any(
        before.get(_LINK_WORDS) != after.get(_LINK_WORDS)
        or _has_moved(before.get(_ROUND_TRIP, 0), after.get(_ROUND_TRIP, 0))
        for before, after in _pairs(old, new)
    )


def _has_moved(before: float, after: float) -> bool:
    return max(before, after) >= MEASUREMENT_FACTOR * min(before, after) > 0


def _has_speculation_moved(old: Object, new: Object) -> bool:
    before, after = old.get("speculation") or {}, new.get("speculation") or {}
    return before.keys() != after.keys() or any(
        abs(float(after[name]) - float(before[name])) >= SPECULATION_MOVEMENT for name in after
    )
