"""Metrics over all resources: counts of conditions, and the begin of the longest problem."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ssd_operator.api.spec import Object
from ssd_operator.observe.diagnosis import PodReason
from ssd_operator.observe.pod_state import to_seconds
from ssd_operator.runtime.metrics import REGISTRY

_OF_DRAFTS = frozenset({"SpeculationActive", "ScalingActive", "DraftCapacity"})
"""Conditions that count once a target serves, and not while the resource is paused."""
_LOADING = frozenset({PodReason.FETCHING_MODEL, PodReason.LOADING})
"""Reasons that end by themselves, within a time-out."""

Pair = tuple[str, str]
"""Type and status of a condition."""


def unexpected_conditions(status: Object) -> Iterator[tuple[Pair, float]]:
    """Conditions that are not True and that the user did not cause, and their begin (seconds).

    Args:
        status: of a resource.
    """
    conditions = {each["type"]: each for each in status["conditions"]}
    ready = conditions.get("Ready", {})
    is_paused = conditions.get("Progressing", {}).get("reason") == "Paused"
    is_serving = ready.get("status") == "True" and not is_paused
    has_drafts = bool(status.get("draft", {}).get("desiredReplicas"))
    for kind, found in conditions.items():
        is_expected = (
            (kind in _OF_DRAFTS and not is_serving)
            or (kind == "SpeculationActive" and not has_drafts)
            or _is_loading(found, conditions)
        )
        if found["status"] != "True" and not is_expected:
            times = [found, ready] if kind in _OF_DRAFTS else [found]
            yield (kind, found["status"]), max(_since(each) for each in times)


def _is_loading(found: Object, conditions: Mapping[str, Object]) -> bool:
    """Whether pods fetch or load a model within their time-outs, which may be hours."""
    is_proceeding = conditions.get("Progressing", {}).get("status") != "False"
    return found["reason"] in _LOADING and is_proceeding


def _since(condition: Object) -> float:
    return to_seconds(condition["lastTransitionTime"]) or 0.0


class FleetMetrics(Collector):
    """The statuses of all resources, counted when Prometheus scrapes.

    Asyncio loop; ``collect`` runs on the thread of the metrics server.
    """

    def __init__(self) -> None:
        self._statuses: dict[Hashable, Object] = {}

    def put(self, key: Hashable, status: Object) -> None:
        """Set the status of a resource."""
        self._statuses[key] = status

    def drop(self, key: Hashable) -> None:
        """Remove a resource."""
        self._statuses.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        statuses = list(self._statuses.values())
        labels = ["condition", "status"]
        counts = Counter(
            (each["type"], each["status"]) for status in statuses for each in status["conditions"]
        )
        resources = GaugeMetricFamily(
            "ssd_operator_resources", "Resources, by condition and its status.", labels=labels
        )
        for pair, count in counts.items():
            resources.add_metric(pair, count)
        since: dict[Pair, float] = {}
        for pair, seconds in (
            each for status in statuses for each in unexpected_conditions(status)
        ):
            since[pair] = min(seconds, since.get(pair, seconds))
        since_metric = GaugeMetricFamily(
            "ssd_operator_trouble_since_timestamp_seconds",
            "Begin of the longest problem of one resource with a condition, in seconds since the "
            "epoch; absent without one. A pause or zero drafts is none.",
            labels=labels,
        )
        for pair, seconds in since.items():
            since_metric.add_metric(pair, seconds)
        return iter((resources, since_metric))


FLEET = FleetMetrics()
"""Of this operator."""
REGISTRY.register(FLEET)
