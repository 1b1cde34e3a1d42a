"""The spans of one request and the log line of its end.

The span of a request has a child for each phase that it reached: ``queue`` (from the arrival, with
tokenization), ``prefill`` and ``first_token``. Its rounds are events. Neither contains text, and
both contain the labels of the request (``GenerateRequest.metadata``).

*Decision*: the step thread only records three times of a sequence; spans are created here when the
request ends, with these times. *Because*: a span costs about 20 us, and the step thread is the
bottleneck. Rounds are reported as for clients that ask for them, and only for recorded traces.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context

from ssd.errors import SSDError
from ssd.observability import log, metrics
from ssd.ports import Clock
from ssd.rpc.status import outcome_of
from ssd.types import GenerationChunk, SpeculationStatistics
from ssd_target.decoding.sequence import Sequence, SequenceRecord

_PHASES = ("queue", "prefill", "first_token")
_COMPLETE = frozenset({"stop", "length"})
_FAULTS = frozenset({"error", "deadline", "unavailable"})
"""Outcomes that are errors of a server in OpenTelemetry's conventions for gRPC."""
_log = log.get_logger(__name__)


class RequestTrace:
    """Collects what is known of one request until it ends. Asyncio loop."""

    def __init__(
        self,
        tracer: Tracer,
        clock: Clock,
        labels: dict[str, str],
        attributes: Mapping[str, str] | None = None,
        parent: Context | None = None,
    ) -> None:
        """Begin the span, with attributes, in the trace of the caller."""
        self._begun_ns = time.time_ns()
        self._span = tracer.start_span(
            "generate", parent, SpanKind.SERVER, attributes, start_time=self._begun_ns
        )
        self._begun_at = clock.now()
        self.is_recording = self._span.is_recording()
        """Whether a collector receives the spans, so that rounds have to be reported."""
        self.outcome = ""
        """Label of ``ssd_requests_total``; set before the end."""
        self._tracer = tracer
        self._clock = clock
        self._labels = labels
        self.sequences: list[Sequence] = []
        """Sequences of the request, once they are submitted."""
        self._statistics: SpeculationStatistics | None = None
        """Statistics of the continuation that ended last."""
        self._newest_at: dict[int, float] = {}
        """When the newest tokens of each continuation arrived."""
        self._num_tokens = 0

    @property
    def num_admitted(self) -> int:
        """Number of sequences that have left the queue; their prompts may still be stored."""
        return sum(sequence.record.admitted_at > 0 for sequence in self.sequences)

    def observe(self, chunk: GenerationChunk) -> None:
        """Publish the times of a chunk that has arrived, and its rounds as events."""
        now, arrived_at = self._clock.now(), self.sequences[0].record.arrived_at
        if chunk.token_ids:
            self._num_tokens += len(chunk.token_ids)
            previous_at = self._newest_at.get(chunk.choice)
            if previous_at is None:
                metrics.TIME_TO_FIRST_TOKEN_SECONDS.observe(now - arrived_at)
            else:
                seconds = (now - previous_at) / len(chunk.token_ids)
                metrics.INTER_TOKEN_SECONDS.observe(seconds)
            self._newest_at[chunk.choice] = now
        if chunk.finish_reason is not None:
            self._statistics = chunk.statistics
            if chunk.finish_reason in _COMPLETE:
                metrics.E2E_SECONDS.observe(now - arrived_at)
        for reported_round in chunk.rounds if self.is_recording else ():
            self._span.add_event(
                "round",
                {
                    "ssd.choice": chunk.choice,
                    "ssd.proposed": len(reported_round.proposed),
                    "ssd.accepted": reported_round.accepted_tokens,
                    "ssd.tokens": len(reported_round.added),
                    "ssd.lookup": str(reported_round.lookup),
                },
            )

    @contextlib.contextmanager
    def until_end(self, cancellation_cause: Callable[[], SSDError]) -> Iterator[None]:
        """Trace the request during the block, which sets the outcome unless it raises.

        ``cancellation_cause`` returns why the call was cancelled.
        """
        try:
            yield
        except Exception as error:
            self.outcome = outcome_of(error)
            raise
        except asyncio.CancelledError:
            self.outcome = outcome_of(cancellation_cause())
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Record the phases, end the span and log the end of the request."""
        ended_at = self._clock.now()
        if self.is_recording:
            for name, value in self._attributes().items():
                self._span.set_attribute(name, value)
            if self.outcome in _FAULTS:
                self._span.set_status(StatusCode.ERROR, self.outcome)
            for sequence in self.sequences:
                self._record_phases(sequence.record, ended_at)
            self._span.end(self._ns(ended_at))
        self._write(ended_at)

    def _record_phases(self, times: SequenceRecord, ended_at: float) -> None:
        marks = (times.arrived_at, times.admitted_at, times.decoding_at, times.first_token_at)
        context = set_span_in_context(self._span)
        for name, (begin, end) in zip(_PHASES, pairwise(marks), strict=True):
            if not begin:
                return
            child = self._tracer.start_span(name, context, start_time=self._ns(begin))
            child.end(self._ns(end or ended_at))

    def _attributes(self) -> dict[str, str | int | float]:
        attributes: dict[str, str | int | float] = {
            "ssd.outcome": self.outcome,
            "gen_ai.usage.output_tokens": self._num_tokens,
        }
        attributes |= {f"ssd.label.{key}": value for key, value in self._labels.items()}
        for sequence in self.sequences[:1]:
            attributes["ssd.mode"] = str(sequence.mode)
            attributes["gen_ai.usage.input_tokens"] = sequence.num_prompt
            attributes["gen_ai.request.max_tokens"] = sequence.max_len - sequence.num_prompt
            attributes["gen_ai.request.temperature"] = sequence.sampling.temperature
        if (statistics := self._statistics) is not None:
            attributes["ssd.rounds"] = statistics.rounds
            attributes["ssd.hits"] = statistics.hits
            attributes["ssd.misses"] = statistics.misses
            attributes["ssd.late"] = statistics.late
            attributes["ssd.backup_rounds"] = statistics.backup_rounds
        return attributes

    def _write(self, ended_at: float) -> None:
        fields: dict[str, object] = {"outcome": self.outcome, "output_tokens": self._num_tokens}
        for sequence in self.sequences[:1]:
            times = sequence.record
            fields["prompt_tokens"] = sequence.num_prompt
            fields["queue_ms"] = _milliseconds(times.arrived_at, times.admitted_at)
            fields["first_token_ms"] = _milliseconds(times.arrived_at, times.first_token_at)
        fields["total_ms"] = _milliseconds(self._begun_at, ended_at)
        if self.is_recording:
            fields["trace_id"] = f"{self._span.get_span_context().trace_id:032x}"
        if self._labels:
            fields["labels"] = self._labels
        _log.info("request", **fields)

    def _ns(self, clock_time: float) -> int:
        """Convert a time of the clock to nanoseconds since 1970."""
        return self._begun_ns + round((clock_time - self._begun_at) * 1e9)


def _milliseconds(begin: float, end: float) -> float | None:
    return round((end - begin) * 1000, 1) if end else None
