"""The values of the adaptive fan-out, fitted online to the outcomes of rounds. Pure.

A round with m proposed tokens and the outcome (k, v) has accepted d_1..d_k and, if k < m, refused
d_{k+1}: these are k + 1 examples of alpha. The bonus token v is one example of beta.
Both are members of exponential families in the values, so each batch of rounds changes them by one
Newton step, with the curvature of all rounds, of which older ones count less:

    S <- forgotten S + H        values <- values + (S + P)^-1 gradient        S_0 = 0

P is the weight of the start values. Values, steps and the number of rounds that wait have bounds.
So whatever outcomes a target reports, a table has N possible outcomes, and the fit a fixed size.

*Decision*: the fitted values of a band are in use while they have had more hits than the start
values, in the same rounds, before each step. *Because*: the values with the highest likelihood are
not those with the most hits where the law of the outcomes is another one. Embedded pair, N = 24: at
T = 0, .961 with the start values and .949 with the fitted ones; with top-k 20 at T = 1, .82 and
.86. *Not chosen*: a fit to the hits themselves; at T = 0, only 4 of 100 rounds depend on them.
*Revisit when* a law with a heavier tail has no fewer hits than the start values anywhere.

Letters: Z bands of temperature, X features, R examples.
"""

import json
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd.speculation.fan_out import (
    LARGEST_LOGIT,
    START_VALUES,
    Adaptive,
    Candidates,
    Features,
    Float32s,
    Float64s,
    Int64s,
    Options,
    features_of,
    options_of,
)

BAND_ENDS = (0.0, 0.35, 0.75)
"""Highest temperature of each band but the last one."""
BANDS = ("0", "0 to 0.35", "0.35 to 0.75", "above 0.75")
NAMES = ("gap", "confidence", "bias", "score", "rank")
"""Names of the values, in their order."""
LOWEST = np.array((0.0, -1.0, -4.0, 0.1, 0.0))
HIGHEST = np.array((4.0, 4.0, 6.0, 6.0, 3.0))
BATCH_ROUNDS = 32
"""Rounds of a Newton step, at least."""
MOST_WAITING = 256
"""Rounds that wait for a step; with more, the oldest are dropped."""
_LARGEST_STEP = 0.25
_REMEMBERED_ROUNDS = 4096.0
"""After so many rounds, the curvature of a round counts 1/e."""
_STATE = ("values_ZX", "curvature_ZXX", "num_rounds_Z", "advantage_Z")
_START_WEIGHT = 20.0
"""P of each value: as much as that many rounds with features of variance 1."""
_MOST_ROUNDS = 2**53
_LARGEST_CURVATURE = 1e9
"""Of a text: more than any rounds have, and so little that P is not lost in a sum with it."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of some sessions with their outcomes, by arrays with a row for each round."""

    ids_BPM: Int64s
    scores_BPM: Float32s
    temperature_B: Float32s
    proposal_BK: Int64s
    """Columns from ``num_proposed_B`` on are padding."""
    num_proposed_B: Int64s
    accepted_B: Int64s
    """At most ``num_proposed_B``."""
    bonus_B: Int64s

    def __len__(self) -> int:
        return len(self.bonus_B)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


