"""The operator's own metrics, each with its unit; served on its one HTTP port."""

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY
from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.pod_state import to_seconds

REGISTRY = CollectorRegistry()
"""All metrics that are served; the default registry holds metrics of engines."""
REGISTRY.register(TLS_CERTIFICATE_EXPIRY)
GCCollector(REGISTRY)
PlatformCollector(REGISTRY)
ProcessCollector(registry=REGISTRY)
_counter, _gauge = partial(Counter, registry=REGISTRY), partial(Gauge, registry=REGISTRY)

RECONCILES_TOTAL = _counter(
    "ssd_operator_reconcile", "Passes, by result: ok, gone, error, crash.", ["result"]
)
RECONCILE_SECONDS = Histogram(
    "ssd_operator_reconcile_seconds",
    "Seconds of a pass.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
ERRORS_TOTAL = _counter("ssd_operator_errors", "Failed passes and calls, by error class.", ["type"])
QUEUE_DEPTH = _gauge("ssd_operator_queue_depth", "Resources that are due and wait for a worker.")
OLDEST_SUCCESS_SECONDS = _gauge(
    "ssd_operator_oldest_success_seconds",
    "Seconds since the last successful pass, of the resource for which it is longest ago; before "
    "all resources are listed, since the start of the process.",
)
API_REQUESTS_TOTAL = _counter(
    "ssd_operator_api_requests",
    "Calls to the API server besides watches, by verb, resource and HTTP status (none: no answer).",
    ["verb", "resource", "code"],
)
DRAINS_TOTAL = _counter(
    "ssd_operator_drains",
    "Drains of drafts, by result: Drained, TimedOut, Unreachable.",
    ["result"],
)
SCALE_TOTAL = _counter(
    "ssd_operator_scale",
    "Numbers of drafts written by the Internal loop, by direction (up, down) and reason.",
    ["direction", "reason"],
)
CONDITION_SINCE_SECONDS = _gauge(
    "ssd_operator_condition_since_timestamp_seconds",
    "When a condition of a resource took its present status, in seconds since the epoch. "
    "resource_name is NAME, or NAME-pool for an SSDDraftPool.",
    ["resource_namespace", "resource_name", "condition", "status", "reason"],
)


def set_conditions(key: Key, conditions: Iterable[Object]) -> None:
    """Show these conditions of a resource, and no others."""
    CONDITION_SINCE_SECONDS.remove_by_labels(
        {"resource_namespace": key[0], "resource_name": key[1]}
    )
    for condition in conditions:
        labels = *key, condition["type"], condition["status"], condition["reason"]
        since = to_seconds(condition["lastTransitionTime"]) or 0.0
        CONDITION_SINCE_SECONDS.labels(*labels).set(since)


def show_certificate(expires_at: Callable[[], float] | None) -> None:
    """Show the end of the certificate that engines are called with; None shows nothing."""
    role = {"role": "operator"}
    if expires_at is None:
        TLS_CERTIFICATE_EXPIRY.remove_by_labels(role)
    else:
        TLS_CERTIFICATE_EXPIRY.labels(**role).set_function(expires_at)
