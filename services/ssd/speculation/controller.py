"""Chooses whether a target speculates and how long its proposals are. No clock, no I/O.

The target gives the record of each round to ``Controller.add_round``, and asks ``choose`` before
each round. Whole rounds are compared, so waits, host work and drafts that share a core with the
target count as much as forward passes. The unit of time is a round of plain decoding: it yields one
token of each sequence. Speculation gains

    tokens of a sequence - seconds of its rounds / seconds of a round of plain decoding

in rounds of plain decoding. This **balance** decides:

- **On.** The controller begins with speculation. The balance starts again whenever it is positive,
  so it contains the newest loss. When the loss exceeds ``most_loss``, a trial measures plain
  decoding, for ``PLAIN_ROUNDS``. Speculation is turned off if more than half of the loss remains
  with this measurement: the machine may have become slower, or a text may be difficult.
- **Off.** Sessions are closed, and every round measures plain decoding. A trial of speculation ends
  with half of ``most_loss``: as a gain it turns speculation on, as a loss it does not.
- **Pauses.** A trial is due after ``FIRST_PAUSE`` rounds, so that a wrong choice does not last.
  Each trial that keeps the choice makes the next pause longer, up to a share of lost time of
  ``1 / PAUSE_PER_LOSS``. While speculation is on, due trials only measure plain decoding again.
- **Ranges.** Each power of two of running sequences has its own estimates and its own choice.
- **Prompts.** A draft that shares a CPU with the target makes the chunks of prompts slower that the
  step stores. If a chunk takes longer than without drafts, the difference counts as time of the
  round.
- **Proposals.** ``proposal_length`` chooses their largest length.

*Decision*: speculation continues until it has lost a number of rounds. *Because*: the tokens of a
round differ between texts by a factor of three (embedded pair, T = 0). A comparison of the first
texts therefore turned off what is 1.9 times as fast in the long run: on recorded rounds it kept .77
of the faster mode (20 orders of 24 texts), the balance .99. *Not chosen*: sessions that
continue while plain decoding is in use, whose tables show for free what would have been accepted.
They do not show the time of a verify beside a draft that works, and the draft would work for
nothing. A trial of speculation loses at most ``most_loss / 2`` rounds. *Revisit when* opening
sessions takes much longer than that.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from ssd.speculation.estimates import Calibration, Mean, PromptTimes, Recent, size_class
from ssd.speculation.proposal_length import ProposalLength
from ssd.speculation.round_record import RoundRecord

FIRST_PAUSE = 64
"""Rounds before the first trial, and before the next one after a change."""
MAX_PAUSE = 4096
"""Rounds between two trials, unless ``PAUSE_PER_LOSS`` requires more."""
LONGEST_PAUSE = 4 * MAX_PAUSE
"""Rounds between two trials at most."""
PAUSE_GROWTH = 2
PAUSE_PER_LOSS = 100
"""Rounds before the next trial for each round that a trial has lost."""
PLAIN_ROUNDS = 8
"""Measured rounds of a trial of plain decoding."""
MAX_CHANGE = 1.25
"""A trial in which plain decoding is slower than before by this factor is repeated soon."""
CLEAR = 2.0
"""Multiple of ``most_loss`` that noise does not explain."""
SETTLE_ROUNDS = 2
"""Rounds after a change that are not measured: a draft still computes, or tables are missing. The
first table of a process takes as long as ten rounds."""
MIN_ROUNDS, MAX_ROUNDS = 8, 96
"""Measured rounds of a trial of speculation before which it does not turn speculation on, and after
which it needs a speed-up of ``MIN_GAIN``."""
MIN_GAIN = 1.03
OPENING_ROUNDS = 128
"""Rounds in which most sessions are opening after which speculation is turned off, or its trial
given up. A trial is given up earlier if opening has lost ``OPENING_LOSS``."""
OPENING_LOSS = 24.0
"""Loss in rounds of plain decoding. More sequences have more sessions to open."""
RANGE_ROUNDS = 16
"""Rounds in another range after which its choice applies. The prompts of a batch are stored one a
round, so the sequences are often in a range for a few rounds only."""
MAX_TIMES = 2.0
"""A round of speculation that is longer, apart from its wait for tables, counts as so many of its
mean time, and as half of ``OPENING_LOSS`` where a trial is given up."""
_WINDOW, _PLAIN_WINDOW = 64, 16
"""Rounds in the means of speculation, and of plain decoding."""


class Reason(StrEnum):
    """Why the controller has made its choice."""

    MEASURING = "measuring"
    """Too few rounds have been measured. The controller begins with speculation."""
    FASTER = "faster"
    """Speculation is faster than plain decoding."""
    SLOWER = "slower"
    """Speculation is slower than plain decoding."""


class Choice(NamedTuple):
    """What the next round does."""

    is_on: bool
    """Whether sequences in mode AUTO have sessions."""
    max_proposed: int
    """Largest number of tokens of their proposals, 0..K."""


class ControllerReport(NamedTuple):
    """The choice for a range of running sequences without its trials, for status and metrics."""

    is_on: bool
    reason: Reason
    speed_up: float
    """Measured tokens/s of speculation over tokens/s of plain decoding; 0 while unknown."""
    max_proposed: int


class Stage(Enum):
    """The choice in use, or a trial of the other one."""

    ON = auto()
    """Speculation."""
    OFF = auto()
    """Plain decoding."""
    TRY_PLAIN = auto()
    """A trial of plain decoding while speculation is on."""
    TRY_SPECULATION = auto()
    """A trial of speculation while it is off."""


@dataclass(slots=True)
class Totals:
    """Sums of tokens and time over some rounds. Time has the unit of ``BatchRange.plain``."""

    tokens: float = 0.0
    """Tokens of a sequence."""
    time: float = 0.0
    rounds: int = 0

    def add(self, tokens: float, time: float) -> None:
        """Add a round."""
        self.tokens += tokens
        self.time += time
        self.rounds += 1

    def gain(self, plain: float) -> float:
        """Return the gain over plain decoding in its rounds, each of which takes ``plain``."""
        return self.tokens - self.time / plain

    def speed_up(self, plain: float) -> float:
        """Return the tokens over the tokens of plain decoding in the same time."""
        return self.tokens * plain / self.time


@dataclass(slots=True)
class BatchRange:
    """Estimates and choice of one range of running sequences."""

    most_loss: float
    """Loss, in rounds of plain decoding, at which a trial begins."""
    most_sequences: int
    """The largest number of sequences of the range."""
    stage: Stage = Stage.ON
    is_judged: bool = False
    speed_up: float = 0.0
    """Result of the newest trial; 0 before the first one."""
    pauses: dict[Stage, int] = field(
        default_factory=lambda: {Stage.ON: FIRST_PAUSE, Stage.OFF: FIRST_PAUSE}
    )
    """Rounds of a stage before the next trial."""
    plain: Recent = field(default_factory=lambda: Recent(_PLAIN_WINDOW))
    """Time of a round of plain decoding, over the calibrated time of its verify. Until one is
    measured, it is 1 and ``host``."""
    host: Mean = field(default_factory=lambda: Mean(_WINDOW, 0.0))
    """The part of rounds of speculation beside verify and wait, over the same time."""
    in_stage: Totals = field(default_factory=Totals)
    """All rounds of the stage."""
    balance: Totals = field(default_factory=Totals)
    """Rounds of speculation that count for the next decision."""
    unanswered_rounds: int = 0
    """Newest rounds with sessions of which most were opening, without trials of plain decoding."""
    open_rounds: int = 0
    """Rounds of a trial of speculation since most sessions are open."""
    plain_before: float = 1.0
    """``plain`` before a trial of plain decoding, which measures it again."""
    tokens: Mean = field(default_factory=lambda: Mean(_WINDOW))
    """Tokens of a sequence in a round of speculation."""
    time: Mean = field(default_factory=lambda: Mean(_WINDOW))
    """Time of a round of speculation."""

    def begin(self, stage: Stage) -> None:
        """Begin a stage."""
        self.stage = stage
        self.in_stage = Totals()
        self.open_rounds = 0
        if stage is Stage.TRY_PLAIN:
            self.plain_before = self.plain.value
            self.plain.clear()
        elif stage is Stage.TRY_SPECULATION:
            self.balance = Totals()
            self.tokens, self.time = Mean(_WINDOW), Mean(_WINDOW)

    @property
    def is_on(self) -> bool:
        """Whether speculation is the choice, without trials."""
        return self.stage in (Stage.ON, Stage.TRY_PLAIN)

    @property
    def speculates(self) -> bool:
        """Whether sequences have sessions in this stage."""
        return self.stage in (Stage.ON, Stage.TRY_SPECULATION)


class Controller:
    """Chooses between speculation and plain decoding. One thread."""

    def __init__(
        self, columns: tuple[int, ...], lookahead: int, calibration: Calibration | None = None
    ) -> None:
        """Construct a controller that has measured nothing.

        Args:
            columns: row counts of a sequence in a verify that give identical bits, ascending.
            lookahead: K, tokens of a full proposal.
            calibration: start values of the times of a verify.
        """
        self._columns = columns
        self.calibration = calibration or Calibration()
        self._length = ProposalLength(columns, lookahead, self.calibration)
        self._ranges: dict[int, BatchRange] = {}
        self._key = 0
        self._range = self._reported = self._range_of(0)
        self._rounds_elsewhere = 0
        self._prompts = PromptTimes()

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next round, of so many sequences."""
        self._follow_range(size_class(num_sequences))
        batch = self._range
        if not batch.speculates:
            return Choice(is_on=False, max_proposed=0)
        return Choice(is_on=True, max_proposed=self._length.largest(num_sequences))

    def report(self) -> ControllerReport:
        """Return the choice for the newest range that was judged, without trials."""
        batch = self._reported
        reason = Reason.MEASURING
        if batch.is_judged:
            reason = Reason.FASTER if batch.is_on else Reason.SLOWER
        largest = self._length.largest(batch.most_sequences)
        return ControllerReport(batch.is_on, reason, batch.speed_up, largest)

    def add_round(self, record: RoundRecord) -> None:
        """Add a round that ran with the choice of the last ``choose``."""
        batch = self._range
        unit = self._unit(record)
        seconds, lost = record.decode_seconds, self._prompts.lost_seconds(record)
        if not record.is_plain:
            # A pause of the machine is not a loss of speculation. A wait for tables is one.
            most = record.wait_seconds + OPENING_LOSS / 2.0 * batch.plain.value * unit
            seconds = min(seconds, most)
            seconds = max(min(record.verify_seconds, seconds), seconds + lost)
        elif batch.in_stage.rounds >= SETTLE_ROUNDS or batch.speculates:
            self._range_of(size_class(record.num_sequences)).plain.add(seconds / unit)
            self._prompts.add_round(record)
        if not record.num_auto or (batch.stage is Stage.ON and not record.num_sessions):
            return
        tokens, time = record.num_tokens / record.num_sequences, seconds / unit
        batch.in_stage.add(tokens, time)
        if batch.speculates:
            if not record.prompt_tokens:
                host = record.decode_seconds - record.verify_seconds - record.wait_seconds
                batch.host.add(max(0.0, host) / unit)
                batch.plain.guess(1.0 + batch.host.value)
            # Sequences without a session, because the drafts are full, wait for no opening.
            num_expected = min(record.num_auto, record.num_sessions)
            is_answered = 0 < num_expected <= 2 * record.num_answered
            batch.unanswered_rounds = 0 if is_answered else batch.unanswered_rounds + 1
        self._add_to_stage(batch, record, time)

    def _unit(self, record: RoundRecord) -> float:
        """Return the calibrated seconds of a verify of one token of each sequence."""
        return self.calibration.verify_seconds(self._columns[0], record.num_sequences)

    def _add_to_stage(self, batch: BatchRange, record: RoundRecord, time: float) -> None:
        match batch.stage:
            case Stage.ON:
                self._add_on(batch, record, time)
            case Stage.OFF:
                if batch.in_stage.rounds >= batch.pauses[Stage.OFF]:
                    batch.begin(Stage.TRY_SPECULATION)
            case Stage.TRY_PLAIN:
                self._add_plain_trial(batch)
            case Stage.TRY_SPECULATION:
                self._add_speculation_trial(batch, record, time)

    def _add_on(self, batch: BatchRange, record: RoundRecord, time: float) -> None:
        """Add a round while speculation is on."""
        if batch.in_stage.rounds <= SETTLE_ROUNDS:
            return
        self._measure(batch, record, time)
        gain = batch.balance.gain(batch.plain.value)
        if gain > 0.0:
            batch.balance = Totals()
        if batch.unanswered_rounds >= OPENING_ROUNDS:
            self._judge(batch, is_on=False)
            # No round has gained a token. What opening costs is below the noise.
            batch.speed_up = min(batch.speed_up, 1.0 - 1.0 / OPENING_ROUNDS)
        elif -gain > batch.most_loss or batch.in_stage.rounds >= batch.pauses[Stage.ON]:
            batch.begin(Stage.TRY_PLAIN)

    def _add_plain_trial(self, batch: BatchRange) -> None:
        """Add a round of a trial of plain decoding."""
        is_measured = batch.plain.count >= PLAIN_ROUNDS
        # Requests that force speculation may run beside: plain decoding cannot be measured then.
        if is_measured or batch.in_stage.rounds >= 4 * PLAIN_ROUNDS:
            loss = -batch.balance.gain(batch.plain.value)
            self._judge(batch, is_on=loss <= batch.most_loss / 2.0)
        if is_measured and batch.plain.value > MAX_CHANGE * batch.plain_before:
            # Perhaps other work has slowed these rounds only.
            batch.pauses[Stage.ON] = FIRST_PAUSE

    def _add_speculation_trial(self, batch: BatchRange, record: RoundRecord, time: float) -> None:
        """Add a round of a trial of speculation."""
        batch.open_rounds += batch.open_rounds > 0 or not batch.unanswered_rounds
        if batch.open_rounds <= SETTLE_ROUNDS or not record.num_sessions:
            is_unserved = not record.num_sessions and batch.in_stage.rounds >= RANGE_ROUNDS
            has_lost = -batch.in_stage.gain(batch.plain.value) > OPENING_LOSS
            is_closed = not batch.open_rounds and batch.in_stage.rounds >= OPENING_ROUNDS
            if is_unserved or has_lost or is_closed:
                self._decide(batch, is_on=False)
            return
        self._measure(batch, record, time)
        gain = batch.balance.gain(batch.plain.value)
        if gain < -batch.most_loss / 2.0:
            self._judge(batch, is_on=False)
        elif batch.balance.rounds >= MIN_ROUNDS and gain > batch.most_loss / 2.0:
            self._judge(batch, is_on=True)
        elif batch.balance.rounds >= MAX_ROUNDS:
            self._judge(batch, is_on=self._speed_up(batch) >= MIN_GAIN)

    def _measure(self, batch: BatchRange, record: RoundRecord, time: float) -> None:
        if batch.time.count > PLAIN_ROUNDS:
            wait = record.wait_seconds / self._unit(record)
            lost = max(0.0, self._prompts.lost_seconds(record)) / self._unit(record)
            time = wait + min(time - wait, MAX_TIMES * batch.time.value + lost)
        tokens = record.num_tokens / record.num_sequences
        batch.balance.add(tokens, time)
        batch.tokens.add(tokens)
        batch.time.add(time)
        own = self._ranges.get(size_class(record.num_sequences))
        plain = own.plain.value if own is not None and own.plain.count else None
        self._length.add_round(record, plain)

    def _speed_up(self, batch: BatchRange) -> float:
        return batch.tokens.value * batch.plain.value / batch.time.value

    def _judge(self, batch: BatchRange, *, is_on: bool) -> None:
        """Decide by what was measured, and report the speed-up."""
        batch.speed_up = self._speed_up(batch)
        if not is_on and batch.balance.rounds:
            # The mean still has rounds from before the loss.
            batch.speed_up = min(batch.speed_up, batch.balance.speed_up(batch.plain.value))
        batch.is_judged = True
        self._reported = batch
        self._decide(batch, is_on=is_on)

    def _decide(self, batch: BatchRange, *, is_on: bool) -> None:
        """Begin the stage of a choice, and set the rounds before the next trial."""
        stays_on = batch.is_on and is_on
        if stays_on:
            loss = batch.in_stage.rounds * (1.0 - 1.0 / max(1.0, batch.speed_up))
        elif batch.is_on:
            # A few rounds that have lost much more are no noise: no trial follows soon.
            loss = -batch.balance.gain(batch.plain.value) - CLEAR * batch.most_loss
        else:
            loss = -batch.in_stage.gain(batch.plain.value)
        is_doubted = batch.pauses[Stage.OFF] > FIRST_PAUSE
        growth = PAUSE_GROWTH if stays_on or not batch.is_on or is_doubted else 1
        longer, reset = (Stage.ON, Stage.OFF) if stays_on else (Stage.OFF, Stage.ON)
        grown = min(growth * batch.pauses[longer], MAX_PAUSE)
        batch.pauses[longer] = max(grown, min(round(PAUSE_PER_LOSS * loss), LONGEST_PAUSE))
        batch.pauses[reset] = FIRST_PAUSE
        batch.begin(Stage.ON if is_on else Stage.OFF)

    def _follow_range(self, key: int) -> None:
        """Use the choice of another range after some rounds. Its trial continues where it was."""
        self._rounds_elsewhere = 0 if key == self._key else self._rounds_elsewhere + 1
        if self._rounds_elsewhere and (
            self._rounds_elsewhere >= RANGE_ROUNDS or not self._range.in_stage.rounds
        ):
            self._rounds_elsewhere = 0
            self._key, self._range = key, self._range_of(key)
            if self._range.is_judged:
                self._reported = self._range

    def _range_of(self, key: int) -> BatchRange:
        """Return a range; a new one has the choice of the nearest one that was judged.

        Sequences can leave a range before it is judged, for example while the prompts of a batch
        are stored.
        """
        if key not in self._ranges:
            # The tokens of more sequences vary less.
            batch = BatchRange(8.0 + 24.0 / 2**key, 2**key)
            judged = [other for other, earlier in self._ranges.items() if earlier.is_judged]
            if judged:
                nearest = min(judged, key=lambda other: abs(other - key))
                batch.stage = Stage.ON if self._ranges[nearest].is_on else Stage.OFF
            self._ranges[key] = batch
        return self._ranges[key]
