"""OpenTelemetry spans of a process and the trace to which a caller's request belongs.

Code records spans through the API of OpenTelemetry, which does nothing by default. The SDK and the
exporter are the optional extra ``otel``; they are imported only if an endpoint is set. The
variables ``OTEL_*`` of OpenTelemetry apply: sampler, headers, certificates, resource attributes.
"""

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import AsyncIterator, Iterable

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import ssd
from ssd.errors import SettingsError

EXPORT_SECONDS = 5
"""Maximum time of one export, with its retries. A collector that does not answer costs spans."""
FLUSH_SECONDS = 3.0
"""Maximum time of the last export at the end of the process."""
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

    A thread exports spans in batches; its queue is bounded.

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
    # Packages of the extra ``otel``.
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: PLC0415
    from opentelemetry.sdk import resources, trace  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    ours = {
        "service.name": process,
        "service.version": ssd.__version__,
        "service.instance.id": instance,
    }
    # The variables of the environment come last: they are the user's.
    resource = resources.Resource.create(ours).merge(resources.OTELResourceDetector().detect())
    provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider
    finally:
        # A daemon: with a collector that does not answer, the last export can take longer.
        last = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, FLUSH_SECONDS)


def parent_of(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Return the trace context of a call (W3C: ``traceparent``, ``tracestate``), if it has one."""
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(texts, Context())
