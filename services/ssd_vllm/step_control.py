"""Mode AUTO for vLLM: the controller of our target chooses whether a step speculates.

A step is measured from the end of the one before it to its own, so the time of vLLM's scheduler
counts. A part of a prompt runs in the same pass; what it took is estimated.
"""

from collections.abc import Sequence

from ssd.observability import metrics
from ssd.pool.metrics import RoundMetrics, publish_mode, publish_report
from ssd.pool.round_log import RoundLog, SequenceCounts
from ssd.pool.rounds import PoolRound, RoundResult
from ssd.ports import Clock
from ssd.speculation.controller import Choice, Controller
from ssd.speculation.estimates import PassTimes
from ssd.speculation.round_record import RoundRecord
from ssd.types import Mode

_PARTS = ("host", "verify", "wait", "commit")
"""Parts of ``ssd_round_seconds``. The part verify has vLLM's forward pass and its sampler."""
PAUSE_SECONDS = 1.0
"""A longer time between two steps is not measured: the engine was probably paused."""


class StepControl:
    """Asks the controller before each step, and measures it. The worker's thread."""

    def __init__(
        self,
        controller: Controller,
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
            round_log: log for the status of the pool.
            clock: clock of the pool.
        """
        self.use(controller)
        self.round_log = round_log
        self._published_mode = mode
        """Mode of the last step, published by its thread."""
        self.set_mode(mode)
        self._metrics = RoundMetrics(lookahead, _PARTS)
        self._lookahead = lookahead
        self.clock = clock
        self._begun_at = 0.0
        self._ended_at: float | None = None
        """End of the step before; None if the time since then is no part of a step."""
        self.choice = Choice(is_on=True, max_proposed=lookahead)

    def use(self, controller: Controller) -> None:
        """Ask another controller; before the first step."""
        self.controller = controller
        self._passes = PassTimes(controller.calibration)

    def set_mode(self, mode: Mode) -> None:
        """Let a mode apply from the next step on, and publish it. Any thread."""
        self.mode = mode
        publish_mode(mode, self.round_log)

    def begin(self, num_running: int, num_known: int) -> bool:
        """Choose for a step; returns whether sessions must be closed, because it is plain.

        Args:
            num_running: requests that take part.
            num_known: those of them for which drafts may work.
        """
        self._begun_at = self.clock.now()
        self._publish_counts(num_running, num_known)
        if not num_running:
            return False
        was_on = self.choice.is_on
        self.choice = self._choose(num_running)
        return was_on and not self.choice.is_on

    def _publish_counts(self, num_running: int, num_known: int) -> None:
        eligible = num_known if self.round_log.auto_speculation.is_on else 0
        counts = SequenceCounts(running=num_running, eligible=eligible)
        if counts != self.round_log.counts:
            self.round_log.set_counts(counts, self._begun_at)
            metrics.RUNNING_SEQUENCES.set(num_running)

    def _choose(self, num_running: int) -> Choice:
        """Return the choice of the controller; in other modes the fixed one."""
        mode = self.mode
        if mode is Mode.AUTO:
            self._published_mode = mode
            return self.controller.choose(num_running)
        if self._published_mode is not mode:
            # A report of AUTO can have been published beside the change of the mode.
            publish_mode(mode, self.round_log)
            self._published_mode = mode
        is_on = mode is Mode.SPECULATIVE
        return Choice(is_on=is_on, max_proposed=self._lookahead if is_on else 0)

    @property
    def is_paused(self) -> bool:
        """Whether the engine has paused since the step before."""
        return self._ended_at is not None and self.clock.now() - self._ended_at > PAUSE_SECONDS

    def skip_interval(self) -> None:
        """Do not measure the time up to the next step."""
        self._ended_at = None

    def end(
        self,
        results: Sequence[RoundResult],
        pool_round: PoolRound,
        *,
        decided_at: float,
        num_sessions: int,
        prompt_tokens: int,
    ) -> None:
        """Measure a step that has sent its outcomes.

        Args:
            results: results of its rows; the result of a request outside the pool has no tokens.
            pool_round: what the pool returned for it.
            decided_at: when the tokens were known.
            num_sessions: sessions for which drafts worked during the step.
            prompt_tokens: tokens of prompts that it stored beside them.
        """
        before, now = self._ended_at, self.clock.now()
        is_last = all(result.is_finished for result in results)
        self._ended_at = None if is_last else now
        record = RoundRecord(
            prompt_tokens=prompt_tokens, num_sessions=num_sessions, decided_at=decided_at
        )
        for result, lookup in zip(results, pool_round.lookups, strict=True):
            accepted = result.outcome.accepted
            record.add_outcome(result.num_proposed, accepted, accepted + 1)
            record.add_lookup(lookup.result)
            record.num_auto += bool(result.token_ids)
        self._metrics.observe_tokens(record)
        if before is None:
            return
        record.begun_at = before
        record.verify_seconds = decided_at - self._begun_at
        if prompt_tokens:
            self._passes.divide(record)
        else:
            self._passes.add_round(record)
        record.wait_seconds = pool_round.looked_up_at - decided_at
        record.commit_seconds = now - pool_round.looked_up_at
        record.seconds = now - before
        self.round_log.add_round(record)
        self._metrics.observe_seconds(record)
        if self.mode is Mode.AUTO:
            self.controller.add_round(record)
            publish_report(self.controller.report(), self.round_log)
