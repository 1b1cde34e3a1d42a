"""Exports spans over OTLP/gRPC with the SDK of OpenTelemetry. Only ``tracing`` imports it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import ssd

EXPORT_SECONDS = 5
"""Maximum time of one export, with its retries. A collector that does not answer costs spans."""
FLUSH_SECONDS = 3.0
"""Maximum time of the last export at the end of the process."""


@contextlib.asynccontextmanager
async def exporter(endpoint: str, process: str, instance: str) -> AsyncIterator[TracerProvider]:
    """Yield a provider whose spans a thread exports in batches; its queue is bounded."""
    ours = {
        "service.name": process,
        "service.version": ssd.__version__,
        "service.instance.id": instance,
    }
    # The variables of the environment come last: they are the user's.
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))
    )
    try:
        yield provider
    finally:
        # A daemon: with a collector that does not answer, the last export can take longer.
        last = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, FLUSH_SECONDS)
