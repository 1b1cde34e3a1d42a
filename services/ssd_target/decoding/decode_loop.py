"""The round: propose, verify, decide, stream, look up, commit. ``run_round`` is the whole system.

Tokens leave before anything is waited for; while the drafts grow the next tables, the noise of the
next positions is computed. Everything here runs on the step thread.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.errors import NotFiniteError
from ssd.ports import Clock
from ssd.speculation.outcome import Outcomes
from ssd.speculation.verification import verify_coupled
from ssd.step_thread import Watchdog
from ssd.telemetry import get_logger
from ssd.types import FinishReason, GenerationChunk, Outcome, SequenceId, TokenId, Usage
from ssd_target.decoding.batch_builder import BatchBuilder, Proposals, Sampler
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.request_statistics import RequestStatistics, RoundLog
from ssd_target.decoding.round_metrics import RoundMetrics
from ssd_target.decoding.round_result import Lookup, RoundResult
from ssd_target.decoding.scheduler import Plan, Scheduler
from ssd_target.decoding.sequence import NOTHING_EMITTED, Arrival, Emission, Sequence
from ssd_target.drafts.pool import DraftPool

_log = get_logger(__name__)
_IDLE_SECONDS = 1.0
"""Longest sleep of an idle step thread."""


class Flusher(Protocol):
    """Wakes the readers of what was put into their sinks; see ``streams.Wakeups``."""

    def flush(self) -> None:
        """Wake them."""
        ...


class Runner(Protocol):
    """The methods of ``TargetRunner`` that rounds use. Called from the step thread."""

    @property
    def engine(self) -> EngineConfig:
        """Shapes of its batches."""
        ...

    def prepare(self, batch: PagedBatch) -> Any:
        """Build what ``verify`` needs beside the model."""
        ...

    def verify(self, prepared: Any) -> torch.Tensor:
        """Store the rows of a batch; logits_BPV float32."""
        ...

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store a chunk of one prompt; the first column that is not finite, None if all are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the decode loop is put together from."""

    inbox: Inbox
    scheduler: Scheduler
    runner: Runner
    builder: BatchBuilder
    sampler: Sampler
    drafts: DraftPool
    wakeups: Flusher
    clock: Clock
    watchdog: Watchdog


