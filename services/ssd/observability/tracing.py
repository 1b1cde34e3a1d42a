"""OpenTelemetry spans of a process and the trace to which a caller's request belongs.

Code records spans through the API of OpenTelemetry, which does nothing by default. The SDK and the
exporter are the optional extra ``otel``; they are imported only if an endpoint is set. The
variables ``OTEL_*`` of OpenTelemetry apply: sampler, headers, certificates, resource attributes.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import AsyncIterator, Iterable

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ssd.errors import SettingsError

_BACKEND = "ssd.observability.otlp"
_PROPAGATOR = TraceContextTextMapPropagator()


def check_endpoint(endpoint: str) -> None:
    """Check the address of a collector; empty for none.

    Raises:
        SettingsError: it is not ``http://host:port`` or ``https://host:port``, or the extra
            ``otel`` is not installed.
    """
    if not endpoint:
        return
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("http", "https") or not place:
        raise SettingsError(
            f"otlp_endpoint: {endpoint!r} is not http://host:port or https://host:port"
        )
    for package in ("opentelemetry.sdk", "opentelemetry.exporter"):
        if importlib.util.find_spec(package) is None:
            raise SettingsError(
                f"otlp_endpoint: {package} is not installed; install the extra otel, for example "
                "pip install 'ssd-serving[otel]'"
            )


@contextlib.asynccontextmanager
async def exported_spans(
    endpoint: str, process: str, instance: str
) -> AsyncIterator[TracerProvider]:
    """Yield the source of the process's tracers; at the end, send the spans that wait.

    Args:
        endpoint: of a collector that accepts OTLP over gRPC; empty: spans are not recorded.
        process: service name of the spans, for example "ssd-target".
        instance: name of this process among those of the same service.

    Raises:
        SettingsError: see ``check_endpoint``.
    """
    check_endpoint(endpoint)
    if not endpoint:
        yield NoOpTracerProvider()
        return
    backend = importlib.import_module(_BACKEND)
    async with backend.exporter(endpoint, process, instance) as provider:
        yield provider


def parent_of(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Return the trace context of a call (W3C: ``traceparent``, ``tracestate``), if it has one."""
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(texts, Context())
