"""Between the controller and the rounds: which sequences speculate."""

from collections.abc import Iterable

from ssd.pool.metrics import publish_report
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.speculation.controller import Choice, Controller
from ssd.speculation.estimates import PassTimes
from ssd.speculation.round_record import RoundRecord
from ssd_target.decoding.sequence import Sequence


class SpeculationControl:
    """Applies the choices of the controller to sequences in mode AUTO. Step thread only.

    Sequences in mode SPECULATIVE always speculate, with full proposals.
    """

    def __init__(
        self, controller: Controller, drafts: DraftPool, round_log: RoundLog, lookahead: int
    ) -> None:
        """Construct; ``lookahead`` is K, the tokens of a full proposal."""
        self._controller = controller
        self._drafts = drafts
        self._round_log = round_log
        self._lookahead = lookahead
        self._choice = Choice(is_on=True, max_proposed=lookahead)
        self._passes = PassTimes(controller.calibration)

    def apply(self, running: Iterable[Sequence], num_decoding: int) -> list[Sequence]:
        """Choose for the next round, and close the sessions that speculation no longer needs.

        Of the running sequences, ``num_decoding`` take part in the round.

        Returns:
            The sequences that stop speculating: their proposals are not verified.
        """
        was_on = self._choice.is_on
        if num_decoding:
            self._choice = self._controller.choose(num_decoding)
        if not was_on or self._choice.is_on:
            return []
        stopped = [sequence for sequence in running if sequence.is_auto]
        self._drafts.release(sequence.sequence_id for sequence in stopped)
        return stopped

    def may_open(self, sequence: Sequence) -> bool:
        """Whether a sequence needs a session."""
        return sequence.may_speculate and (self._choice.is_on or not sequence.is_auto)

    def is_paused(self, sequence: Sequence) -> bool:
        """Whether a sequence would speculate, but the controller has turned it off."""
        return sequence.is_auto and not self._choice.is_on

    def max_proposed(self, sequence: Sequence) -> int:
        """Return the largest number of tokens of the next proposal of a sequence."""
        if sequence.grammar is not None and not sequence.grammar.may_look_ahead:
            return 0
        return self._choice.max_proposed if sequence.is_auto else self._lookahead

    def add_pass(self, record: RoundRecord, *, has_prompts: bool) -> None:
        """Add the time of a verify; of one that has stored prompts, a part becomes prefill."""
        if has_prompts:
            self._passes.divide(record)
        else:
            self._passes.add_round(record)

    def add_round(self, record: RoundRecord) -> None:
        """Give a complete round to the controller, and publish its choice."""
        self._controller.add_round(record)
        publish_report(self._controller.report(), self._round_log)
