"""Metrics and spans of a target and a draft while they serve."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from tests.model_folders import model_folder
from tests.pairs import ANY_PORT, LONG_WAIT, QUICK
from tests.processes import ProcessUnderTest, running

from ssd.errors import FieldError
from ssd.observability import metrics
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import SpeculationChange
from ssd.types import Mode, SamplingParams

SHAPE = (
    *("--dtype", "float32", "--lookahead", "3", "--branches", "8", "--max-model-len", "2048"),
    *("--kv-cache-bytes", "8000000", *ANY_PORT, *QUICK),
)
LONG = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
PROMPT = "a prompt that nobody else may read"
CHANNEL = ("--channel", "collective")
ONE_AT_A_TIME = ("--max-num-seqs", "1", *CHANNEL)
RARE = {
    "ssd_draft_max_sessions",  # a setting
    *("ssd_link_refusals", "ssd_bad_frames", "ssd_stale_frames", "ssd_preemptions"),
    # Only with the channel collective, and with TLS.
    *("ssd_channel_fallbacks", "ssd_tls_certificate_expiry_timestamp_seconds"),
    # The choice of the controller does not change in a short time.
    *("ssd_speculation_active", "ssd_speculation_speed_up", "ssd_speculation_reason"),
}
"""They need a fault or a long time; the tests of the code that counts them check that."""
Samples = dict[str, float]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of OpenTelemetry that keeps all spans."""

    def __init__(self) -> None:
        self.resources: list[trace_pb2.ResourceSpans] = []

    async def Export(self, request, _context):  # type: ignore[no-untyped-def]  # noqa: N802
        self.resources += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, name: str) -> list[trace_pb2.Span]:
        return [
            span
            for resource in self.resources
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector, server = Collector(), grpc.aio.server()
    add: object = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    assert callable(add)
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until(process: ProcessUnderTest, **values: float) -> Samples:
    """The metrics once these gauges have these values."""
    return await process.until_metrics(lambda found: found.items() >= values.items())


def still(process: Literal["target", "draft"], before: Samples, *later: Samples) -> set[str]:
    """The metrics of a process that no later page changes."""
    changed = {
        name.partition("{")[0]
        for after in later
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }
    return {
        family.name
        for family in metrics.metrics_of(process).collect()
        if family.name.startswith("ssd_")
        and not changed & {family.name + end for end in ("", "_total", "_count")}
    }


folder = model_folder(seed=1, max_len=2048)


async def test_metrics_and_spans_show_what_a_target_and_a_draft_do(folder: Path) -> None:
    model = ("--model", str(folder), *SHAPE)
    async with (
        collecting() as (collector, endpoint),
        running("ssd_draft", *model, *CHANNEL) as draft,
    ):
        await draft.until("listening")
        loading = await draft.metrics()
        await draft.until("ready")
        flags = ("--drafts", draft.grpc_address, *LONG_WAIT, "--otlp-endpoint", endpoint)
        async with running("ssd_target", *model, *flags, *ONE_AT_A_TIME) as target:
            await target.until("listening")
            before = await target.metrics()
            assert (await target.until("link")).fields["state"] == "active"
            async with TargetClient(target.grpc_address) as client:
                asked_at = time.monotonic()
                chunks = [each async for each in client.generate(PROMPT, LONG, Mode.SPECULATIVE)]
                elapsed = time.monotonic() - asked_at
                during = await until(target, ssd_running_sequences=0, ssd_open_sessions=0)
                running_on = client.generate(PROMPT, ENDLESS, Mode.SPECULATIVE)
                await anext(running_on)
                waiting = asyncio.create_task(anext(client.generate(PROMPT, SHORT)))
                busy = await until(target, ssd_waiting_sequences=1, ssd_open_sessions=1)
                there = await draft.metrics()
                await running_on.aclose()
                await waiting
                with pytest.raises(FieldError):
                    await anext(client.generate("", LONG))
                await client.set_speculation(SpeculationChange(mode=Mode.SPECULATIVE))
                after = await until(target, ssd_running_sequences=0, ssd_open_sessions=0)
            check_values(during, chunks[-1].statistics.rounds if chunks[-1].statistics else 0)
            for name in ("time_to_first_token", "e2e", "queue"):
                assert 0 < during[f"ssd_{name}_seconds_sum"] < elapsed
            target.signal(signal.SIGTERM)
            assert await target.wait() == 0
        missing = still("target", before, busy, after) | still("draft", loading, there)
        assert missing <= RARE, f"metrics that nothing feeds: {missing}"
        for outcome in ("cancelled", "invalid"):
            assert after[f'ssd_requests_total{{outcome="{outcome}"}}'] == 1
        assert after['ssd_speculation_mode{mode="speculative"}'] == 1
    check_spans(collector)
    lines = [json.dumps(each.fields) for each in target.events if each.name == "request"]
    assert len(lines) >= 1
    assert PROMPT not in str(collector.resources) + "".join(lines)


def check_values(samples: Samples, rounds: int) -> None:
    """Values after one long request: the first table arrives while it runs."""
    assert samples['ssd_requests_total{outcome="length"}'] == 1
    assert samples['ssd_tokens_total{kind="output"}'] == LONG.max_tokens
    assert samples['ssd_tokens_total{kind="prompt"}'] > 0
    kinds = ("hit", "miss", "late", "no_draft", "backup", "none")
    assert sum(samples[f'ssd_rounds_total{{result="{kind}"}}'] for kind in kinds) == rounds
    assert samples['ssd_rounds_total{result="hit"}'] > 0
    assert samples['ssd_round_seconds_count{part="verify"}'] == rounds
    first = samples['ssd_accepted_tokens_total{position="1"}']
    assert 0 < first <= samples["ssd_proposed_tokens_total"]
    assert samples["ssd_commit_to_wire_seconds_count"] >= samples['ssd_rounds_total{result="hit"}']


def check_spans(collector: Collector) -> None:
    """Spans that the target has sent, the last ones at its end."""
    assert collector.resources
    attributes = {each.key: each.value for each in collector.resources[0].resource.attributes}
    assert attributes["service.name"].string_value == "ssd-target"
    whole = next(
        span
        for span in collector.spans("generate")
        if {each.key: each.value for each in span.attributes}["ssd.outcome"].string_value
        == "length"
    )
    assert any(event.name == "round" for event in whole.events)
    for name in ("queue", "prefill", "first_token"):
        assert whole.span_id in {span.parent_span_id for span in collector.spans(name)}
