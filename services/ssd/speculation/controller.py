"""Chooses whether a target speculates and how long its proposals are. No clock, no I/O.

The target gives the measurements of each round to ``Controller.note``, and asks ``choose`` before
each round. Both choices, speculation and plain decoding, are compared by what they measured: tokens
per second of whole rounds. Waits, host work and drafts that share a core with the target therefore
count as much as forward passes.

- **Loads.** Each power of two of running sequences has its own estimates and its own choice.
- **Trials.** The choice that is not in use is measured in short trials. Their loss, and that of
  wrong changes, is at most ``LOSS_SHARE`` of the time. A trial of speculation ends as soon as its
  result is clear.
- **Noise.** Other work on the machine slows both choices for moments. A trial is therefore compared
  with the rounds just before it, and the median of the newest ``NUM_TRIALS`` trials decides. Until
  they agree, trials follow each other sooner, for ``UNSURE_LOSS_SHARE`` of the time, and the loss
  of speculation that they report is not counted: it may be noise. Trials and losses of more than
  ``LONG_SECONDS`` are not doubted.
- **Hysteresis.** Speculation is turned off when it is slower than plain decoding, and on when it is
  faster by ``MIN_GAIN``. Between these bounds the choice stays.
- **Prompts.** A draft that shares a CPU with the target works during the chunk of a prompt that is
  stored before a round, and makes the chunk slower. That time beyond the one of a chunk without
  drafts counts as time of the round. Until a chunk without drafts was measured, speculation would
  seem to cost nothing, and rounds with a chunk measure nothing.
- **Proposals.** Their largest length is the one with most tokens per second, from the acceptance at
  each position and the time of a verify by columns. A change needs a gain of ``MIN_LENGTH_GAIN``.

*Decision*: measured rounds decide, a model of the times only chooses the length. *Because*: on one
core, a draft that runs beside the target lengthens its verify, and a model that scales the times of
a verify reports a speed-up where there is a loss. *Not chosen*: a model of T_verify, T_table and
the hit rate for both choices, which needs no trials. *Revisit when* trials cost more than they
gain, for example where a session takes minutes to open.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from ssd.speculation.load_estimates import (
    FIRST_TRIAL_SECONDS,
    LOSS_ROUNDS,
    PLAIN_WINDOW,
    WINDOW,
    Load,
    Stage,
    is_far,
    load_key,
)
from ssd.speculation.round_samples import Calibration, Mean, PromptTimes, RoundSample

LOSS_SHARE = 0.005
"""Largest share of the time that trials and wrong changes may lose."""
UNSURE_LOSS_SHARE = 0.01
"""The same until the newest trials agree."""
MAX_TRIAL_SECONDS = 30.0
"""Longest time of rounds between two trials, unless ``LOSS_SHARE`` requires more."""
MIN_GAIN = 1.03
"""Speed-up from which speculation is turned on again."""
MIN_LENGTH_GAIN = 1.03
SETTLE_ROUNDS = 2
"""Rounds after a change that are not measured: a draft may still compute."""
PLAIN_ROUNDS = 8
"""Measured rounds of a trial of plain decoding."""
MIN_ROUNDS = 6
"""Rounds of speculation before which its speed-up is not judged."""
MAX_TRIAL_SEQUENCE_ROUNDS = 96
"""Rounds of a trial of speculation, times its sequences, after which it is judged in any case."""
OPENING_ROUNDS = 128
"""Rounds in which drafts have not answered, after which a trial of speculation is given up. It is
given up earlier if opening sessions has slowed the target by ``LOSS_ROUNDS``."""
HALF_OPEN_ROUNDS = 16
"""Rounds from the first table on after which speculation is measured, even if most sessions are
still opening."""
LOAD_ROUNDS = 16
"""Rounds at another load after which its choice applies. The prompts of a batch are stored one a
round, so a load often lasts for a few rounds only."""
TRIAL_LOAD_ROUNDS = 64
"""The same during a trial of plain decoding: it continues when the load returns. Otherwise no trial
would end where batches end after a few rounds."""
LENGTH_ROUNDS = 32
"""Rounds between two choices of the length of proposals."""
LONG_SECONDS = 2.0
"""Longer than most disturbances by other work: a trial from this time on decides alone."""
LEAST_SPEED_UP = 0.01
"""Trials with a smaller result, or without a token, count as this one."""
_CLEAR = 2.0
"""Standard errors by which a clear result differs from 1."""


class Reason(StrEnum):
    """Why the controller has made its choice."""

    MEASURING = "measuring"
    """Too few rounds have been measured. The controller begins with speculation."""
    FASTER = "faster"
    """Speculation is faster than plain decoding."""
    SLOWER = "slower"
    """Speculation is slower than plain decoding."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next round does."""

    is_on: bool
    """Whether sequences in mode AUTO have sessions."""
    max_proposed: int
    """Largest number of tokens of their proposals, 0..K."""


