"""Mode AUTO for vLLM: the controller of our target chooses whether a step speculates.

A step is measured from the end of the one before it to its own, so the time of vLLM's scheduler
counts. Steps that store a part of a prompt are not measured: it runs in the same pass. The
controller has no calibration of this target. It begins with speculation and measures plain decoding
after ``FIRST_PAUSE`` steps.
"""

from collections.abc import Sequence
from typing import Protocol

from ssd import telemetry
from ssd.pool.metrics import LookupMetrics, publish_report
from ssd.pool.round_log import RoundLog, SequenceCounts
from ssd.pool.rounds import Lookup, VerifiedRound
from ssd.ports import Clock
from ssd.speculation.controller import Choice, Reason, Report
from ssd.speculation.round_samples import RoundSample
from ssd.types import LookupResult, Mode

_PARTS = ("host", "verify", "wait", "commit")
"""Of ``ssd_round_seconds``. The part verify has vLLM's forward pass and its sampler."""
_ANSWERED = (LookupResult.HIT, LookupResult.MISS, LookupResult.LATE)


class StepController(Protocol):
    """The part of ``ssd.speculation.controller.Controller`` that steps use."""

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next step."""
        ...

    def note(self, sample: RoundSample) -> None:
        """Note the measurements of a step."""
        ...

    def report(self) -> Report:
        """Return the choice without its trials."""
        ...


class StepControl:
    """Asks the controller before each step, and measures it. The worker's thread.

    Any thread may set ``mode``, which applies from the next step on.
    """

    def __init__(
        self,
        controller: StepController,
        mode: Mode,
        lookahead: int,
        round_log: RoundLog,
        clock: Clock,
    ) -> None:
        """Construct.

        Args:
            controller: chooses in mode AUTO.
            mode: AUTO; SPECULATIVE: every step speculates; AUTOREGRESSIVE: none.
            lookahead: tokens of a full proposal (K).
            round_log: for the status of the pool.
            clock: of the pool.
        """
        self.mode = mode
        self._controller = controller
        self._round_log = round_log
        self._metrics = LookupMetrics(lookahead)
        seconds = telemetry.ROUND_SECONDS
        self._part_seconds = [seconds.labels(part=each) for each in _PARTS]
        self._lookahead = lookahead
        self._clock = clock
        self._begun_at = 0.0
        self._ended_at: float | None = None
        """End of the step before; None if its requests have all ended."""
        self.choice = Choice(is_on=True, max_proposed=lookahead)

    def begin(self, num_running: int, num_known: int) -> bool:
        """Choose for a step; returns whether sessions must be closed, because it is plain.

        Args:
            num_running: requests that take part.
            num_known: those of them for which drafts may work.
        """
        self._begun_at = self._clock.now()
        # In mode AUTOREGRESSIVE the choice is off, too.
        eligible = num_known if self._round_log.speculation.is_on else 0
        counts = SequenceCounts(running=num_running, eligible=eligible)
        if counts != self._round_log.counts:
            self._round_log.note_counts(counts, self._begun_at)
            telemetry.RUNNING_SEQUENCES.set(num_running)
        if not num_running:
            return False
        was_on = self.choice.is_on
        match self.mode:
            case Mode.AUTO:
                self.choice = self._controller.choose(num_running)
            case Mode.SPECULATIVE:
                self.choice = Choice(is_on=True, max_proposed=self._lookahead)
            case _:
                self.choice = Choice(is_on=False, max_proposed=0)
        if self.mode is not Mode.AUTO:
            choice = self.choice
            self._publish(Report(choice.is_on, Reason.MEASURING, 0.0, choice.max_proposed))
        return was_on and not self.choice.is_on

    def end(
        self,
        results: Sequence[VerifiedRound],
        lookups: Sequence[Lookup],
        *,
        verified_at: float,
        looked_up_at: float,
        num_sessions: int,
        has_prompt: bool,
    ) -> None:
        """Measure a step that has sent its outcomes.

        Args:
            results: of its rows; those of requests that no draft knows have no tokens.
            lookups: of each.
            verified_at: when the tokens were known.
            looked_up_at: when the pool had the lookups, before it sent the outcomes.
            num_sessions: for which drafts worked during the step.
            has_prompt: whether it also stored a part of a prompt.
        """
        before, now = self._ended_at, self._clock.now()
        is_last = all(each.is_finished for each in results)
        self._ended_at = None if is_last else now
        self._metrics.observe(results, lookups)
        if before is None or has_prompt:
            return
        num_tokens = sum(1 + each.outcome.accepted for each in results)
        verify_seconds = verified_at - self._begun_at
        self._round_log.begin(before)
        self._round_log.note_outcomes(verify_seconds, verified_at)
        self._round_log.end(now - before, len(results), num_tokens)
        wait, commit = looked_up_at - verified_at, now - looked_up_at
        parts = (self._begun_at - before, verify_seconds, wait, commit)
        for part, seconds in zip(self._part_seconds, parts, strict=True):
            part.observe(seconds)
        if self.mode is not Mode.AUTO:
            return
        accepted_K = [0] * self._lookahead
        for result in results:
            for position in range(result.outcome.accepted):
                accepted_K[position] += 1
        self._controller.note(
            RoundSample(
                num_sequences=len(results),
                num_auto=sum(bool(each.token_ids) for each in results),
                num_sessions=num_sessions,
                num_answered=sum(each.result in _ANSWERED for each in lookups),
                num_tokens=num_tokens,
                columns=1 + max(each.num_proposed for each in results),
                num_proposed=sum(each.num_proposed for each in results),
                num_accepted_K=tuple(accepted_K),
                seconds=now - before,
                verify_seconds=verify_seconds,
            )
        )
        self._publish(self._controller.report())

    def _publish(self, report: Report) -> None:
        if report != self._round_log.speculation:
            self._round_log.speculation = report
            publish_report(report)
