"""Whether a status is written: state at once, measurements after a while. Pure."""

import re
from collections.abc import Iterator, Mapping

from ssd_operator.api.spec import Object

SHORTEST_SECONDS = 1.0
"""Between any two writes of one status."""
MEASUREMENT_SECONDS = 300.0
"""Between two writes only because of measured values of links."""
MEASUREMENT_FACTOR = 2.0
"""By which a measurement of a link must move: less is noise, also on an idle machine."""
SPECULATION_SECONDS = 60.0
"""Between two writes only because of speculation figures."""
SPECULATION_MOVEMENT = 0.05
"""By which a speculation figure must move."""
_TIMES = frozenset({"lastTransitionTime", "lastScaleTime"})
_ROUND_TRIP = "roundTripMicroseconds"
_NUMBER = re.compile(r"[\d.]+")


def needs_write(old: Object, new: Object, seconds_since_write: float = float("inf")) -> bool:
    """Whether ``new`` is to be written over ``old``.

    Args:
        old: the present status.
        new: the one that this pass derived.
        seconds_since_write: since the last write. A later pass finds a change that must wait.
    """
    if seconds_since_write < SHORTEST_SECONDS:
        return False
    return (
        _state(old) != _state(new)
        or (seconds_since_write >= MEASUREMENT_SECONDS and _have_links_moved(old, new))
        or (seconds_since_write >= SPECULATION_SECONDS and _has_speculation_moved(old, new))
    )


def _state(status: Object) -> Object:
    """The status without times and without the values of measurements."""
    kept = {name: _timeless(value) for name, value in status.items() if name != "speculation"}
    kept["links"] = [
        link
        | {
            # A reason may contain numbers that are new at each attempt.
            "reason": _NUMBER.sub("", link.get("reason", "")),
            _ROUND_TRIP: link.get(_ROUND_TRIP, 0) > 0,
        }
        for link in status.get("links") or []
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


def _have_links_moved(old: Object, new: Object) -> bool:
    return any(
        before.get("reason") != after.get("reason")
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
