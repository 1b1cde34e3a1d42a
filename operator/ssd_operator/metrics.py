"""What the operator counts of itself, each with its unit; served on its metrics port."""

from prometheus_client import Counter, Gauge, Histogram

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
    "ssd_operator_drains", "Drains of drafts, by result: Drained, TimedOut, Unreachable.", ["result"]
)
SCALE_TOTAL = Counter(
    "ssd_operator_scale", "Numbers of drafts written, by direction and reason.", ["direction", "reason"]
)
POOL_POLL_SECONDS = Histogram(
    "ssd_operator_pool_poll_seconds",
    "Seconds of one question to a target.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2),
)