class FanOutFit:
    """The values of each band. Step thread only."""

    def __init__(self, num_branches: int) -> None:
        """Construct with the start values; ``num_branches`` is N of the tables."""
        num_bands, num_values = len(BANDS), len(START_VALUES)
        self.values_ZX = np.tile(START_VALUES, (num_bands, 1))
        """Fitted values, which are not always in use."""
        self.num_rounds_Z = np.zeros(num_bands, dtype=np.int64)
        """Rounds that have been fitted."""
        self.advantage_Z = np.zeros(num_bands)
        """Hits of the fitted values less hits of the start values; older hits count less."""
        self.curvature_ZXX = np.zeros((num_bands, num_values, num_values))
        self._num_branches = num_branches
        self._waiting: deque[Rounds] = deque()

    @property
    def num_waiting(self) -> int:
        """Rounds that wait for a step."""
        return sum(map(len, self._waiting))

    def used_values(self) -> Float64s:
        """Return the values in use, [Z, X]."""
        return np.where(self.advantage_Z[:, None] > 0.0, self.values_ZX, START_VALUES)

    def values_of(self, candidates: Candidates) -> Float64s:
        """Return the values of each session, [B, X]; ``candidates`` have temperatures."""
        assert candidates.temperature_B is not None
        values_BX: Float64s = self.used_values()[_bands(candidates.temperature_B)]
        return values_BX

    def add(self, rounds: Rounds) -> None:
        """Add rounds, which wait for ``learn``."""
        self._waiting.append(rounds)
        while self.num_waiting > MOST_WAITING:
            self._waiting.popleft()

    def learn(self) -> bool:
        """Change the values by the rounds that wait; returns False if they are too few."""
        if self.num_waiting < BATCH_ROUNDS:
            return False
        columns = zip(*(rounds.arrays for rounds in self._waiting), strict=True)
        arrays = [np.concatenate(parts) for parts in columns]
        self._waiting.clear()
        band_B = _bands(Rounds(*arrays).temperature_B)
        for band in np.unique(band_B).tolist():
            self._step(band, Rounds(*(array[band_B == band] for array in arrays)))
        return True

    def to_text(self) -> str:
        """Return the state as JSON."""
        state = {name: getattr(self, name).tolist() for name in _STATE}
        return json.dumps(state)

    @classmethod
    def from_text(cls, text: str, num_branches: int) -> "FanOutFit":
        """Return the fit with a state of ``to_text``; the values are put between their bounds.

        Raises:
            ValueError: the text is not such a state.
        """
        fit, state = cls(num_branches), json.loads(text)
        for name in _STATE:
            present = getattr(fit, name)
            read = np.array(state.get(name) if isinstance(state, dict) else None)
            if read.shape != present.shape or read.dtype.kind not in "if":
                raise ValueError(f"{name} is not an array of numbers of shape {present.shape}")
            if not np.isfinite(read).all():
                raise ValueError(f"{name} has a value that is not finite")
            if present.dtype.kind == "i" and not 0 <= read.min() <= read.max() <= _MOST_ROUNDS:
                raise ValueError(f"{name} has a value that is no number of rounds")
            setattr(fit, name, read.astype(present.dtype))
        half_ZXX = fit.curvature_ZXX / 2.0
        least = np.linalg.eigvalsh(half_ZXX + half_ZXX.swapaxes(1, 2)).min()
        # Then S + P is never singular, which would end the step thread.
        if np.abs(fit.curvature_ZXX).max() > _LARGEST_CURVATURE or least < -1e-3:
            raise ValueError("curvature_ZXX is not the curvature of a minimum")
        fit.values_ZX = np.clip(fit.values_ZX, LOWEST, HIGHEST)
        return fit

    def _step(self, band: int, rounds: Rounds) -> None:
        """Change the values of a band by a Newton step of its rounds."""
        candidates = Candidates(rounds.ids_BPM, rounds.scores_BPM)
        options = options_of(candidates, rounds.proposal_BK, rounds.num_proposed_B)
        features = features_of(candidates, options)
        values_X = self.values_ZX[band]
        gradient_X = np.zeros_like(values_X)
        curvature_XX = np.zeros_like(self.curvature_ZXX[band])
        of_acceptance, of_bonus = slice(0, 3), slice(3, 5)
        gradient_X[of_acceptance], curvature_XX[of_acceptance, of_acceptance] = _of_acceptance(
            features, options, rounds.accepted_B, values_X[of_acceptance]
        )
        gradient_X[of_bonus], curvature_XX[of_bonus, of_bonus] = _of_bonus(
            features, options, rounds, values_X[of_bonus]
        )
        forgetting = np.exp(-len(rounds) / _REMEMBERED_ROUNDS)
        curvature_XX += forgetting * self.curvature_ZXX[band]
        weight_XX = _START_WEIGHT * np.eye(len(values_X))
        step_X = np.linalg.solve(curvature_XX + weight_XX, gradient_X)
        if not np.isfinite(step_X).all():
            # The model of a session has computed NaN.
            return
        advantage = self._hits(rounds, values_X) - self._hits(rounds, np.array(START_VALUES))
        self.advantage_Z[band] = forgetting * self.advantage_Z[band] + advantage
        step_X = np.clip(step_X, -_LARGEST_STEP, _LARGEST_STEP)
        self.values_ZX[band] = np.clip(values_X + step_X, LOWEST, HIGHEST)
        self.curvature_ZXX[band] = curvature_XX
        self.num_rounds_Z[band] += len(rounds)

    def _hits(self, rounds: Rounds, values_X: Float64s) -> int:
        """Return the number of outcomes that tables with these values contain."""
        policy = Adaptive(values_of=lambda _candidates: values_X[None])
        selected = policy.choose(
            Candidates(rounds.ids_BPM, rounds.scores_BPM),
            rounds.proposal_BK,
            rounds.num_proposed_B,
            self._num_branches,
        )
        is_it_BN = selected.accepted_BN == rounds.accepted_B[:, None]
        is_it_BN &= selected.bonus_BN == rounds.bonus_B[:, None]
        return int(is_it_BN.any(axis=1).sum())


