"""The decode loop: verify, choose, stream, look up, commit. ``run_round`` is the overview.

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
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ssd.engine.batch import PagedBatch
from ssd.errors import NotFiniteError, RankError
from ssd.observability import log as log_module
from ssd.observability import metrics
from ssd.pool.metrics import RoundMetrics
from ssd.pool.rounds import Lookup, RoundResult
from ssd.speculation.round_record import PARTS, RoundRecord
from ssd.speculation.verification import verify_coupled
from ssd.types import FinishReason, GenerationChunk, LookupResult, Round, TokenText, Usage
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.ports import LoopContext, Runner
from ssd_target.decoding.sampler import Sampler
from ssd_target.decoding.scheduler import Part, Scheduler, StepPlan
from ssd_target.decoding.sequence import Sequence
from ssd_target.decoding.sequential_drafter import SequentialDrafter
from ssd_target.decoding.speculation_control import SpeculationControl

_log = log_module.get_logger(__name__)
_LONG_NOISE_SECONDS = 0.002
"""Readers do not wait for noise that takes longer: large vocabularies or batches."""
_IDLE_SECONDS = 1.0
"""Maximum wait of an idle step thread for a request."""
Args = ParamSpec("Args")
Result = TypeVar("Result")
Timed = Callable[Concatenate["DecodeLoop", Args], Result]


def _timed(field: str) -> Callable[[Timed[Args, Result]], Timed[Args, Result]]:
    """Decorate a part of a round: its duration becomes ``field`` of the record."""

    def decorate(part: Timed[Args, Result]) -> Timed[Args, Result]:
        @wraps(part)
        def run(loop: "DecodeLoop", /, *args: Args.args, **named: Args.kwargs) -> Result:
            begun_at = loop.clock.now()
            result = part(loop, *args, **named)
            setattr(loop.record, field, loop.clock.now() - begun_at)
            return result

        return run

    return decorate


class DecodeLoop:
    """Runs rounds until the inbox is closed, then ends every request. Step thread only."""

    def __init__(
        self,
        context: LoopContext,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        control: SpeculationControl,
        drafter: SequentialDrafter | None = None,
    ) -> None:
        """Construct; without a ``drafter``, no request has the mode SYNCHRONOUS."""
        self._inbox = context.inbox
        self._drafts = context.drafts
        self._wakeups = context.wakeups
        self._round_log = context.round_log
        self.clock = context.clock
        self._watchdog = context.watchdog
        self._runner = runner
        self._scheduler = scheduler
        self._builder = BatchBuilder(runner.engine, runner.verify_columns)
        self._sampler = sampler
        self._control = control
        self._drafter = drafter
        self._metrics = RoundMetrics(runner.engine.lookahead, (*PARTS, "host"))
        self._output_tokens = metrics.TOKENS_TOTAL.labels(kind="output")
        self._prompt_tokens = metrics.TOKENS_TOTAL.labels(kind="prompt")
        self._cached_tokens = metrics.TOKENS_TOTAL.labels(kind="cached")
        self.record = RoundRecord()
        """Record of the newest round."""
        self._num_rows = 0
        """Rows of the newest verify."""
        self._noise_seconds = 0.0
        """Time of the noise in the newest complete round."""
        blocks = scheduler.blocks
        for state, count in (
            ("free", lambda: blocks.num_empty),
            ("cached", lambda: blocks.num_cached),
            ("used", lambda: blocks.num_taken),
        ):
            metrics.KV_BLOCKS.labels(state=state).set_function(count)

    def run(self) -> None:
        """Run rounds until the inbox is closed, then cancel the remaining requests.

        Raises:
            RankError: another rank of the model has ended or does not answer.
        """
        crash: Callable[[], Exception] = partial(RuntimeError, "the step loop crashed")
        try:
            while not self._inbox.is_closed:
                if self._scheduler.is_idle:
                    self._publish_counts()
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
        self.record = RoundRecord(begun_at=self.clock.now())
        plan = self._scheduler.plan(self._inbox.drain(), self._num_rows)
        self._apply(plan)
        if plan.prefills or plan.replays:
            self._wakeups.flush()
        self._store(plan)
        sequences, logits_BPV = self._verify(plan)
        if sequences:
            results = self._choose(sequences, logits_BPV)
            self._add_pass(plan)
            self._stream(sequences, results)
            lookups = self._look_up_and_commit(results)
            self._conclude(sequences, lookups)
            self._fill_noise(sequences)
            self._end_round(sequences)
        else:
            self._drafts.skip_interval()
            self._wakeups.flush()

    def _apply(self, plan: StepPlan) -> None:
        """End the requests that will not run, prepare the admitted ones, open sessions."""
        for sequence, error in plan.refused:
            sequence.sink.fail(error)
        for sequence in plan.cancelled:
            self._leave(sequence)
        for sequence in (*plan.dropped, *plan.cancelled):
            _put_last(sequence, GenerationChunk(token_ids=()))
            self._drafts.end(sequence.sequence_id)
        if plan.preempted:
            metrics.PREEMPTIONS_TOTAL.inc(len(plan.preempted))
            for sequence in plan.preempted:
                self._leave(sequence)
            self._drafts.release(sequence.sequence_id for sequence in plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence)
        for sequence in plan.moved:
            self._builder.set_blocks(sequence.slot, sequence.blocks)
        for sequence in self._control.apply(plan.running, len(plan.decoding)):
            sequence.proposal = ()
        # A draft assumes that the round after an opening has no proposal.
        self._drafts.open_sessions(
            sequence.sequence_id
            for sequence in plan.running
            if not sequence.proposal and self._control.may_open(sequence)
        )
        self.record.num_sessions = self._drafts.num_sessions
        self.record.prompt_tokens = plan.num_stored
        self._publish_counts()

    def _admit(self, sequence: Sequence) -> None:
        """Prepare for a sequence that has a slot from now on, perhaps again."""
        self._sampler.admit(sequence)
        if sequence.is_synchronous:
            assert self._drafter is not None
            self._drafter.admit(sequence)
        if not sequence.num_preemptions:
            if sequence.may_speculate:
                self._drafts.begin(sequence.sequence_id, sequence.opening())
            times = sequence.record
            times.admitted_at = self.clock.now()
            metrics.QUEUE_SECONDS.observe(times.admitted_at - times.arrived_at)
            self._prompt_tokens.inc(sequence.num_prompt)

    @_timed("prefill_seconds")
    def _store(self, plan: StepPlan) -> None:
        """Store the parts of texts that the verify does not store."""
        if not plan.is_joined:
            for part in plan.prefills:
                prompt = self._builder.prompts([part])
                self._keep([part], [self._runner.prefill(prompt, self._watchdog.heartbeat)])
        self._watchdog.heartbeat()
        if plan.replays:
            batch = self._builder.stored(plan.replays, self._runner.engine.num_columns)
            self._runner.verify(self._runner.prepare(batch))
        if self._drafter is not None:
            # A prompt that is not finite has ended its sequence.
            self._drafter.store(
                sequence
                for sequence in plan.running
                if sequence.is_synchronous and sequence.finish_reason is None
            )

    def _keep(self, parts: Rows[Part], bad_columns: Rows[int | None]) -> None:
        """Put the stored parts into the prefix cache, and fail those that are not finite."""
        for (sequence, positions), column in zip(parts, bad_columns, strict=True):
            if column is None:
                self._scheduler.keep(sequence, positions)
            else:
                sequence.finish_reason = FinishReason.FAILED
                _fail(sequence, positions.start + column)
                self._finish(sequence)

    @_timed("draft_seconds")
    def _draft(self, sequences: Rows[Sequence]) -> None:
        """Let the draft on the target's own device propose for the sequences of its mode."""
        if self._drafter is not None:
            synchronous = [
                sequence
                for sequence in sequences
                if sequence.is_synchronous and self._control.max_proposed(sequence) > 0
            ]
            if synchronous:
                proposals = self._drafter.propose(synchronous, before_pass=self._wakeups.flush)
                for sequence, proposal, result in proposals:
                    sequence.proposal = proposal
                    sequence.record.add_lookup(result)

    @_timed("prepare_seconds")
    def _prepare(self, sequences: Rows[Sequence], prompts: PagedBatch | None) -> Any:
        """Build the inputs of the forward pass."""
        engine, proposals = self._runner.engine, [sequence.proposal for sequence in sequences]
        self._num_rows = len(sequences) + sum(map(len, proposals))
        if engine.deterministic:
            self._num_rows = engine.max_num_seqs * engine.num_columns
        # Rounds without sessions have no padding: the controller measures them as plain decoding.
        keeps_rows = self.record.num_sessions > 0
        batch = self._builder.round(sequences, proposals, keeps_rows=keeps_rows, prompts=prompts)
        return self._runner.prepare(batch)

    def _verify(self, plan: StepPlan) -> tuple[list[Sequence], torch.Tensor]:
        """Verify the proposals, and store the prompts of a joined plan.

        Returns:
            The sequences of the round and their logits, [B, P, V].
        """
        sequences = [sequence for sequence in plan.decoding if sequence.finish_reason is None]
        self.record.stored_at = self.clock.now()
        if not sequences and not plan.is_joined:
            return [], torch.empty(0)
        verified = sequences[: len(sequences) - len(plan.completing)]
        self._draft(verified)
        prompts = self._builder.prompts(plan.prefills) if plan.is_joined else None
        prepared = self._prepare(verified, prompts)
        self._watchdog.heartbeat()
        self._wakeups.flush()
        logits_BPV = self._run_pass(prepared)[: len(sequences)]
        if prompts is not None:
            self.record.stored_at = self.clock.now()
            self._keep(plan.prefills, self._runner.bad_columns(prompts))
        rows = [row for row, sequence in enumerate(sequences) if sequence.finish_reason is None]
        if len(rows) < len(sequences):
            sequences, logits_BPV = [sequences[row] for row in rows], logits_BPV[rows]
        return sequences, logits_BPV

    @_timed("verify_seconds")
    def _run_pass(self, prepared: Any) -> torch.Tensor:
        return self._runner.verify(prepared)

    def _add_pass(self, plan: StepPlan) -> None:
        """Add the times and the padding of the pass to the record, after the pass has ended."""
        self.record.set_device_time(self._runner.verify_seconds())
        self.record.num_padding = self._runner.num_padding
        self._control.add_pass(self.record, has_prompts=plan.is_joined)

    @_timed("sample_seconds")
    def _choose(self, sequences: Rows[Sequence], logits_BPV: torch.Tensor) -> list[RoundResult]:
        """Choose the target's tokens, and append those that are accepted and the bonus token."""
        proposals = [sequence.proposal for sequence in sequences]
        chosen = self._sampler.choose(sequences, proposals, logits_BPV)
        record = self.record
        results: list[RoundResult] = []
        for sequence, proposal, tokens in zip(sequences, proposals, chosen, strict=True):
            outcome = verify_coupled(proposal, tokens)
            added = sequence.append((*proposal[: outcome.accepted], outcome.bonus))
            record.add_outcome(len(proposal), outcome.accepted, len(added))
            record.num_auto += sequence.is_auto
            results.append(
                RoundResult(
                    sequence.sequence_id,
                    added,
                    len(proposal),
                    outcome,
                    sequence.finish_reason is not None,
                    self._control.max_proposed(sequence),
                )
            )
        return results

    @_timed("stream_seconds")
    def _stream(self, sequences: Rows[Sequence], results: Rows[RoundResult]) -> None:
        """Put the tokens of the round into the sinks of their requests."""
        self.record.decided_at = self.clock.now()
        for sequence, result in zip(sequences, results, strict=True):
            if not sequence.record.num_rounds and sequence.num_cached:
                if not sequence.choice:
                    # The other continuations also find what the first one has stored.
                    metrics.PREFIX_HITS_TOTAL.inc()
                self._cached_tokens.inc(sequence.num_cached)
            is_paused = self._control.is_paused(sequence)
            sequence.record.add_round(self.record, result, is_paused=is_paused)
            chunk = GenerationChunk(token_ids=result.token_ids)
            if sequence.sampling.logprobs is not None:
                chunk.logprobs = self._sampler.logprobs(sequence)[: len(result.token_ids)]
            if sequence.report_rounds:
                chunk.rounds = (_reported_round(sequence, result),)
            if sequence.finish_reason is None:
                sequence.sink.put(chunk)
                if sequence.sink.is_abandoned:
                    self._inbox.cancel(sequence.sequence_id)
            elif sequence.finish_reason is FinishReason.FAILED:
                sequence.sink.put(chunk)
                _fail(sequence, len(sequence.tokens) - 1)
            else:
                _put_last(sequence, chunk)

    def _look_up_and_commit(self, results: Rows[RoundResult]) -> list[Lookup]:
        """Look the outcomes up in the tables of the drafts, and send them to the drafts."""
        record, began = self.record, self.clock.now()
        pool_round = self._drafts.round(
            results,
            record.decided_at,
            self._wakeups.flush,
            prompt_seconds=record.prefill_seconds,
        )
        record.wait_seconds += pool_round.looked_up_at - began
        record.commit_seconds += self.clock.now() - pool_round.looked_up_at
        return pool_round.lookups

    def _conclude(self, sequences: Rows[Sequence], lookups: Rows[Lookup]) -> None:
        """Keep the next proposals of the sequences that continue; free the resources of others."""
        for sequence, lookup in zip(sequences, lookups, strict=True):
            own = sequence.record.newest_lookup
            self.record.add_lookup(own if sequence.is_synchronous else lookup.result)
            if sequence.finish_reason is not None:
                self._finish(sequence)
            else:
                sequence.proposal = lookup.tokens
                sequence.record.add_lookup(lookup.result)

    @_timed("noise_seconds")
    def _fill_noise(self, sequences: Rows[Sequence]) -> None:
        """Compute the noise of the next round, while the drafts work on the commits."""
        if self._noise_seconds > _LONG_NOISE_SECONDS:
            self._wakeups.flush()
        continuing = [sequence for sequence in sequences if sequence.finish_reason is None]
        if continuing:
            self._sampler.fill(continuing, [len(sequence.proposal) for sequence in continuing])

    def _end_round(self, sequences: Rows[Sequence]) -> None:
        """Publish the complete round."""
        record = self.record
        record.seconds = self.clock.now() - record.begun_at
        self._noise_seconds = record.noise_seconds
        self._round_log.add_round(record)
        self._metrics.observe_tokens(record)
        self._metrics.observe_seconds(record)
        self._output_tokens.inc(record.num_tokens)
        # A round that also drafted itself measures neither plain nor speculative decoding.
        if self._drafter is None or not any(sequence.is_synchronous for sequence in sequences):
            self._control.add_round(record)

    def _publish_counts(self) -> None:
        """Publish the sequences that the scheduler holds, if they have changed."""
        log = self._round_log
        self._inbox.num_new = self._scheduler.num_new
        counts = self._scheduler.counts(auto_speculates=log.speculation.is_on)
        if counts != log.counts:
            self._inbox.num_waiting = counts.waiting
            log.set_counts(counts, self.clock.now())
            metrics.RUNNING_SEQUENCES.set(counts.running)
            metrics.WAITING_SEQUENCES.set(counts.waiting)

    def _cancel_all(self) -> None:
        self._apply(self._scheduler.plan(self._inbox.drain()))
        ids = [sequence.sequence_id for sequence in self._scheduler.sequences()]
        self._apply(self._scheduler.plan(ids))
        self._wakeups.flush()

    def _fail_all(self, crash: Callable[[], Exception]) -> None:
        """Fail every request that is left. After a normal end there is none, after a crash all."""
        self._inbox.close()
        new = [event for event in self._inbox.drain() if isinstance(event, Sequence)]
        for sequence in (*self._scheduler.sequences(), *new):
            sequence.sink.fail(crash())
        self._wakeups.flush()

    def _finish(self, sequence: Sequence) -> None:
        """Free the resources of a running sequence that has ended."""
        self._scheduler.finish(sequence)
        self._leave(sequence)
        self._drafts.end(sequence.sequence_id)

    def _leave(self, sequence: Sequence) -> None:
        """Release what belongs to the slot of a sequence."""
        self._sampler.release(sequence)
        if self._drafter is not None:
            self._drafter.release(sequence)
        sequence.proposal = ()
        sequence.record.newest_lookup = LookupResult.NONE


