"""The operator's own metrics, each with its unit; served on its metrics port."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

REGISTRY = CollectorRegistry()
"""All that is served; the default one holds metrics of engines, which the operator has not."""
GCCollector(REGISTRY)
PlatformCollector(REGISTRY)
ProcessCollector(registry=REGISTRY)

RECONCILES_TOTAL = Counter(
    "ssd_operator_reconcile",
    "Passes, by result: ok, gone, error, crash.",
    ["result"],
    registry=REGISTRY,
)
RECONCILE_SECONDS = Histogram(
    "ssd_operator_reconcile_seconds",
    "Seconds of a pass.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
ERRORS_TOTAL = Counter(
    "ssd_operator_errors", "Failed passes and calls, by error class.", ["type"], registry=REGISTRY
)
QUEUE_DEPTH = Gauge(
    "ssd_operator_queue_depth", "Resources that are due and wait for a worker.", registry=REGISTRY
)
OLDEST_UNRECONCILED_SECONDS = Gauge(
    "ssd_operator_oldest_unreconciled_seconds",
    "Seconds that the longest waiting one is overdue.",
    registry=REGISTRY,
)
OLDEST_SUCCESS_SECONDS = Gauge(
    "ssd_operator_oldest_success_seconds",
    "Seconds since the last pass that went well, of the resource for which it is longest ago.",
    registry=REGISTRY,
)
API_REQUESTS_TOTAL = Counter(
    "ssd_operator_api_requests",
    "Calls to the API server besides watches, by verb, resource and HTTP status (none: no answer).",
    ["verb", "resource", "code"],
    registry=REGISTRY,
)
RESOURCES = Gauge(
    "ssd_operator_resources",
    "Resources, by condition and its status.",
    ["condition", "status"],
    registry=REGISTRY,
)
TROUBLE_SINCE = Gauge(
    "ssd_operator_trouble_since_timestamp_seconds",
    "When the longest trouble of one resource with a condition began, in seconds since the epoch; "
    "absent without one. What a user gave up is none: a pause, no drafts.",
    ["condition", "status"],
    registry=REGISTRY,
)
DRAINS_TOTAL = Counter(
    "ssd_operator_drains",
    "Drains of drafts, by result: Drained, TimedOut, Unreachable.",
    ["result"],
    registry=REGISTRY,
)
SCALE_TOTAL = Counter(
    "ssd_operator_scale",
    "Numbers of drafts written by the Internal loop, by direction (up, down) and reason.",
    ["direction", "reason"],
    registry=REGISTRY,
)
POOL_POLL_SECONDS = Histogram(
    "ssd_operator_pool_poll_seconds",
    "Seconds of one question to a target.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2),
    registry=REGISTRY,
)
