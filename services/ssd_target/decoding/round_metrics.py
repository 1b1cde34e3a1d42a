"""What a round tells Prometheus. Labels are resolved once, at construction. Step thread only."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass

from ssd import telemetry
from ssd.ports import Clock
from ssd.types import LookupResult
from ssd_target.decoding.round_result import Lookup, RoundResult
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.decoding.sequence import Sequence
from ssd_target.drafts.demand import Demand
from ssd_target.drafts.pool import DraftPool


@dataclass(slots=True)
class Span:
    """A stretch of time; ``seconds`` is known when it is over."""

    seconds: float = 0.0


class RoundMetrics:
    """Adds a round up and publishes it when its work is done.

    ``host`` is what is left of a round once forward passes and waiting are taken away: the cost of
    all bookkeeping together.
    """

    def __init__(self, clock: Clock, num_columns: int, demand: Demand) -> None:
        self._clock = clock
        self._demand = demand
        seconds = telemetry.ROUND_SECONDS
        self._round_seconds = {part: seconds.labels(part=part) for part in ("verify", "wait")}
        self._host_seconds = seconds.labels(part="host")
        self._results = {
            result: telemetry.ROUNDS_TOTAL.labels(result=result.value) for result in LookupResult
        }
        self._accepted = [
            telemetry.ACCEPTED_TOKENS_TOTAL.labels(position=str(position))
            for position in range(1, num_columns)
        ]
        self._output_tokens = telemetry.TOKENS_TOTAL.labels(kind="output")
        self._prompt_tokens = telemetry.TOKENS_TOTAL.labels(kind="prompt")
        self._kv_blocks = {
            state: telemetry.KV_BLOCKS.labels(state=state) for state in ("free", "used")
        }
        self._elsewhere_seconds = 0.0
        self._num_changes = -1

    @contextmanager
    def span(self, part: str) -> Iterator[Span]:
        """Time a part of the round: ``verify``, ``wait``, ``prefill``."""
        span = Span()
        started = self._clock.now()
        yield span
        span.seconds = self._clock.now() - started
        self._elsewhere_seconds += span.seconds
        if part in self._round_seconds:
            self._round_seconds[part].observe(span.seconds)

    def end_round(
        self,
        round_seconds: float,
        verify_seconds: float,
        results: Rows[RoundResult],
        lookups: Rows[Lookup],
    ) -> None:
        """Publish the round."""
        num_tokens = sum(len(each.emission.token_ids) for each in results)
        self._demand.note_round(len(results), num_tokens, verify_seconds, round_seconds)
        self._host_seconds.observe(max(0.0, round_seconds - self._elsewhere_seconds))
        self._elsewhere_seconds = 0.0
        for result, lookup in zip(results, lookups, strict=True):
            self._results[lookup.result].inc()
            self._output_tokens.inc(len(result.emission.token_ids))
            if result.num_proposed:
                telemetry.PROPOSED_TOKENS_TOTAL.inc(result.num_proposed)
                for position in range(result.outcome.accepted):
                    self._accepted[position].inc()

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has its place in the batch."""
        self._prompt_tokens.inc(sequence.num_prompt)
        telemetry.QUEUE_SECONDS.observe(self._clock.now() - sequence.arrival.arrived_at)

    def publish(self, scheduler: Scheduler, drafts: DraftPool) -> None:
        """Refresh the gauges; those of the load only when it has changed."""
        drafts.publish()
        if scheduler.num_changes == self._num_changes:
            return
        self._num_changes = scheduler.num_changes
        load = scheduler.load
        drafts.load = load
        self._demand.eligible.note(load.eligible, self._clock.now())
        telemetry.RUNNING_SEQUENCES.set(load.running)
        telemetry.WAITING_SEQUENCES.set(load.waiting)
        self._kv_blocks["free"].set(scheduler.num_free_blocks)
        self._kv_blocks["used"].set(scheduler.num_used_blocks)
