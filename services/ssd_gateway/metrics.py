"""Metrics of the gateway; ``/metrics`` serves them."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY

REGISTRY = CollectorRegistry(auto_describe=False)
REGISTRY.register(TLS_CERTIFICATE_EXPIRY)
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

REQUESTS_TOTAL = _counter(
    "ssd_gateway_requests",
    "Ended requests of the API by path and HTTP status; 499: the client left. The status of a "
    "stream that failed after its first token is 200. Failed share: "
    'sum(rate(ssd_gateway_requests_total{status=~"5.."}[5m])) / '
    "sum(rate(ssd_gateway_requests_total[5m])).",
    ["path", "status"],
)
RUNNING_REQUESTS = _gauge("ssd_gateway_running_requests", "Requests of the API in progress.")
FIRST_TOKEN_SECONDS = Histogram(
    "ssd_gateway_time_to_first_token_seconds",
    "Seconds from a complete and parsed request at the gateway to its first tokens.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
RETRIES_TOTAL = _counter(
    "ssd_gateway_retries",
    "Requests that were sent to another target, because the first was not ready or overloaded.",
)
BROKEN_STREAMS_TOTAL = _counter(
    "ssd_gateway_broken_streams",
    "Streams that ended with an error after their first token, except errors of the client.",
)
TARGETS = _gauge("ssd_gateway_targets", "Known targets by state: ready, not_ready.", ["state"])
for _state in ("ready", "not_ready"):
    TARGETS.labels(state=_state)
