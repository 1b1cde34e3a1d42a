"""What the controller knows of the rounds: estimates of a load, and of the newest choice. Pure."""

from collections import deque
from dataclasses import dataclass, field

from ssd.speculation.round_samples import Mean, Recent, SpeedUp

FIRST_TRIAL_SECONDS = 1.0
"""Time of rounds before the first trial, and between trials until they agree."""
RECENT_ROUNDS = 16
"""Rounds before a trial whose time is compared with that of the trial."""
NUM_TRIALS = 3
"""Newest trials whose median decides."""
LOSS_ROUNDS = 16
"""Rounds of plain decoding whose time speculation may lose before a trial of plain decoding."""
HOPELESS_ROUNDS = 2
HOPELESS_SPEED_UP = 0.5
"""Speculation below this speed-up that has lost ``LOSS_ROUNDS`` is judged after
``HOPELESS_ROUNDS``."""
WINDOW = 256
"""Rounds that means of speculation remember."""
PLAIN_WINDOW = 64
"""Rounds that means of times remember."""


@dataclass(slots=True)
class Load:
    """Estimates and choice of one range of running sequences."""

    max_proposed: int
    is_on: bool = True
    is_judged: bool = False
    judged_speed_up: float = 0.0
    """The speed-up by which the choice was last judged; 0 before the first time."""
    plain: Recent = field(default_factory=lambda: Recent(RECENT_ROUNDS))
    """Seconds of a round of plain decoding, over the calibrated time of its verify."""
    speed_up: SpeedUp = field(default_factory=lambda: SpeedUp(WINDOW))
    trials: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TRIALS))
    """Speed-ups of the newest trials."""
    verify: dict[int, Mean] = field(default_factory=dict)
    """Seconds of a verify by columns, over the calibrated time."""
    host: Mean = field(default_factory=lambda: Mean(PLAIN_WINDOW, 0.0))
    """Seconds of a round beside its verify."""
    accepted_K: list[Mean] = field(default_factory=list)
    """Share of the sequences whose proposed token at a position was accepted."""
    rounds: int = 0
    """Measured rounds of speculation since its last change."""
    plain_seconds: float = 0.0
    """Time of a round of plain decoding."""
    loss_seconds: float = 0.0
    """Time that speculation has lost against plain decoding, less the time that it then gained."""
    trial_pause: float = FIRST_TRIAL_SECONDS

    @property
    def ratio(self) -> float:
        """Tokens/s of speculation over those of plain decoding."""
        return self.speed_up.ratio(self.plain.value)

    @property
    def recent_ratio(self) -> float:
        """The speed-up in the newest rounds."""
        return self.speed_up.recent_ratio(self.plain.value, RECENT_ROUNDS)

    @property
    def has_lost(self) -> bool:
        """Whether speculation has lost enough for a trial of plain decoding."""
        return self.loss_seconds > LOSS_ROUNDS * self.plain_seconds

    @property
    def error(self) -> float:
        """The standard error of ``ratio``."""
        return self.speed_up.error(self.plain.value)

    def is_hopeless(self, loss_seconds: float) -> bool:
        """Whether few rounds have lost so much that no more are needed."""
        return (
            self.rounds >= HOPELESS_ROUNDS
            and self.ratio < HOPELESS_SPEED_UP
            and loss_seconds > LOSS_ROUNDS * self.plain_seconds
        )

    @property
    def is_sure(self) -> bool:
        """Whether the newest trials agree; one is enough if its result is far from 1."""
        if len({each >= 1.0 for each in self.trials}) != 1:
            return False
        return is_far(self.trials[-1]) or len(self.trials) == NUM_TRIALS


@dataclass(slots=True)
class Stage:
    """The rounds since the last change of the choice in use."""

    is_trial: bool = False
    rounds: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Time of plain decoding for the same tokens."""
    answered_rounds: int = 0
    """Rounds from the first one with a table on."""
    is_measured: bool = False
    """Whether most sessions are open, so that rounds of speculation count."""
    open_rounds: int = 0
    """Rounds since then."""
    is_length_chosen: bool = False
    """Whether the length was chosen again because speculation seemed slower."""
    plain: list[float] = field(default_factory=list)
    """Rounds of a trial of plain decoding, over the calibrated time of their verify."""

    @property
    def loss_seconds(self) -> float:
        """Time lost against plain decoding."""
        return max(0.0, self.seconds - self.plain_seconds)


def is_far(speed_up: float) -> bool:
    """Whether noise alone hardly makes such a result of a trial."""
    return not HOPELESS_SPEED_UP <= speed_up <= 1.0 / HOPELESS_SPEED_UP


def load_key(num_sequences: int) -> int:
    """Return the number of the load: 1, 2, 3 to 4, 5 to 8, 9 to 16 sequences, and so on."""
    return (num_sequences - 1).bit_length()
