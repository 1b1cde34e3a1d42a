"""Metrics over all resources: conditions by status, and since when one has failed."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import Trouble
from ssd_operator.observe.pod_state import to_seconds
from ssd_operator.runtime import metrics

_FOR_SPEED = frozenset({"SpeculationActive", "ScalingActive", "DraftCapacity"})
"""Conditions that only count once a target serves and while the resource is not paused."""
_FOR_DRAFTS = frozenset({"SpeculationActive"})
"""Conditions that only count while drafts are wanted."""
_TEMPORARY = frozenset({Trouble.FETCHING_MODEL, Trouble.LOADING})
"""Reasons that change by themselves."""

Pair = tuple[str, str]
"""Type and status of a condition."""


def failures(status: Object) -> Iterator[tuple[Pair, float]]:
    """Conditions of a status that are not True, unless the user chose so, and since when."""
    conditions = {each["type"]: each for each in status["conditions"]}
    ready, progressing = (conditions.get(kind, {}) for kind in ("Ready", "Progressing"))
    is_serving = ready.get("status") == "True" and progressing.get("reason") != "Paused"
    ignored = frozenset() if is_serving else _FOR_SPEED
    if not status.get("draft", {}).get("desiredReplicas"):
        ignored |= _FOR_DRAFTS
    for kind, found in conditions.items():
        # Pods may fetch and load within their own time limits, which may be hours.
        is_loading = found["reason"] in _TEMPORARY and progressing.get("status") != "False"
        if found["status"] == "True" or kind in ignored or is_loading:
            continue
        times = [found, ready] if kind in _FOR_SPEED else [found]
        since = max(to_seconds(each["lastTransitionTime"]) or 0.0 for each in times)
        yield (kind, found["status"]), since


@dataclass(frozen=True, slots=True)
class _Entry:
    """One resource."""

    pairs: frozenset[Pair]
    failures: Mapping[Pair, float]


class FleetMetrics:
    """Sets ``RESOURCES`` and ``TROUBLE_SINCE`` from the status of all resources. Asyncio loop."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._counted: set[Pair] = set()
        self._failing: set[Pair] = set()

    def put(self, key: Hashable, status: Object) -> None:
        """Set the status of a resource."""
        pairs = frozenset((each["type"], each["status"]) for each in status["conditions"])
        entry = _Entry(pairs, dict(failures(status)))
        if self._entries.get(key) != entry:
            self._entries[key] = entry
            self._update()

    def drop(self, key: Hashable) -> None:
        """Remove a resource that is gone."""
        if self._entries.pop(key, None) is not None:
            self._update()

    def _update(self) -> None:
        entries = self._entries.values()
        counts = Counter(pair for entry in entries for pair in entry.pairs)
        self._counted |= counts.keys()
        for pair in self._counted:
            metrics.RESOURCES.labels(*pair).set(counts[pair])
        since: dict[Pair, float] = {}
        for entry in entries:
            for pair, seconds in entry.failures.items():
                since[pair] = min(seconds, since.get(pair, seconds))
        for pair in self._failing - since.keys():
            metrics.TROUBLE_SINCE.remove(*pair)
        for pair, seconds in since.items():
            metrics.TROUBLE_SINCE.labels(*pair).set(seconds)
        self._failing = set(since)
