"""A controller whose choices a test sets."""

from ssd.speculation.controller import Choice, Controller, ControllerReport, Reason
from ssd.speculation.estimates import Calibration
from ssd.speculation.round_record import RoundRecord


class ScriptedController(Controller):
    """Makes given choices, one a round; the last one repeats. It keeps the rounds."""

    def __init__(self, *choices: Choice, speed_up: float = 0.0) -> None:
        self.choices = list(choices)
        self.rounds: list[RoundRecord] = []
        self.calibration = Calibration()
        self._shown_speed_up = speed_up

    def choose(self, num_sequences: int) -> Choice:  # noqa: ARG002 - all have the same choice
        """Return the next choice."""
        return self.choices.pop(0) if len(self.choices) > 1 else self.choices[0]

    def add_round(self, record: RoundRecord) -> None:
        """Keep a round."""
        self.rounds.append(record)

    def report(self) -> ControllerReport:
        """Return the choice in use."""
        choice = self.choices[0]
        return ControllerReport(
            choice.is_on, Reason.MEASURING, self._shown_speed_up, choice.max_proposed
        )
