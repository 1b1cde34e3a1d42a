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
- **Loads.** Each power of two of running sequences has its own estimates and its own choice.
- **Prompts.** A draft that shares a CPU with the target makes the chunk of a prompt slower that is
  stored before a round. The time beyond that of a chunk without drafts counts as time of the round.
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
from enum import StrEnum
from typing import NamedTuple

from ssd.speculation.estimates import Calibration, Mean, PromptTimes, Recent, size_class
from ssd.speculation.proposal_length import ProposalLength
from ssd.speculation.round_record import RoundRecord

FIRST_PAUSE = 64
"""Rounds before the first trial, and before the next one after a change."""
MAX_PAUSE = 4096
"""Rounds between two trials, unless ``PAUSE_PER_LOSS`` requires more."""
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
given up. A trial is given up earlier if opening has lost ``most_loss``."""
LOAD_ROUNDS = 16
"""Rounds at another load after which its choice applies. The prompts of a batch are stored one a
round, so a load often lasts for a few rounds only."""
MAX_TIMES = 4.0
"""A longer round of speculation counts as so many of its mean time."""
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
    """The choice for a load without its trials, for status and metrics."""

    is_on: bool
    reason: Reason
    speed_up: float
    """Measured tokens/s of speculation over those of plain decoding; 0 while unknown."""
    max_proposed: int


@dataclass(slots=True)
class Balance:
    """Tokens and time of some rounds. Time has the unit of ``Load.plain``."""

    tokens: float = 0.0
    """Of a sequence."""
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


@dataclass(slots=True)
class Load:
    """Estimates and choice of one range of running sequences."""

    most_loss: float
    """Rounds of plain decoding that speculation may lose before it is doubted."""
    most_sequences: int
    """The largest number of sequences of the range."""
    is_on: bool = True
    is_trial: bool = False
    is_judged: bool = False
    speed_up: float = 0.0
    """Of the newest trial; 0 before the first one."""
    pauses: dict[bool, int] = field(default_factory=lambda: {True: FIRST_PAUSE, False: FIRST_PAUSE})
    """Rounds before the next trial while speculation is on, and while it is off."""
    plain: Recent = field(default_factory=lambda: Recent(_PLAIN_WINDOW))
    """Time of a round of plain decoding, over the calibrated time of its verify. Until one is
    measured, it is 1 and ``host``."""
    host: Mean = field(default_factory=lambda: Mean(_WINDOW, 0.0))
    """The part of rounds of speculation beside verify and wait, over the same time."""
    stage: Balance = field(default_factory=Balance)
    """All rounds since the choice in use has changed."""
    balance: Balance = field(default_factory=Balance)
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
    """Time of such a round."""

    def begin(self, *, is_trial: bool) -> None:
        """Begin a stage: a trial of the other choice, or the choice itself."""
        self.is_trial = is_trial
        self.stage = Balance()
        self.open_rounds = 0
        if is_trial and self.is_on:
            self.plain_before = self.plain.value
            self.plain.clear()

    @property
    def speculates(self) -> bool:
        """Whether the choice in use is speculation."""
        return self.is_on is not self.is_trial


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
        self._calibration = calibration or Calibration()
        self._length = ProposalLength(columns, lookahead, self._calibration)
        self._loads: dict[int, Load] = {}
        self._key = 0
        self._load = self._reported = self._load_of(0)
        self._rounds_elsewhere = 0
        self._prompts = PromptTimes()

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next round, of so many sequences."""
        self._follow_load(size_class(num_sequences))
        load = self._load
        if not load.speculates:
            return Choice(is_on=False, max_proposed=0)
        return Choice(is_on=True, max_proposed=self._length.largest(num_sequences))

    def report(self) -> ControllerReport:
        """Return the choice for the newest load that was judged, without trials."""
        load = self._reported
        reason = Reason.MEASURING
        if load.is_judged:
            reason = Reason.FASTER if load.is_on else Reason.SLOWER
        largest = self._length.largest(load.most_sequences)
        return ControllerReport(load.is_on, reason, load.speed_up, largest)

    def add_round(self, record: RoundRecord) -> None:
        """Add a round that ran with the choice of the last ``choose``."""
        load = self._load
        unit = self._calibration.verify_seconds(self._columns[0], record.num_sequences)
        seconds = record.decode_seconds
        if not record.is_plain:
            seconds = max(record.verify_seconds, seconds + self._prompts.lost_seconds(record))
        elif load.stage.rounds >= SETTLE_ROUNDS or load.speculates:
            self._load_of(size_class(record.num_sequences)).plain.add(seconds / unit)
            self._prompts.add_round(record)
        if record.num_auto == 0:
            return
        if load.is_on and not load.is_trial and not record.num_sessions:
            return
        tokens, time = record.num_tokens / record.num_sequences, seconds / unit
        load.stage.add(tokens, time)
        if load.speculates:
            if not record.prompt_tokens:
                host = record.decode_seconds - record.verify_seconds - record.wait_seconds
                load.host.add(max(0.0, host) / unit)
                load.plain.guess(1.0 + load.host.value)
            is_answered = 2 * record.num_answered >= record.num_auto
            load.unanswered_rounds = 0 if is_answered else load.unanswered_rounds + 1
        if not load.speculates:
            self._add_plain(load)
        elif load.is_trial:
            self._add_trial(load, record, time)
        elif load.stage.rounds > SETTLE_ROUNDS:
            self._measure(load, record, time)
            self._add_speculation(load)

    def _add_speculation(self, load: Load) -> None:
        """Add a round while speculation is on."""
        gain = load.balance.gain(load.plain.value)
        if gain > 0.0:
            load.balance = Balance()
        if load.unanswered_rounds >= OPENING_ROUNDS:
            self._judge(load, is_on=False)
            # No round has gained a token. What opening costs is below the noise.
            load.speed_up = min(load.speed_up, 1.0 - 1.0 / OPENING_ROUNDS)
        elif -gain > load.most_loss or load.stage.rounds >= load.pauses[True]:
            load.begin(is_trial=True)

    def _add_plain(self, load: Load) -> None:
        """Add a round without sessions: of a trial, or while speculation is off."""
        if not load.is_trial:
            if load.stage.rounds >= load.pauses[False]:
                load.balance = Balance()
                load.tokens, load.time = Mean(_WINDOW), Mean(_WINDOW)
                load.begin(is_trial=True)
            return
        if load.plain.count >= PLAIN_ROUNDS:
            loss = -load.balance.gain(load.plain.value)
            self._judge(load, is_on=loss <= load.most_loss / 2.0)
            if load.plain.value > MAX_CHANGE * load.plain_before:
                # Perhaps other work has slowed these rounds only.
                load.pauses[True] = FIRST_PAUSE
        elif load.stage.rounds >= 4 * PLAIN_ROUNDS:
            # Requests that force speculation run beside: plain decoding cannot be measured.
            self._end_trial(load, is_on=True)

    def _add_trial(self, load: Load, record: RoundRecord, time: float) -> None:
        """Add a round of a trial of speculation."""
        load.open_rounds += load.open_rounds > 0 or not load.unanswered_rounds
        if load.open_rounds <= SETTLE_ROUNDS or not record.num_sessions:
            is_unserved = not record.num_sessions and load.stage.rounds >= LOAD_ROUNDS
            has_lost = -load.stage.gain(load.plain.value) > load.most_loss
            is_closed = not load.open_rounds and load.stage.rounds >= OPENING_ROUNDS
            if is_unserved or has_lost or is_closed:
                self._end_trial(load, is_on=False)
            return
        self._measure(load, record, time)
        gain = load.balance.gain(load.plain.value)
        if gain < -load.most_loss / 2.0:
            self._judge(load, is_on=False)
        elif load.balance.rounds >= MIN_ROUNDS and gain > load.most_loss / 2.0:
            self._judge(load, is_on=True)
        elif load.balance.rounds >= MAX_ROUNDS:
            self._judge(load, is_on=self._speed_up(load) >= MIN_GAIN)

    def _measure(self, load: Load, record: RoundRecord, time: float) -> None:
        if load.time.count > PLAIN_ROUNDS and not record.prompt_tokens:
            # A pause of the machine is not a loss of speculation.
            time = min(time, MAX_TIMES * load.time.value)
        tokens = record.num_tokens / record.num_sequences
        load.balance.add(tokens, time)
        load.tokens.add(tokens)
        load.time.add(time)
        own = self._loads.get(size_class(record.num_sequences))
        plain = own.plain.value if own is not None and own.plain.count else None
        self._length.add_round(record, plain)

    def _speed_up(self, load: Load) -> float:
        return load.tokens.value * load.plain.value / load.time.value

    def _judge(self, load: Load, *, is_on: bool) -> None:
        """End a trial with its result."""
        load.speed_up = self._speed_up(load)
        load.is_judged = True
        self._reported = load
        self._end_trial(load, is_on=is_on)

    def _end_trial(self, load: Load, *, is_on: bool) -> None:
        """Keep the choice that was tried, or return to the other one."""
        kept = load.is_on and is_on
        if kept:
            loss = load.stage.rounds * (1.0 - 1.0 / max(1.0, load.speed_up))
        elif load.is_on:
            # A few rounds that have lost much more are no noise: no trial follows soon.
            loss = -load.balance.gain(load.plain.value) - CLEAR * load.most_loss
        else:
            loss = -load.stage.gain(load.plain.value)
        is_doubted = load.pauses[False] > FIRST_PAUSE
        growth = PAUSE_GROWTH if kept or not load.is_on or is_doubted else 1
        grown = min(growth * load.pauses[kept], MAX_PAUSE)
        load.pauses[kept] = max(grown, round(PAUSE_PER_LOSS * loss))
        load.pauses[not kept] = FIRST_PAUSE
        load.is_on = is_on
        load.begin(is_trial=False)

    def _follow_load(self, key: int) -> None:
        """Use the choice of another load after some rounds. Its trial continues where it was."""
        self._rounds_elsewhere = 0 if key == self._key else self._rounds_elsewhere + 1
        if self._rounds_elsewhere and (
            self._rounds_elsewhere >= LOAD_ROUNDS or not self._load.stage.rounds
        ):
            self._rounds_elsewhere = 0
            self._key, self._load = key, self._load_of(key)
            if self._load.is_judged:
                self._reported = self._load

    def _load_of(self, key: int) -> Load:
        """Return a load; a new one has the choice of the nearest one that was judged.

        A load can be too short to be judged, for example while the prompts of a batch are stored.
        """
        if key not in self._loads:
            # The tokens of more sequences vary less.
            load = Load(20.0 + 12.0 / 2**key, 2**key)
            judged = [other for other, each in self._loads.items() if each.is_judged]
            if judged:
                load.is_on = self._loads[min(judged, key=lambda other: abs(other - key))].is_on
            self._loads[key] = load
        return self._loads[key]