def _of_acceptance(
    features: Features, options: Options, accepted_B: Int64s, values_X: Float64s
) -> tuple[Float64s, Float64s]:
    """Return the gradient of the log-likelihood of alpha and its negative curvature."""
    position_P = np.arange(options.has_proposal_BP.shape[1])
    # Of proposed tokens that are not the draft's best, alpha has no values to fit.
    is_example_BP = options.is_proposed_BPM[:, :, 0] & (position_P <= accepted_B[:, None])
    inputs_RX = features.acceptance_BPX[is_example_BP]
    was_accepted_R = (position_P < accepted_B[:, None])[is_example_BP]
    logit_R = np.clip(inputs_RX @ values_X, -LARGEST_LOGIT, LARGEST_LOGIT)
    p_R = 1.0 / (1.0 + np.exp(-logit_R))
    return inputs_RX.T @ (was_accepted_R - p_R), (inputs_RX.T * (p_R * (1.0 - p_R))) @ inputs_RX


def _of_bonus(
    features: Features, options: Options, rounds: Rounds, values_X: Float64s
) -> tuple[Float64s, Float64s]:
    """Return the gradient of the log-likelihood of beta and its negative curvature."""
    row_B = np.arange(len(rounds))
    where = (row_B, rounds.accepted_B)
    is_it_BM = options.is_outcome_BPM[where] & (rounds.ids_BPM[where] == rounds.bonus_B[:, None])
    # A bonus token that is no candidate is no example: no value changes its place.
    is_example_B = is_it_BM.any(axis=1)
    inputs_BMX = np.stack((features.scores_BPM[where], -features.log_rank_BPM[where]), axis=2)
    inputs_BMX[~options.is_outcome_BPM[where]] = 0.0
    inputs_RMX = np.maximum(inputs_BMX[is_example_B], -LARGEST_LOGIT)
    logit_RM = inputs_RMX @ values_X
    logit_RM[~options.is_outcome_BPM[where][is_example_B]] = -np.inf
    p_RM = np.exp(logit_RM - logit_RM.max(axis=1, keepdims=True, initial=-LARGEST_LOGIT))
    p_RM /= p_RM.sum(axis=1, keepdims=True)
    mean_RX = (p_RM[:, None] @ inputs_RMX)[:, 0]
    gradient_X = inputs_RMX[is_it_BM[is_example_B]].sum(axis=0) - mean_RX.sum(axis=0)
    weighted_RMX = p_RM[:, :, None] * inputs_RMX
    second_XX = weighted_RMX.reshape(-1, 2).T @ inputs_RMX.reshape(-1, 2)
    return gradient_X, second_XX - mean_RX.T @ mean_RX


def _bands(temperature_B: Float32s) -> Int64s:
    """Return the band of each temperature."""
    return np.searchsorted(BAND_ENDS, temperature_B)
