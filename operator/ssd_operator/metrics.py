"""What the operator counts of itself, each with its unit; served on its metrics port."""

from collections import Counter as Count
from collections.abc import Hashable, Iterable

from prometheus_client import Counter, Gauge, Histogram

from ssd_operator.spec import Object

RECONCILES_TOTAL = Counter(
    "ssd_operator_reconcile", "Passes, by result: ok, gone, error, crash.", ["result"]
)
RECONCILE_SECONDS = Histogram(
    "ssd_operator_reconcile_seconds",
    "Seconds of a pass.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ERRORS_TOTAL = Counter("ssd_operator_errors", "Failed passes and calls, by error class.", ["type"])
QUEUE_DEPTH = Gauge("ssd_operator_queue_depth", "Resources that are due and wait for a worker.")
OLDEST_UNRECONCILED_SECONDS = Gauge(
    "ssd_operator_oldest_unreconciled_seconds", "Seconds that the longest waiting one is overdue."
)
API_REQUESTS_TOTAL = Counter(
    "ssd_operator_api_requests",
    "Calls to the API server besides watches, by verb, resource and HTTP status (none: no answer).",
    ["verb", "resource", "code"],
)
RESOURCES = Gauge(
    "ssd_operator_resources", "Resources, by condition and its status.", ["condition", "status"]
)
DRAINS_TOTAL = Counter(
    "ssd_operator_drains",
    "Drains of drafts, by result: Drained, TimedOut, Unreachable.",
    ["result"],
)
SCALE_TOTAL = Counter(
    "ssd_operator_scale", "Numbers of drafts written by the Internal loop, by reason.", ["reason"]
)
POOL_POLL_SECONDS = Histogram(
    "ssd_operator_pool_poll_seconds",
    "Seconds of one question to a target.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2),
)


class ConditionTally:
    """How many resources have which status of each condition, kept in ``RESOURCES``."""

    def __init__(self) -> None:
        self._of_key: dict[Hashable, frozenset[tuple[str, str]]] = {}
        self._count: Count[tuple[str, str]] = Count()

    def put(self, key: Hashable, conditions: Iterable[Object]) -> None:
        """A resource has these conditions now."""
        found = frozenset((each["type"], each["status"]) for each in conditions)
        self._move(self._of_key.get(key, frozenset()), found)
        self._of_key[key] = found

    def drop(self, key: Hashable) -> None:
        """A resource is gone."""
        self._move(self._of_key.pop(key, frozenset()), frozenset())

    def _move(self, before: frozenset[tuple[str, str]], after: frozenset[tuple[str, str]]) -> None:
        self._count.subtract(before)
        self._count.update(after)
        for pair in before | after:
            RESOURCES.labels(*pair).set(self._count[pair])
