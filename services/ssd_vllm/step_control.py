"""Mode AUTO for vLLM: the controller of our target chooses whether a step speculates.

A step is measured from the end of the one before it to its own, so the time of vLLM's scheduler
counts. Steps that store a part of a prompt are not measured: it runs in the same pass. The
controller has no calibration of this target. It begins with speculation and measures plain decoding
after ``FIRST_PAUSE`` steps.
"""

from collections.abc import Sequence
from typing import Protocol

from ssd.pool.rounds import Lookup, VerifiedRound
from ssd.ports import Clock
from ssd.speculation.controller import Choice
from ssd.speculation.round_samples import RoundSample
from ssd.types import LookupResult

_ANSWERED = (LookupResult.HIT, LookupResult.MISS, LookupResult.LATE)


class StepController(Protocol):
    """The part of ``ssd.speculation.controller.Controller`` that steps use."""

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next step."""
        ...

    def note(self, sample: RoundSample) -> None:
        """Note the measurements of a step."""
        ...


class StepControl:
    """Asks the controller before each step, and measures it. The worker's thread."""

    def __init__(self, controller: StepController | None, lookahead: int, clock: Clock) -> None:
        """Construct.

        Args:
            controller: None: every step speculates (mode SPECULATIVE).
            lookahead: tokens of a full proposal (K).
            clock: of the pool.
        """
        self._controller = controller
        self._lookahead = lookahead
        self._clock = clock
        self._begun_at = 0.0
        self._ended_at: float | None = None
        """End of the step before; None if its requests have all ended."""
        self.choice = Choice(is_on=True, max_proposed=lookahead)

    def begin(self, num_running: int) -> bool:
        """Choose for a step; returns whether sessions must be closed, because it is plain."""
        self._begun_at = self._clock.now()
        if self._controller is None or not num_running:
            return False
        was_on = self.choice.is_on
        self.choice = self._controller.choose(num_running)
        return was_on and not self.choice.is_on

    def end(
        self,
        results: Sequence[VerifiedRound],
        lookups: Sequence[Lookup],
        *,
        verified_at: float,
        num_sessions: int,
        has_prompt: bool,
    ) -> None:
        """Measure a step that has sent its outcomes.

        Args:
            results: of its rows; those of requests that no draft knows have no tokens.
            lookups: of each.
            verified_at: when the tokens were known.
            num_sessions: for which drafts worked during the step.
            has_prompt: whether it also stored a part of a prompt.
        """
        before, now = self._ended_at, self._clock.now()
        is_last = all(each.is_finished for each in results)
        self._ended_at = None if is_last else now
        if self._controller is None or before is None or has_prompt:
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
                num_tokens=sum(1 + each.outcome.accepted for each in results),
                columns=1 + max(each.num_proposed for each in results),
                num_proposed=sum(each.num_proposed for each in results),
                num_accepted_K=tuple(accepted_K),
                seconds=now - before,
                verify_seconds=verified_at - self._begun_at,
            )
        )
