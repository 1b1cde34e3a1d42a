"""What all resources together are like: how many hold what, and since when one is in trouble."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import Trouble
from ssd_operator.observe.pod_state import to_seconds
from ssd_operator.runtime import metrics

_FOR_SPEED = frozenset({"SpeculationActive", "ScalingActive", "DraftCapacity"})
"""Conditions that matter once a target serves, and that a person gives up who pauses a resource."""
_FOR_DRAFTS = frozenset({"SpeculationActive"})
"""Conditions that no draft is wanted for."""

_UNDER_WAY = frozenset({Trouble.FETCHING_MODEL, Trouble.LOADING})
"""Reasons that turn into another one by themselves."""

Pair = tuple[str, str]
"""Type and status of a condition."""


def troubles(status: Object) -> Iterator[tuple[Pair, float]]:
    """Conditions that do not hold and were not given up on purpose, and since when.

    Args:
        status: of a resource.
    """
    conditions = {each["type"]: each for each in status["conditions"]}
    ready = conditions.get("Ready", {})
    is_paused = conditions.get("Progressing", {}).get("reason") == "Paused"
    given_up = frozenset() if ready.get("status") == "True" and not is_paused else _FOR_SPEED
    if not status.get("draft", {}).get("desiredReplicas"):
        given_up |= _FOR_DRAFTS
    for kind, found in conditions.items():
        if found["status"] == "True" or kind in given_up or _is_under_way(found, conditions):
            continue
        times = [found, ready] if kind in _FOR_SPEED else [found]
        yield (kind, found["status"]), max(_since(each) for each in times)


def _is_under_way(found: Object, conditions: Mapping[str, Object]) -> bool:
    """Whether pods fetch or load within their own timeouts, which may be hours."""
    is_getting_on = conditions.get("Progressing", {}).get("status") != "False"
    return found["reason"] in _UNDER_WAY and is_getting_on


def _since(condition: Object) -> float:
    return to_seconds(condition["lastTransitionTime"]) or 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """One resource."""

    pairs: frozenset[Pair]
    troubles: Mapping[Pair, float]


class FleetMetrics:
    """All resources, kept in ``RESOURCES`` and ``TROUBLE_SINCE``."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._shown: set[Pair] = set()
        self._troubled: set[Pair] = set()

    def put(self, key: Hashable, status: Object) -> None:
        """This is the status of a resource now."""
        pairs = frozenset((each["type"], each["status"]) for each in status["conditions"])
        entry = _Entry(pairs, dict(troubles(status)))
        if self._entries.get(key) != entry:
            self._entries[key] = entry
            self._show()

    def drop(self, key: Hashable) -> None:
        """A resource is gone."""
        if self._entries.pop(key, None) is not None:
            self._show()

    def _show(self) -> None:
        entries = self._entries.values()
        counts = Counter(pair for entry in entries for pair in entry.pairs)
        self._shown |= counts.keys()
        for pair in self._shown:
            metrics.RESOURCES.labels(*pair).set(counts[pair])
        since: dict[Pair, float] = {}
        for entry in entries:
            for pair, seconds in entry.troubles.items():
                since[pair] = min(seconds, since.get(pair, seconds))
        for pair in self._troubled - since.keys():
            metrics.TROUBLE_SINCE.remove(*pair)
        for pair, seconds in since.items():
            metrics.TROUBLE_SINCE.labels(*pair).set(seconds)
        self._troubled = set(since)