def _reported_round(sequence: Sequence, result: RoundResult) -> Round:
    """Describe a round to a request that asks for it."""
    return Round(
        proposed=tuple(map(TokenText, sequence.proposal)),
        accepted_tokens=min(result.outcome.accepted, len(result.token_ids)),
        added=tuple(map(TokenText, result.token_ids)),
        lookup=sequence.record.newest_lookup,
    )


def _put_last(sequence: Sequence, chunk: GenerationChunk) -> None:
    """Put the last chunk of a sequence, with its usage and statistics."""
    chunk.finish_reason = sequence.finish_reason
    chunk.usage = Usage(
        prompt_tokens=sequence.num_prompt,
        completion_tokens=sequence.num_emitted,
        cached_tokens=sequence.num_cached,
    )
    chunk.statistics = sequence.record.statistics(is_synchronous=sequence.is_synchronous)
    sequence.sink.put(chunk)


def _fail(sequence: Sequence, position: int) -> None:
    """Fail a request whose grammar has failed, or whose logits are not finite at a position."""
    if sequence.grammar is not None and sequence.grammar.failure is not None:
        sequence.sink.fail(sequence.grammar.failure)
        return
    _log.warning("not_finite", request_id=sequence.request_id, position=position)
    sequence.sink.fail(
        NotFiniteError(
            f"the model computed NaN or infinity at position {position} of the sequence (token id "
            f"{sequence.tokens[position]}); check the model's weights, above all the embedding of "
            "that token"
        )
    )
