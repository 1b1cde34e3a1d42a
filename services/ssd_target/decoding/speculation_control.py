"""Between the controller and the rounds: which sequences speculate, and what a round measured."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from ssd.pool.metrics import publish_report
from ssd.pool.round_log import RoundLog
from ssd.pool.rounds import Lookup
from ssd.speculation.controller import Choice
from ssd.speculation.round_samples import RoundSample
from ssd.types import LookupResult
from ssd_target.decoding.ports import Drafts, RoundController
from ssd_target.decoding.round_result import RoundResult
from ssd_target.decoding.round_times import RoundPart, RoundTimes
from ssd_target.decoding.sequence import Sequence

_ANSWERED = (LookupResult.HIT, LookupResult.MISS, LookupResult.LATE)


class SpeculationControl:
    """Applies the choices of the controller to sequences in mode AUTO. Step thread only.

    Sequences in mode SPECULATIVE always speculate, with full proposals.
    """

    def __init__(
        self, controller: RoundController, drafts: Drafts, round_log: RoundLog, lookahead: int
    ) -> None:
        """Construct; ``lookahead`` is K, the tokens of a full proposal."""
        self._controller = controller
        self._drafts = drafts
        self._round_log = round_log
        self._lookahead = lookahead
        self._choice = Choice(is_on=True, max_proposed=lookahead)
        self._num_sessions = 0

    def apply(self, running: Iterable[Sequence], num_decoding: int) -> list[Sequence]:
        """Choose for the next round.

        Args:
            running: sequences that have a slot.
            num_decoding: those that take part in the round.

        Returns:
            The sequences that have no session from now on. Their proposals must not be used.
        """
        was_on = self._choice.is_on
        if num_decoding:
            self._choice = self._controller.choose(num_decoding)
        if self._choice.is_on or not was_on:
            return []
        released = [each for each in running if each.is_auto]
        self._drafts.release(each.sequence_id for each in released)
        return released

    def may_open(self, sequence: Sequence) -> bool:
        """Whether a sequence needs a session."""
        return sequence.may_speculate and (self._choice.is_on or not sequence.is_auto)

    def is_paused(self, sequence: Sequence) -> bool:
        """Whether a sequence would speculate, but the controller has turned it off."""
        return sequence.is_auto and not self._choice.is_on

    def max_proposed(self, sequence: Sequence) -> int:
        """Return the largest number of tokens of the next proposal of a sequence."""
        return self._choice.max_proposed if sequence.is_auto else self._lookahead

    def note_sessions(self) -> None:
        """Note the sessions for which drafts work during the round."""
        self._num_sessions = self._drafts.num_sessions

    def note_round(
        self,
        times: RoundTimes,
        results: Rows[RoundResult],
        lookups: Rows[Lookup],
        prompt_tokens: int,
    ) -> None:
        """Give a complete round to the controller, and publish its choice.

        A round that also drafted itself (mode SYNCHRONOUS) measures neither plain nor speculative
        decoding. ``prompt_tokens`` of a prompt were stored before its verify.
        """
        if any(result.sequence.is_synchronous for result in results):
            return
        accepted_K = [0] * self._lookahead
        num_proposed = num_auto = num_tokens = 0
        for result in results:
            num_auto += result.sequence.is_auto
            num_tokens += len(result.emission.token_ids)
            num_proposed += result.num_proposed
            for position in range(result.outcome.accepted):
                accepted_K[position] += 1
        self._controller.note(
            RoundSample(
                num_sequences=len(results),
                num_auto=num_auto,
                num_sessions=self._num_sessions,
                num_answered=sum(lookup.result in _ANSWERED for lookup in lookups),
                num_tokens=num_tokens,
                columns=1 + max(result.num_proposed for result in results),
                num_proposed=num_proposed,
                num_accepted_K=tuple(accepted_K),
                seconds=times.round_seconds - times.seconds[RoundPart.PREFILL],
                verify_seconds=times.seconds[RoundPart.VERIFY],
                prompt_tokens=prompt_tokens,
                prefill_seconds=times.seconds[RoundPart.PREFILL],
            )
        )
        report = self._controller.report()
        if report != self._round_log.speculation:
            self._round_log.speculation = report
            publish_report(report)
