"""Whether a status is worth a write: what a person or a machine waits for is, at once."""

from collections.abc import Mapping

from ssd_operator.spec import Object

SHORTEST_SECONDS = 1.0
"""Between any two writes of one status."""
LINK_SECONDS = 30.0
"""Between two writes for the sake of measurements of links."""
LINK_MOVEMENT = 0.1
"""Part by which a link's measurement must move to be told."""
SPECULATION_SECONDS = 60.0
"""Between two writes for the sake of speculation's figures."""
SPECULATION_MOVEMENT = 0.05
"""By how much a figure of speculation must move to be told."""
_TIMES = frozenset({"lastTransitionTime", "lastScaleTime"})
_LINK_MEASUREMENTS = ("roundTripMicroseconds", "bandwidthMegabytesPerSecond")
_LINK_WORDS = "reason"
"""It may hold numbers, which are new each time a link is tried; its state says when it matters."""


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
        or (seconds_since_write >= LINK_SECONDS and _have_links_moved(old, new))
        or (seconds_since_write >= SPECULATION_SECONDS and _has_speculation_moved(old, new))
    )


def _facts(status: Object) -> Object:
    """The status without times and without measurements."""
    kept = {name: _timeless(value) for name, value in status.items() if name != "speculation"}
    links = status.get("links") or []
    kept["links"] = [
        {
            name: value
            for name, value in link.items()
            if name not in _LINK_MEASUREMENTS and name != _LINK_WORDS
        }
        for link in links
    ]
    return kept


def _timeless(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _timeless(part) for name, part in value.items() if name not in _TIMES}
    if isinstance(value, list):
        return [_timeless(part) for part in value]
    return value


def _have_links_moved(old: Object, new: Object) -> bool:
    pairs = list(zip(old.get("links") or [], new.get("links") or [], strict=True))
    return any(before.get(_LINK_WORDS) != after.get(_LINK_WORDS) for before, after in pairs) or any(
        abs(after.get(name, 0) - before.get(name, 0)) >= LINK_MOVEMENT * before.get(name, 0)
        and after.get(name, 0) != before.get(name, 0)
        for before, after in pairs
        for name in _LINK_MEASUREMENTS
    )


def _has_speculation_moved(old: Object, new: Object) -> bool:
    before, after = old.get("speculation") or {}, new.get("speculation") or {}
    return before.keys() != after.keys() or any(
        abs(float(after[name]) - float(before[name])) >= SPECULATION_MOVEMENT for name in after
    )
