"""The decode loop: verify, append, stream, look up, commit. ``run_round`` is the overview.

A round verifies the proposals that the previous round looked up. Meanwhile the drafts build the
tables for the outcome of this round. The noise of the next positions is computed after the commits
have been sent, while the drafts work on them. Everything here runs on the step thread.

*Decision*: the readers of tokens are woken just before the step thread waits for tables or runs a
pass, and before noise that takes long. *Because*: waits and passes release the interpreter, which
the readers need. When they were woken at the end of sampling, the noise of a round at temperature 1
took 1.4 to 1.6 ms instead of .6 (plain decoding of the embedded pair). Their tokens arrive up to 3
ms later. *Not chosen*: one thread for each stream. *Revisit when* Python runs threads in parallel.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial

import numpy as np

from ssd.errors import NotFiniteError, RankError
from ssd.pool.rounds import Lookup
from ssd.speculation.verification import verify_coupled
from ssd.telemetry import get_logger
from ssd.types import FinishReason, GenerationChunk, Outcome, SequenceId, TokenId, Usage
from ssd_target.decoding.batch_builder import BatchBuilder, Proposals
from ssd_target.decoding.ports import Drafter, LoopContext, Runner, Sampler
from ssd_target.decoding.request_statistics import RequestStatistics
from ssd_target.decoding.round_metrics import RoundMetrics
from ssd_target.decoding.round_reports import RoundReports
from ssd_target.decoding.round_result import RoundResult
from ssd_target.decoding.round_times import RoundPart, RoundTimes
from ssd_target.decoding.scheduler import Plan, Scheduler
from ssd_target.decoding.sequence import Arrival, Sequence
from ssd_target.decoding.speculation_control import SpeculationControl

NOTHING_EMITTED = GenerationChunk(token_ids=())
_log = get_logger(__name__)
_LONG_NOISE_SECONDS = 0.002
"""Readers do not wait for noise that takes longer: large vocabularies or batches."""
_IDLE_SECONDS = 1.0
"""Maximum wait of an idle step thread for a request."""


class DecodeLoop:
    """Runs rounds until the inbox is closed, then ends every request. Step thread only."""

    def __init__(
        self,
        context: LoopContext,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        control: SpeculationControl,
        drafter: Drafter | None = None,
    ) -> None:
        self._inbox = context.inbox
        self._drafts = context.drafts
        self._wakeups = context.wakeups
        self._round_log = context.round_log
        self._clock = context.clock
        self._watchdog = context.watchdog
        self._runner = runner
        self._scheduler = scheduler
        self._builder = BatchBuilder(runner.engine, runner.verify_columns)
        self._sampler = sampler
        self._control = control
        self._drafter = drafter
        """None: no request has the mode SYNCHRONOUS."""
        self._metrics = RoundMetrics(runner.engine.num_columns)
        self._request_statistics: dict[SequenceId, RequestStatistics] = {}
        self._reports = RoundReports()
        self._noise_seconds = 0.0
        """Of the newest round."""
        self._decoding_at = 0.0
        """When the newest round began, without what was stored before it."""
        self._num_rows = 0
        """Of the newest round."""
        self._proposed: dict[SequenceId, tuple[TokenId, ...]] = {}
        """Proposal of each sequence for the next round; no entry is no proposal."""

    def run(self) -> None:
        """Run rounds until the inbox is closed, then cancel the remaining requests.

        Raises:
            RankError: another rank of the model has ended or does not answer.
        """
        crash: Callable[[], Exception] = partial(RuntimeError, "the step loop crashed")
        try:
            while not self._inbox.is_closed:
                if self._scheduler.is_idle:
                    self._note_counts()
                    self._wakeups.flush()
                    with self._watchdog.idle():
                        self._inbox.wait(_IDLE_SECONDS)
                self.run_round()
            self._cancel_all()
        except RankError as error:
            crash = partial(RankError, str(error))
            raise
        finally:
            self._fail_all(crash)

    def run_round(self) -> None:
        """Run one step: store parts of texts, then a round for all sequences that decode."""
        self._watchdog.heartbeat()
        times = RoundTimes(self._clock)
        plan = self._scheduler.plan(self._inbox.drain(), self._num_rows)
        self._apply(plan)
        if plan.num_stored:
            self._wakeups.flush()
        with times.part(RoundPart.PREFILL):
            self._store(plan)
        sequences = [each for each in plan.decoding if each.finish_reason is None]
        if not sequences:
            self._wakeups.flush()
            return
        self._round_log.begin(times.begun_at)
        self._decoding_at = self._clock.now()
        with times.part(RoundPart.DRAFT):
            self._draft(sequences)
        with times.part(RoundPart.PREPARE):
            proposals = self._builder.proposals(sequences, self._proposed)
            self._num_rows = self._count_rows(proposals)
            prepared = self._runner.prepare(self._builder.round(sequences, proposals))
        self._wakeups.flush()
        with times.part(RoundPart.VERIFY):
            logits_BPV = self._runner.verify(prepared)
        with times.part(RoundPart.SAMPLE):
            chosen_BP = self._sampler.choose(sequences, proposals, logits_BPV)
            outcomes = verify_coupled(proposals.tokens_BK, proposals.num_proposed_B, chosen_BP)
            results = self._append(sequences, proposals, outcomes)
        times.note_verify(self._runner.verify_seconds())
        decided_at = self._clock.now()
        self._round_log.note_outcomes(times.seconds[RoundPart.VERIFY], decided_at)
        with times.part(RoundPart.STREAM):
            self._push(results)
        with times.part(RoundPart.WAIT):
            verified = [each.verified() for each in results]
            lookups = self._drafts.round(verified, decided_at, before_wait=self._wakeups.flush)
        times.note_lookups(self._drafts.looked_up_at)
        self._conclude(results, lookups)
        self._fill_noise(times, results, lookups)
        self._end_round(times, results, lookups)
        self._control.note_round(times, results, lookups, plan.num_stored)

    def _apply(self, plan: Plan) -> None:
        """End the requests that will not run, prepare the admitted ones, open sessions."""
        for arrival, error in plan.refused:
            arrival.sink.fail(error)
        for sequence in plan.dropped:
            self._end(sequence, FinishReason.CANCELLED)
            self._drop(sequence)
        for sequence in plan.cancelled:
            self._end(sequence, FinishReason.CANCELLED)
            self._leave(sequence)
            self._drop(sequence)
        for sequence in plan.preempted:
            self._leave(sequence)
        if plan.preempted:
            self._drafts.release(each.sequence_id for each in plan.preempted)
            self._metrics.observe_preemptions(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence)
        for sequence in plan.moved:
            self._builder.set_blocks(sequence.slot, sequence.blocks)
        for sequence in self._control.apply(plan.running, len(plan.decoding)):
            self._proposed.pop(sequence.sequence_id, None)
        # A draft assumes that the round after an opening has no proposal.
        self._drafts.open_sessions(
            each.sequence_id
            for each in plan.running
            if self._control.may_open(each) and not self._proposed.get(each.sequence_id)
        )
        self._control.note_sessions()
        self._note_counts()

    def _admit(self, sequence: Sequence) -> None:
        """Prepare for a sequence that has a slot from now on, perhaps again."""
        self._sampler.admit(sequence)
        self._reports.admit(sequence)
        if sequence.is_synchronous:
            assert self._drafter is not None
            self._drafter.admit(sequence)
        if not sequence.num_preemptions:
            if sequence.may_speculate:
                self._drafts.begin(sequence.for_drafts())
            now = sequence.arrival.times.admitted_at = self._clock.now()
            self._metrics.observe_admission(sequence, now)
            self._request_statistics[sequence.sequence_id] = RequestStatistics(
                sequence.arrival.arrived_at, sequence.is_synchronous
            )

    def _store(self, plan: Plan) -> None:
        """Store the parts of texts that the plan contains."""
        engine = self._runner.engine
        for work in plan.prefills:
            column = self._runner.prefill(self._builder.stored([work], engine.prefill_chunk))
            if column is not None:
                work.sequence.fail()
                _fail(work.sequence, work.first + column)
                self._finish(work.sequence)
        if plan.replays:
            batch = self._builder.stored(plan.replays, engine.num_columns)
            self._runner.verify(self._runner.prepare(batch))
        if self._drafter is not None:
            self._drafter.store(each for each in plan.running if each.is_synchronous)

    def _count_rows(self, proposals: Proposals) -> int:
        engine, num_proposed_B = self._runner.engine, proposals.num_proposed_B
        if engine.deterministic:
            return engine.max_num_seqs * engine.num_columns
        return len(num_proposed_B) + int(num_proposed_B.sum())

    def _draft(self, sequences: Rows[Sequence]) -> None:
        """Let the draft on the target's own device propose for the sequences of its mode."""
        synchronous = [each for each in sequences if each.is_synchronous]
        if synchronous:
            assert self._drafter is not None
            self._wakeups.flush()
            self._proposed.update(self._drafter.propose(synchronous))

    def _append(
        self, sequences: Rows[Sequence], proposals: Proposals, outcomes: list[Outcome]
    ) -> list[RoundResult]:
        """Append to each sequence its accepted tokens and its bonus token."""
        results: list[RoundResult] = []
        for sequence, proposed, outcome in zip(sequences, proposals.tokens, outcomes, strict=True):
            base_len = len(sequence.tokens)
            emission = sequence.append((*proposed[: outcome.accepted], outcome.bonus))
            limit = self._control.max_proposed(sequence)
            results.append(RoundResult(sequence, base_len, len(proposed), outcome, emission, limit))
        return results

    def _push(self, results: Rows[RoundResult]) -> None:
        """Put the tokens of the round into the sinks of their requests."""
        now = self._clock.now()
        rounds = self._reports.rounds(results, self._proposed)
        for result in results:
            sequence, emission = result.sequence, result.emission
            request_statistics = self._request_statistics[sequence.sequence_id]
            accepted = min(result.outcome.accepted, len(emission.token_ids))
            if not request_statistics.rounds:
                sequence.arrival.times.decoding_at = self._decoding_at
                sequence.arrival.times.first_token_at = now
            request_statistics.note_round(
                self._round_log.num_rounds - 1, result.num_proposed, accepted, now
            )
            request_statistics.paused_rounds += self._control.is_paused(sequence)
            chunk = GenerationChunk(
                token_ids=emission.token_ids,
                logprobs=self._sampler.logprobs(sequence)[: len(emission.token_ids)],
                rounds=rounds.get(sequence.sequence_id, ()),
            )
            if emission.finish_reason is FinishReason.FAILED:
                sequence.arrival.sink.put(chunk)
                _fail(sequence, len(sequence.tokens) - 1)
            elif emission.finish_reason is not None:
                self._end(sequence, emission.finish_reason, chunk)
            else:
                sink = sequence.arrival.sink
                sink.put(chunk)
                if sink.is_abandoned:
                    self._inbox.cancel(sequence.sequence_id)

    def _conclude(self, results: Rows[RoundResult], lookups: Rows[Lookup]) -> None:
        """Keep the next proposals of the sequences that continue; free the resources of others."""
        self._reports.note(results, lookups)
        for result, lookup in zip(results, lookups, strict=True):
            sequence = result.sequence
            if result.emission.finish_reason is not None:
                self._finish(sequence)
            else:
                self._proposed[sequence.sequence_id] = lookup.tokens
                self._request_statistics[sequence.sequence_id].lookups.note(lookup.result)

    def _fill_noise(
        self, times: RoundTimes, results: Rows[RoundResult], lookups: Rows[Lookup]
    ) -> None:
        """Compute the noise of the next round, while the drafts work on the commits."""
        if self._noise_seconds > _LONG_NOISE_SECONDS:
            self._wakeups.flush()
        continuing = [
            (result.sequence, len(lookup.tokens))
            for result, lookup in zip(results, lookups, strict=True)
            if result.emission.finish_reason is None
        ]
        with times.part(RoundPart.NOISE):
            if continuing:
                sequences, num_proposed = zip(*continuing, strict=True)
                self._sampler.fill(sequences, np.array(num_proposed))
        self._noise_seconds = times.seconds[RoundPart.NOISE]

    def _end_round(
        self, times: RoundTimes, results: Rows[RoundResult], lookups: Rows[Lookup]
    ) -> None:
        times.end()
        num_tokens = sum(len(each.emission.token_ids) for each in results)
        self._round_log.end(times.round_seconds, len(results), num_tokens)
        self._metrics.observe_round(times, results, lookups)

    def _note_counts(self) -> None:
        """Report the counts of the scheduler, if they have changed."""
        counts = self._scheduler.counts
        if not self._round_log.speculation.is_on:
            counts = replace(counts, eligible=counts.eligible - counts.auto)
        if counts != self._round_log.counts:
            self._inbox.num_waiting = counts.waiting
            self._round_log.note_counts(counts, self._clock.now())
            self._metrics.observe_counts(counts)

    def _cancel_all(self) -> None:
        self._apply(self._scheduler.plan(self._inbox.drain()))
        for arrival in self._scheduler.arrivals():
            self._inbox.cancel(arrival.sequence_id)
        self._apply(self._scheduler.plan(self._inbox.drain()))
        self._wakeups.flush()

    def _fail_all(self, crash: Callable[[], Exception]) -> None:
        """Fail every request that is left. After a normal end there is none, after a crash all."""
        self._inbox.close()
        new = [event for event in self._inbox.drain() if isinstance(event, Arrival)]
        for arrival in (*self._scheduler.arrivals(), *new):
            arrival.sink.fail(crash())
        self._wakeups.flush()

    def _finish(self, sequence: Sequence) -> None:
        """Free the resources of a running sequence that has ended."""
        self._scheduler.finish(sequence)
        self._leave(sequence)
        self._drop(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Release what belongs to the slot of a sequence."""
        self._sampler.release(sequence)
        if self._drafter is not None:
            self._drafter.release(sequence)
        self._proposed.pop(sequence.sequence_id, None)

    def _drop(self, sequence: Sequence) -> None:
        """Release the rest of a sequence that has ended."""
        self._drafts.end(sequence.sequence_id)
        self._reports.drop(sequence.sequence_id)
        self._request_statistics.pop(sequence.sequence_id, None)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        chunk: GenerationChunk = NOTHING_EMITTED,
    ) -> None:
        """Put the last chunk of a request, with its usage and statistics."""
        arrival = sequence.arrival
        request_statistics = self._request_statistics.get(arrival.sequence_id) or RequestStatistics(
            arrival.arrived_at
        )
        usage = Usage(
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_emitted,
            cached_tokens=sequence.num_cached,
        )
        arrival.sink.put(
            replace(
                chunk,
                finish_reason=reason,
                usage=usage,
                statistics=request_statistics.statistics(self._round_log),
            )
        )


def _fail(sequence: Sequence, position: int) -> None:
    """Fail the request whose logits are not finite at ``position``; other rows continue."""
    arrival = sequence.arrival
    if arrival.grammar is not None and arrival.grammar.failure is not None:
        arrival.sink.fail(arrival.grammar.failure)
        return
    _log.warning("not_finite", request_id=arrival.request.request_id, position=position)
    arrival.sink.fail(
        NotFiniteError(
            f"the model computed NaN or infinity at position {position} of the sequence (token id "
            f"{sequence.tokens[position]}); check the model's weights, above all the embedding of "
            "that token"
        )
    )