class DecodeLoop:
    """Runs rounds until the inbox is closed and everyone has been told. Step thread only."""

    def __init__(self, parts: Parts) -> None:
        self._inbox = parts.inbox
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._builder = parts.builder
        self._sampler = parts.sampler
        self._drafts = parts.drafts
        self._wakeups = parts.wakeups
        self._clock = parts.clock
        self._watchdog = parts.watchdog
        self._rounds = RoundLog()
        num_columns = parts.runner.engine.num_columns
        self._metrics = RoundMetrics(parts.clock, num_columns, parts.drafts.demand)
        self._request_statistics: dict[SequenceId, RequestStatistics] = {}
        self._proposed: dict[SequenceId, tuple[TokenId, ...]] = {}
        """What each sequence brings into the coming round; absent is nothing."""

    def run(self) -> None:
        """Run rounds until the inbox is closed, then cancel whoever is left."""
        try:
            while not self._inbox.is_closed:
                if self._scheduler.is_idle:
                    self._metrics.publish(self._scheduler, self._drafts)
                    with self._watchdog.idle():
                        self._inbox.wait(_IDLE_SECONDS)
                self.run_round()
            self._cancel_everyone()
        finally:
            self._fail_everyone()

    def _cancel_everyone(self) -> None:
        self._begin(self._scheduler.plan(self._inbox.drain()))
        for arrival in self._scheduler.everyone():
            self._inbox.cancel(arrival.sequence_id)
        self._begin(self._scheduler.plan(self._inbox.drain()))
        self._wakeups.flush()

    def _fail_everyone(self) -> None:
        """After a crash nobody is left without an answer; after a normal end nobody is left."""
        self._inbox.close()
        new = [event for event in self._inbox.drain() if isinstance(event, Arrival)]
        for arrival in (*self._scheduler.everyone(), *new):
            arrival.sink.fail(RuntimeError("the step loop crashed"))
        self._wakeups.flush()

    def run_round(self) -> None:
        """One round of all running sequences, and one chunk of one prompt."""
        self._watchdog.heartbeat()
        started = self._clock.now()
        plan = self._scheduler.plan(self._inbox.drain())
        self._begin(plan)
        self._prefill(plan)
        rows = [row for row in plan.decoding if row.finish_reason is None]
        if not rows:
            self._wakeups.flush()
            return
        self._rounds.begin(started)
        proposals = self._builder.proposals(rows, self._proposed)
        prepared = self._runner.prepare(self._builder.round(rows, proposals))
        with self._metrics.span("verify") as verify:
            logits_BPV = self._runner.verify(prepared)
        chosen_BP = self._sampler.choose(rows, proposals.num_proposed_B, logits_BPV)
        outcomes = verify_coupled(proposals.tokens_BK, proposals.num_proposed_B, chosen_BP)
        results = self._commit(rows, proposals, read_back(outcomes))
        decided_at = self._clock.now()
        self._rounds.verified(verify.seconds, decided_at)
        self._push(results)
        self._sampler.fill([row for row in rows if row.finish_reason is None])
        with self._metrics.span("wait"):
            lookups = self._drafts.look_up(results)
        self._drafts.send(results, lookups, decided_at)
        self._conclude(results, lookups)
        lasting = self._clock.now() - started
        self._metrics.end_round(lasting, verify.seconds, results, lookups)

    def _begin(self, plan: Plan) -> None:
        """Answer who does not run, set the table for who begins, and look for drafts."""
        for arrival, error in plan.refused:
            arrival.sink.fail(error)
        for arrival in plan.dropped:
            self._end(arrival, FinishReason.CANCELLED)
        for sequence in plan.cancelled:
            self._end(sequence.arrival, FinishReason.CANCELLED, sequence.num_emitted)
            self._forget(sequence)
        for sequence in plan.admitted:
            self._builder.admit(sequence)
            self._sampler.admit(sequence)
            self._metrics.admitted(sequence)
            self._request_statistics[sequence.sequence_id] = RequestStatistics(
                sequence.arrival.arrived_at
            )
        self._drafts.open_sessions(
            each
            for each in plan.running
            if each.wants_draft and not self._proposed.get(each.sequence_id)
        )
        self._inbox.num_waiting = self._scheduler.num_waiting
        self._metrics.publish(self._scheduler, self._drafts)

    def _prefill(self, plan: Plan) -> None:
        if plan.prefill is not None:
            with self._metrics.span("prefill"):
                chunk = self._runner.engine.prefill_chunk
                column = self._runner.prefill(self._builder.prefill(plan.prefill, chunk))
            if column is not None:
                sequence = plan.prefill.sequence
                sequence.fail()
                _fail(sequence, plan.prefill.first + column)
                self._scheduler.finish(sequence)
                self._forget(sequence)

    def _commit(
        self, rows: Rows[Sequence], proposals: Proposals, outcomes: list[Outcome]
    ) -> list[RoundResult]:
        """Append to each sequence what was accepted and the target's own token."""
        results: list[RoundResult] = []
        for row, proposed, outcome in zip(rows, proposals.tokens, outcomes, strict=True):
            base_len = len(row.tokens)
            emission = row.commit((*proposed[: outcome.accepted], outcome.bonus))
            results.append(RoundResult(row, base_len, len(proposed), outcome, emission))
        return results

    def _push(self, results: Rows[RoundResult]) -> None:
        """Send the tokens of the round on their way; nothing has been waited for yet."""
        now = self._clock.now()
        for result in results:
            sequence, emission = result.sequence, result.emission
            request_statistics = self._request_statistics[sequence.sequence_id]
            accepted = min(result.outcome.accepted, len(emission.token_ids))
            request_statistics.note_round(
                self._rounds.num_rounds - 1, result.num_proposed, accepted, now
            )
            if emission.finish_reason is FinishReason.FAILED:
                sequence.arrival.sink.put(GenerationChunk(token_ids=emission.token_ids))
                _fail(sequence, len(sequence.tokens) - 1)
            elif emission.finish_reason is not None:
                self._end(sequence.arrival, emission.finish_reason, sequence.num_emitted, emission)
            else:
                sink = sequence.arrival.sink
                sink.put(GenerationChunk(token_ids=emission.token_ids))
                if sink.is_abandoned:
                    self._inbox.cancel(sequence.sequence_id)
        self._wakeups.flush()

    def _conclude(self, results: Rows[RoundResult], lookups: Rows[Lookup]) -> None:
        """Keep what comes next of those who go on; free what the others held."""
        for result, lookup in zip(results, lookups, strict=True):
            sequence = result.sequence
            if result.emission.finish_reason is not None:
                self._scheduler.finish(sequence)
                self._forget(sequence)
            else:
                self._proposed[sequence.sequence_id] = lookup.tokens
                self._request_statistics[sequence.sequence_id].note_lookup(lookup.result)

    def _forget(self, sequence: Sequence) -> None:
        self._sampler.release(sequence)
        self._drafts.close(sequence.sequence_id)
        self._proposed.pop(sequence.sequence_id, None)
        self._request_statistics.pop(sequence.sequence_id, None)

    def _end(
        self,
        arrival: Arrival,
        reason: FinishReason,
        num_emitted: int = 0,
        emission: Emission = NOTHING_EMITTED,
    ) -> None:
        """Put the last chunk of a request, with its usage and statistics."""
        request_statistics = self._request_statistics.get(arrival.sequence_id) or RequestStatistics(
            arrival.arrived_at
        )
        prompt_tokens = len(arrival.request.prompt_ids)
        arrival.sink.put(
            GenerationChunk(
                token_ids=emission.token_ids,
                finish_reason=reason,
                usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=num_emitted),
                statistics=request_statistics.statistics(self._rounds),
            )
        )


def _fail(sequence: Sequence, position: int) -> None:
    """End a request whose row at ``position`` is not finite; the other rows are not affected."""
    arrival = sequence.arrival
    _log.warning("not_finite", request_id=arrival.request.request_id, position=position)
    arrival.sink.fail(
        NotFiniteError(
            f"the model computed NaN or infinity at position {position} of the sequence (token id "
            f"{sequence.tokens[position]}); check the model's weights, above all the embedding of "
            "that token"
        )
    )


def read_back(outcomes: Outcomes) -> list[Outcome]:
    """Bring the outcomes to the host: the round's one synchronisation."""
    pairs_2B = torch.stack((outcomes.accepted_B, outcomes.bonus_B)).tolist()
    return [Outcome(accepted, bonus) for accepted, bonus in zip(*pairs_2B, strict=True)]