@dataclass(frozen=True, slots=True)
class Report:
    """The choice for a load without its trials, for status and metrics."""

    is_on: bool
    reason: Reason
    speed_up: float
    """Measured tokens/s of speculation over those of plain decoding; 0 while unknown."""
    max_proposed: int


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
        self._lookahead = lookahead
        self._calibration = calibration or Calibration()
        self._loads: dict[int, Load] = {}
        self._load_key = 0
        self._load = self._load_of(0)
        self._reported = self._load
        self._rounds_elsewhere = 0
        self._stage = Stage()
        self._prompts = PromptTimes()
        self._since_trial = 0.0
        """Seconds of rounds since the last trial."""
        self._debt = 0.0
        """Lost seconds that ``LOSS_SHARE`` of the time has not yet paid for."""

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next round, of so many sequences."""
        self._follow_load(num_sequences)
        is_on = self._load.is_on is not self._stage.is_trial
        if not is_on:
            return Choice(is_on=False, max_proposed=0)
        # Until most sessions are open, a long verify would serve few proposals.
        waits = self._stage.is_trial and num_sequences > 1 and not self._stage.is_measured
        return Choice(is_on=True, max_proposed=0 if waits else self._load.max_proposed)

    def report(self) -> Report:
        """Return the choice for the newest load that was judged, without trials."""
        load = self._reported
        reason = Reason.MEASURING
        if load.is_judged:
            reason = Reason.FASTER if load.is_on else Reason.SLOWER
        return Report(load.is_on, reason, load.judged_speed_up, load.max_proposed)

    def note(self, sample: RoundSample) -> None:
        """Note a round that ran with the choice of the last ``choose``."""
        if sample.prompt_tokens and sample.num_sessions:
            if not self._prompts.is_known:
                self._note_unknown(sample)
                return
            seconds = sample.seconds + self._prompts.lost_seconds(sample)
            sample = replace(sample, seconds=max(sample.verify_seconds, seconds))
        share = LOSS_SHARE if self._load.is_sure else UNSURE_LOSS_SHARE
        self._debt = max(0.0, self._debt - share * sample.seconds)
        self._since_trial += sample.seconds
        key = load_key(sample.num_sequences)
        load = self._load_of(key)
        if sample.is_plain and self._stage.rounds >= SETTLE_ROUNDS:
            load.plain.note(sample.seconds / self._plain_unit(sample))
            if sample.prompt_tokens:
                self._prompts.note(sample)
        if sample.num_auto == 0 or key != self._load_key:
            return
        stage = self._stage
        stage.rounds += 1
        stage.seconds += sample.seconds
        stage.plain_seconds += self._plain_time(sample) * load.plain.value
        if load.is_on is not stage.is_trial:
            self._note_speculation(load, sample)
        elif stage.is_trial:
            self._note_plain_trial(load, sample)
        elif self._may_try(load):
            self._choose_length(load, sample.num_sequences)
            load.speed_up.clear()
            self._begin(is_trial=True)

    def _note_unknown(self, sample: RoundSample) -> None:
        """Note a round with a chunk that measures nothing: a trial will measure plain chunks."""
        self._since_trial += sample.seconds + sample.prefill_seconds
        load, stage = self._load, self._stage
        if sample.num_auto == 0 or load_key(sample.num_sequences) != self._load_key:
            return
        stage.rounds += 1
        if load.is_on is stage.is_trial:
            return
        if not stage.is_measured:
            self._note_opening(load, sample)
        elif not stage.is_trial and self._may_try(load):
            self._begin(is_trial=True)

    def _note_speculation(self, load: Load, sample: RoundSample) -> None:
        stage = self._stage
        if not stage.is_measured:
            self._note_opening(load, sample)
            return
        if sample.num_sessions == 0:
            if stage.is_trial:
                self._debt += stage.loss_seconds
                self._end_trial(load, is_on=load.is_on)
            return
        stage.open_rounds += 1
        if stage.is_trial and stage.open_rounds <= SETTLE_ROUNDS:
            # Its proposals are not those of the tables yet.
            return
        self._measure(load, sample)
        if stage.is_trial:
            self._judge_trial(load, sample.num_sequences)
            return
        seems_slower = self._seems_slower(load)
        may_choose = seems_slower and not stage.is_length_chosen
        if may_choose or load.rounds % LENGTH_ROUNDS == 0:
            stage.is_length_chosen |= seems_slower
            if self._choose_length(load, sample.num_sequences):
                return
        if seems_slower or self._may_try(load):
            self._begin(is_trial=True)

    def _note_opening(self, load: Load, sample: RoundSample) -> None:
        """Wait until the drafts answer; the first round with tables has no proposals yet."""
        stage = self._stage
        stage.answered_rounds += stage.answered_rounds > 0 or sample.num_answered > 0
        is_open = 2 * sample.num_answered >= sample.num_auto
        stage.is_measured = is_open or stage.answered_rounds >= HALF_OPEN_ROUNDS
        if stage.is_trial:
            is_unserved = sample.num_sessions == 0 and stage.rounds >= LOAD_ROUNDS
            has_lost = (
                stage.loss_seconds > LOSS_ROUNDS * self._plain_unit(sample) * load.plain.value
            )
            is_slow = has_lost or stage.rounds >= OPENING_ROUNDS
            if is_unserved or (is_slow and not stage.is_measured):
                self._debt += stage.loss_seconds
                self._end_trial(load, is_on=load.is_on)
        elif load.is_judged:
            self._debt += max(0.0, sample.seconds * (1.0 - 1.0 / max(1.0, load.ratio)))

    def _measure(self, load: Load, sample: RoundSample) -> None:
        plain = self._plain_time(sample)
        load.rounds += 1
        load.plain_seconds = self._plain_unit(sample) * load.plain.value
        load.speed_up.note(plain, sample.seconds)
        lost = sample.seconds - plain * load.plain.value
        load.loss_seconds = max(0.0, load.loss_seconds + lost)
        columns = next(count for count in self._columns if count >= sample.columns)
        calibrated = self._calibration.verify_seconds(columns, sample.num_sequences)
        verify = load.verify.setdefault(columns, Mean(PLAIN_WINDOW))
        verify.note(sample.verify_seconds / calibrated)
        load.host.note(sample.seconds - sample.verify_seconds)
        for position, mean in enumerate(load.accepted_K[: load.max_proposed]):
            accepted = sample.num_accepted_K
            count = accepted[position] if position < len(accepted) else 0
            mean.note(count / sample.num_sequences)

    def _seems_slower(self, load: Load) -> bool:
        """Whether recent rounds of speculation suggest a trial of plain decoding."""
        if not load.plain.count and not self._calibration.seconds:
            return load.rounds >= PLAIN_ROUNDS
        if load.is_hopeless(load.loss_seconds):
            return True
        waits = load.rounds < LENGTH_ROUNDS and load.is_sure and not load.has_lost
        if waits or load.speed_up.count < MIN_ROUNDS:
            return False
        if load.has_lost:
            is_slower = load.recent_ratio < 1.0
            if not is_slower and load.loss_seconds > LONG_SECONDS:
                # The newest rounds have lost, and older ones have not. These no longer count.
                load.speed_up.clear()
            return is_slower
        return load.ratio + _CLEAR * load.error < 1.0

    def _may_try(self, load: Load) -> bool:
        is_due = self._since_trial >= load.trial_pause
        is_start = load.is_on and not load.is_judged
        return is_due and (self._debt <= 0.0 or is_start)

    def _note_plain_trial(self, load: Load, sample: RoundSample) -> None:
        stage = self._stage
        if stage.rounds > SETTLE_ROUNDS and sample.is_plain:
            stage.plain.append(sample.seconds / self._plain_unit(sample))
        if len(stage.plain) >= PLAIN_ROUNDS:
            load.plain.replace(stage.plain)
            if load.speed_up.count < 1.0:
                # Speculation is measured from now on: the plain time of chunks is known.
                self._end_trial(load, is_on=load.is_on)
                return
            speed_up = load.recent_ratio
            self._debt += max(0.0, stage.seconds * (1.0 - 1.0 / max(1.0, speed_up)))
            self._judge(load, speed_up, 1.0)
        elif stage.rounds >= 4 * PLAIN_ROUNDS:
            # Requests that force speculation run beside: plain decoding cannot be measured.
            self._end_trial(load, is_on=load.is_on)

    def _judge_trial(self, load: Load, num_sequences: int) -> None:
        """End a trial of speculation when its result is clear, or when it has taken long."""
        count, ratio, error = load.speed_up.count, load.ratio, load.error
        is_hopeless = load.is_hopeless(self._stage.loss_seconds)
        if load.rounds < MIN_ROUNDS and not is_hopeless:
            return
        is_clear = (
            is_hopeless or ratio + _CLEAR * error < MIN_GAIN or ratio - _CLEAR * error > MIN_GAIN
        )
        if is_clear or count * num_sequences >= MAX_TRIAL_SEQUENCE_ROUNDS:
            self._debt += self._stage.loss_seconds
            self._judge(load, ratio, MIN_GAIN)

    def _judge(self, load: Load, speed_up: float, least: float) -> None:
        """End a trial with its result: speculation needs a speed-up of ``least``."""
        if self._stage.seconds > LONG_SECONDS:
            load.trials.clear()
        load.trials.append(max(speed_up, LEAST_SPEED_UP))
        load.judged_speed_up = math.exp(median(map(math.log, load.trials)))
        load.is_judged = True
        is_on = load.judged_speed_up >= least
        if not is_on and (load.is_sure or is_far(speed_up)):
            self._debt += load.loss_seconds
        if not is_on or (speed_up >= least and not load.has_lost):
            load.loss_seconds = 0.0
        else:
            # Older rounds were faster, or something disturbed the trial: the next one has rounds of
            # its own.
            load.speed_up.clear()
        self._end_trial(load, is_on=is_on, is_sure=load.is_sure)

    def _end_trial(self, load: Load, *, is_on: bool, is_sure: bool = True) -> None:
        """Keep the choice that was tried, or return to the other one."""
        was_measured = self._stage.is_measured and is_on and not load.is_on
        if is_on is load.is_on and is_sure:
            load.trial_pause = min(2.0 * load.trial_pause, MAX_TRIAL_SECONDS)
        else:
            load.trial_pause = FIRST_TRIAL_SECONDS
        load.is_on = is_on
        if load.is_judged:
            self._reported = load
        if is_on and not was_measured:
            # The acceptance of positions beyond a shorter length is measured again.
            load.max_proposed = self._lookahead
        self._since_trial = 0.0
        self._begin(is_trial=False, is_measured=was_measured)

    def _begin(self, *, is_trial: bool, is_measured: bool = False) -> None:
        self._load.rounds = 0
        self._stage = Stage(is_trial=is_trial, is_measured=is_measured)

    def _choose_length(self, load: Load, num_sequences: int) -> bool:
        """Choose the length of proposals with most tokens per second; true if it has changed."""
        if load.accepted_K[0].count < PLAIN_ROUNDS:
            return False
        rates = self._rates(load, num_sequences)
        best = max(rates, key=lambda length: rates[length])
        if rates[best] <= MIN_LENGTH_GAIN * rates.get(load.max_proposed, 0.0):
            return False
        load.max_proposed = best
        load.speed_up.clear()
        return True

    def _rates(self, load: Load, num_sequences: int) -> Mapping[int, float]:
        """Return tokens per second of a sequence by the largest length of its proposals."""
        known = [mean.value for mean in load.verify.values()]
        usual = sum(known) / len(known)
        rates: dict[int, float] = {}
        for columns in self._columns:
            length = min(columns - 1, self._lookahead)
            if length == 0:
                continue
            verify = load.verify.get(columns)
            factor = verify.value if verify and verify.count >= PLAIN_ROUNDS else usual
            seconds = factor * self._calibration.verify_seconds(columns, num_sequences)
            tokens = 1.0 + sum(mean.value for mean in load.accepted_K[:length])
            rates[length] = tokens / (seconds + max(0.0, load.host.value))
        return rates

    def _follow_load(self, num_sequences: int) -> None:
        key = load_key(num_sequences)
        if key == self._load_key:
            self._rounds_elsewhere = 0
            return
        self._rounds_elsewhere += 1
        patience = TRIAL_LOAD_ROUNDS if self._stage.is_trial and self._load.is_on else LOAD_ROUNDS
        if self._rounds_elsewhere < patience and self._stage.rounds:
            return
        was_on = self._load.is_on is not self._stage.is_trial
        if self._stage.is_trial:
            self._since_trial = 0.0
            self._debt += self._stage.loss_seconds
        self._load_key, self._load = key, self._load_of(key)
        self._follow_judged(key)
        if self._load.is_judged or not self._reported.is_judged:
            self._reported = self._load
        self._rounds_elsewhere = 0
        # Sessions that are open stay open.
        self._begin(is_trial=False, is_measured=was_on and self._stage.is_measured)

    def _follow_judged(self, key: int) -> None:
        """Give a load that was not judged yet the choice of the nearest one that was.

        A load can be too short to be judged, for example while the prompts of a batch are stored.
        """
        judged = [other for other, load in self._loads.items() if load.is_judged]
        if judged and not self._load.is_judged:
            nearest = min(judged, key=lambda other: abs(other - key))
            self._load.is_on = self._loads[nearest].is_on

    def _load_of(self, key: int) -> Load:
        if key not in self._loads:
            load = Load(self._lookahead)
            load.accepted_K = [Mean(WINDOW, 0.0) for _ in range(self._lookahead)]
            self._loads[key] = load
        return self._loads[key]

    def _plain_unit(self, sample: RoundSample) -> float:
        """Return the calibrated seconds of a verify without proposals."""
        return self._calibration.verify_seconds(self._columns[0], sample.num_sequences)

    def _plain_time(self, sample: RoundSample) -> float:
        """Return the calibrated seconds of plain decoding for the tokens of a round."""
        return self._plain_unit(sample) * sample.num_tokens / sample.num_sequences
