"""Prometheus metrics of rounds: they observe what rounds did, and nothing reads them back."""

from collections.abc import Sequence as Rows

from ssd import telemetry
from ssd.pool.metrics import LookupMetrics
from ssd.pool.rounds import Lookup
from ssd_target.decoding.round_result import RoundResult
from ssd_target.decoding.round_times import RoundPart, RoundTimes
from ssd_target.decoding.scheduler import SchedulerCounts
from ssd_target.decoding.sequence import Sequence

_OBSERVED_PARTS = tuple(part for part in RoundPart if part is not RoundPart.PREFILL)


class RoundMetrics:
    """Publishes rounds. Labels are resolved once, at construction. Step thread only."""

    def __init__(self, num_columns: int) -> None:
        seconds = telemetry.ROUND_SECONDS
        self._part_seconds = {part: seconds.labels(part=part.value) for part in _OBSERVED_PARTS}
        self._host_seconds = seconds.labels(part="host")
        self._lookups = LookupMetrics(num_columns - 1)
        self._output_tokens = telemetry.TOKENS_TOTAL.labels(kind="output")
        self._prompt_tokens = telemetry.TOKENS_TOTAL.labels(kind="prompt")
        self._cached_tokens = telemetry.TOKENS_TOTAL.labels(kind="cached")
        self._free_blocks = telemetry.KV_BLOCKS.labels(state="free")
        self._cached_blocks = telemetry.KV_BLOCKS.labels(state="cached")
        self._used_blocks = telemetry.KV_BLOCKS.labels(state="used")

    def observe_round(
        self, times: RoundTimes, results: Rows[RoundResult], lookups: Rows[Lookup]
    ) -> None:
        """Publish a complete round."""
        for part, seconds in self._part_seconds.items():
            seconds.observe(times.seconds[part])
        self._host_seconds.observe(times.host_seconds)
        self._lookups.observe(results, lookups)
        num_tokens = 0
        for result in results:
            num_tokens += len(result.emission.token_ids)
            if result.base_len == result.sequence.num_prompt and result.sequence.num_cached:
                telemetry.PREFIX_HITS_TOTAL.inc()
                self._cached_tokens.inc(result.sequence.num_cached)
        self._output_tokens.inc(num_tokens)

    def observe_admission(self, sequence: Sequence, now: float) -> None:
        """Publish that a sequence has left the queue."""
        self._prompt_tokens.inc(sequence.num_prompt)
        telemetry.QUEUE_SECONDS.observe(now - sequence.arrival.arrived_at)

    def observe_preemptions(self, preempted: Rows[Sequence]) -> None:
        """Publish that sequences have lost their place in the batch."""
        telemetry.PREEMPTIONS_TOTAL.inc(len(preempted))

    def observe_counts(self, counts: SchedulerCounts) -> None:
        """Publish the counts of the scheduler."""
        self._cached_blocks.set(counts.cached_blocks)
        telemetry.RUNNING_SEQUENCES.set(counts.running)
        telemetry.WAITING_SEQUENCES.set(counts.waiting)
        self._free_blocks.set(counts.free_blocks)
        self._used_blocks.set(counts.used_blocks)
