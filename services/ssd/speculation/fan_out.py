"""Fan-out: which outcomes of a proposal get a branch. Vectorised over sessions.

At each position of a proposal, the draft keeps its best tokens with scores u = log q + T * g, up to
a constant of the position. A policy selects N outcomes (k, v): k accepted tokens, then v. At k < m
the proposed token d_{k+1} is excluded, because it would have been accepted. At k = m nothing is
excluded, and the pair (m, best candidate) always has a branch.

Source: arXiv 2603.03251 (``geometric`` is Theorem 12); ``adaptive`` was developed for SSD.

Decision: ``adaptive`` starts with the values below, and ``fan_out_fit`` fits them online.
Because: on two pairs, three temperatures and K = 6, the hit rate of the start values is .07 to .14
higher than that of ``uniform`` with N = 12, and .03 to .09 with N = 24. Other pairs and the filters
of requests have other best values: with top-k 20 or min-p .05, the fit adds .03 to .04.
Not chosen: a softmax with one temperature for both distributions. Its best value differs so much
between pairs that a wrong one is worse than ``uniform``.
Revisit when: the hit rate of ``adaptive`` is below that of ``uniform`` for some pair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ssd.errors import SettingsError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

ADAPTIVE = "adaptive"
_PAD = -1
LARGEST_LOGIT = 30.0
START_VALUES = (1.0, 1.0, 1.0, 1.6, 0.3)
"""The values of ``Adaptive`` before any outcome is known: w_1, w_2, w_3, a, b."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft's best tokens at each position of the proposals, best first."""

    ids_BPM: Int64s
    scores_BPM: Float32s
    """u = log q + T * g up to a constant of the position, descending; -inf for no candidate."""
    temperature_B: Float32s | None = None
    """Temperatures of the sessions; None if they are unknown."""


@dataclass(frozen=True, slots=True)
class SelectedOutcomes:
    """The outcomes that get a branch, each once; -1 from ``num_branches_B`` on."""

    accepted_BN: Int32s
    bonus_BN: Int32s
    num_branches_B: Int64s
    probability_BN: Float64s | None = None
    """Estimate for each outcome; 0 where there is none. None: the policy does not estimate it."""

    def first(self, num_branches: int) -> "SelectedOutcomes":
        """Return the first outcomes of each session, at most so many, without probabilities."""
        return SelectedOutcomes(
            self.accepted_BN[:, :num_branches],
            self.bonus_BN[:, :num_branches],
            np.minimum(self.num_branches_B, num_branches),
        )


class FanOutPolicy(Protocol):
    """Selects the outcomes of a batch of sessions. Pure. Called from the draft's step thread."""

    def choose(
        self,
        candidates: Candidates,
        proposal_BK: Int64s,
        num_proposed_B: Int64s,
        num_branches: int,
    ) -> SelectedOutcomes:
        """Return up to ``num_branches`` outcomes of each session.

        Args:
            candidates: position k has the candidates after k accepted tokens; there are P = K + 1.
            proposal_BK: token ids; columns from ``num_proposed_B`` on are padding.
            num_proposed_B: m, 0..K.
            num_branches: N.

        Returns:
            N outcomes for each session, most likely first; fewer if there are fewer candidates.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """Which pairs (k, candidate) are possible outcomes."""

    is_proposed_BPM: Bools
    """The candidate is the proposed token of its position; only at k < m."""
    is_outcome_BPM: Bools
    has_proposal_BP: Bools
    """The position has a proposed token, k < m."""
    rank_BPM: Int64s
    """0 for the best outcome of a position; undefined if there is none."""


def options_of(candidates: Candidates, proposal_BK: Int64s, num_proposed_B: Int64s) -> Options:
    """Return which pairs are possible outcomes; see ``FanOutPolicy.choose``."""
    num_positions, num_kept = candidates.ids_BPM.shape[1:]
    position_P = np.arange(num_positions)
    proposal_BP = np.full((len(proposal_BK), num_positions), _PAD, dtype=np.int64)
    proposal_BP[:, :-1] = proposal_BK
    has_proposal_BP = position_P < num_proposed_B[:, None]
    proposal_BP[~has_proposal_BP] = _PAD
    is_there_BPM = candidates.scores_BPM > -np.inf
    is_proposed_BPM = is_there_BPM & (candidates.ids_BPM == proposal_BP[:, :, None])
    is_reached_BP = position_P <= num_proposed_B[:, None]
    is_outcome_BPM = is_there_BPM & ~is_proposed_BPM & is_reached_BP[:, :, None]
    rank_BPM = np.arange(num_kept) - np.cumsum(is_proposed_BPM, axis=2)
    return Options(is_proposed_BPM, is_outcome_BPM, has_proposal_BP, rank_BPM)


def _take_best(
    candidates: Candidates,
    priority_BPM: Float64s,
    num_proposed_B: Int64s,
    num_branches: int,
    probability_BPM: Float64s | None = None,
) -> SelectedOutcomes:
    """Return the outcomes with the highest priority; -inf is no outcome, ties go by (k, rank)."""
    num_sessions, _, num_kept = priority_BPM.shape
    session_B = np.arange(num_sessions)
    best_B = priority_BPM[session_B, num_proposed_B, 0]
    priority_BPM[session_B, num_proposed_B, 0] = np.where(best_B > -np.inf, np.inf, -np.inf)
    priority_BC = priority_BPM.reshape(num_sessions, -1)
    chosen_BN = np.argsort(-priority_BC, axis=1, kind="stable")[:, :num_branches]
    # One index for several arrays: half the time of ``take_along_axis``.
    where_BN = chosen_BN + session_B[:, None] * priority_BC.shape[1]
    is_real_BN = priority_BPM.take(where_BN) > -np.inf
    ids_BN = candidates.ids_BPM.take(where_BN)
    accepted_BN = np.full((num_sessions, num_branches), _PAD, dtype=np.int32)
    bonus_BN = np.full((num_sessions, num_branches), _PAD, dtype=np.int32)
    num_taken = chosen_BN.shape[1]
    accepted_BN[:, :num_taken] = np.where(is_real_BN, chosen_BN // num_kept, _PAD)
    bonus_BN[:, :num_taken] = np.where(is_real_BN, ids_BN, _PAD)
    num_branches_B = is_real_BN.sum(axis=1, dtype=np.int64)
    if probability_BPM is None:
        return SelectedOutcomes(accepted_BN, bonus_BN, num_branches_B)
    probability_BN = np.zeros((num_sessions, num_branches))
    probability_BN[:, :num_taken] = probability_BPM.take(where_BN)
    return SelectedOutcomes(accepted_BN, bonus_BN, num_branches_B, probability_BN)


def start_values(_candidates: Candidates) -> Float64s:
    """Return the values of ``Adaptive`` before any outcome is known, for all sessions."""
    return np.array([START_VALUES])


@dataclass(frozen=True, slots=True)
class Features:
    """What the values of ``Adaptive`` weigh. The best score of a position is 0."""

    scores_BPM: Float64s
    acceptance_BPX: Float64s
    """X = 3: the gap of the two best scores, the log-softmax of the best one, and 1."""
    log_rank_BPM: Float64s
    """log(rank + 1)."""


def features_of(candidates: Candidates, options: Options) -> Features:
    """Return the features of each position and pair."""
    scores_BPM = candidates.scores_BPM.astype(np.float64)
    best_BP = scores_BPM[:, :, 0]
    scores_BPM -= np.where(best_BP > -np.inf, best_BP, 0.0)[:, :, None]
    log_confidence_BP = -np.log(np.maximum(np.exp(scores_BPM).sum(axis=2), 1.0))
    gap_BP = np.full_like(log_confidence_BP, LARGEST_LOGIT)
    if scores_BPM.shape[2] > 1:
        gap_BP = np.minimum(-scores_BPM[:, :, 1], LARGEST_LOGIT)
    acceptance_BPX = np.stack((gap_BP, log_confidence_BP, np.ones_like(gap_BP)), axis=2)
    log_rank_BPM = np.log1p(np.maximum(options.rank_BPM, 0))
    return Features(scores_BPM, acceptance_BPX, log_rank_BPM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """The N most likely outcomes of the current context, by the draft's scores.

    If d_{k+1} is the draft's best token, it is accepted with probability

        alpha = sigmoid(w_1 * (u_1 - u_2) + w_2 * log softmax(u)_1 + w_3)

    Otherwise alpha is softmax(u / tau) of d_{k+1}, with the lowest kept score if it is not a
    candidate. After a rejection, v has probability beta = softmax(a * u - b * log(rank + 1)). The
    softmaxes are over the candidates of the position. The softmax of beta excludes d_{k+1}, and its
    ranks count the other candidates from 0.
    """

    values_of: Callable[[Candidates], Float64s] = start_values
    """(w_1, w_2, w_3, a, b) of each session, [B, 5]."""
    foreign_temperature: float = 0.5
    """tau, for proposed tokens that are not the draft's best."""

    def choose(
        self,
        candidates: Candidates,
        proposal_BK: Int64s,
        num_proposed_B: Int64s,
        num_branches: int,
    ) -> SelectedOutcomes:
        """See ``FanOutPolicy``."""
        options = options_of(candidates, proposal_BK, num_proposed_B)
        log_probability_BPM = self._log_probabilities(candidates, options, num_proposed_B)
        probability_BPM = np.exp(log_probability_BPM)
        return _take_best(
            candidates, log_probability_BPM, num_proposed_B, num_branches, probability_BPM
        )

    def _log_probabilities(
        self, candidates: Candidates, options: Options, num_proposed_B: Int64s
    ) -> Float64s:
        """Return log P(k, v) of every pair, float64 [B, P, M]; -inf if it is no outcome."""
        features = features_of(candidates, options)
        values_BX1 = self.values_of(candidates)[:, :, None]
        logit_BP = (features.acceptance_BPX @ values_BX1[:, :3])[:, :, 0]
        log_accepted_BP, log_rejected_BP = self._log_acceptance(
            logit_BP, features.scores_BPM, options
        )
        position_P = np.arange(logit_BP.shape[1])
        log_rejected_BP[position_P >= num_proposed_B[:, None]] = 0.0
        log_reached_BP = np.cumsum(log_accepted_BP, axis=1) - log_accepted_BP
        of_score_B11, of_rank_B11 = values_BX1[:, 3:4], values_BX1[:, 4:]
        log_p_BPM = of_score_B11 * features.scores_BPM - of_rank_B11 * features.log_rank_BPM
        log_p_BPM[~options.is_outcome_BPM] = -np.inf
        highest_BP = log_p_BPM.max(axis=2)
        log_p_BPM -= np.where(highest_BP > -np.inf, highest_BP, 0.0)[:, :, None]
        # The sum is 0 at a position without outcomes, else at least 1.
        log_p_BPM -= np.log(np.maximum(np.exp(log_p_BPM).sum(axis=2), 1.0))[:, :, None]
        log_p_BPM += (log_reached_BP + log_rejected_BP)[:, :, None]
        return log_p_BPM

    def _log_acceptance(
        self, logit_BP: Float64s, scores_BPM: Float64s, options: Options
    ) -> tuple[Float64s, Float64s]:
        """Return log alpha and log (1 - alpha) of each position; the best score is 0."""
        logit_BP = np.clip(logit_BP, -LARGEST_LOGIT, LARGEST_LOGIT)
        is_foreign_BP = ~options.is_proposed_BPM[:, :, 0] & options.has_proposal_BP
        if is_foreign_BP.any():
            is_proposed_XM = options.is_proposed_BPM[is_foreign_BP]
            logit_BP[is_foreign_BP] = self._foreign_logit(scores_BPM[is_foreign_BP], is_proposed_XM)
        log_accepted_BP = -np.logaddexp(0.0, -logit_BP)
        return log_accepted_BP, log_accepted_BP - logit_BP

    def _foreign_logit(self, scores_XM: Float64s, is_proposed_XM: Bools) -> Float64s:
        """Return the logit of alpha at X positions whose proposed token is not the draft's best."""
        lowest_X = np.where(scores_XM > -np.inf, scores_XM, 0.0).min(axis=1)
        proposed_X = np.where(is_proposed_XM, scores_XM, 0.0).sum(axis=1)
        score_X = np.where(is_proposed_XM.any(axis=1), proposed_X, lowest_X)
        total_X = np.maximum(np.exp(scores_XM / self.foreign_temperature).sum(axis=1), 1.0)
        log_p_X = score_X / self.foreign_temperature - np.log(total_X)
        p_X = np.clip(np.exp(log_p_X), np.exp(-LARGEST_LOGIT), 1.0 - 1e-12)
        logit_X: Float64s = np.log(p_X) - np.log1p(-p_X)
        return logit_X


@dataclass(frozen=True, slots=True)
class Split:
    """A fixed number of branches for each accepted length, which go to its best outcomes.

    If a position has fewer outcomes than its share, the next best outcomes of others get the rest.
    """

    share: Callable[[int, int], tuple[int, ...]]
    """(m, N) -> F_0..F_m."""

    def choose(
        self,
        candidates: Candidates,
        proposal_BK: Int64s,
        num_proposed_B: Int64s,
        num_branches: int,
    ) -> SelectedOutcomes:
        """See ``FanOutPolicy``."""
        options = options_of(candidates, proposal_BK, num_proposed_B)
        num_sessions, num_positions, _ = options.rank_BPM.shape
        share_BP = np.zeros((num_sessions, num_positions), dtype=np.int64)
        for row, num_proposed in enumerate(num_proposed_B.tolist()):
            share_BP[row, : num_proposed + 1] = self.share(num_proposed, num_branches)
        beyond_BPM = np.maximum(options.rank_BPM - share_BP[:, :, None] + 1, 0)
        priority_BPM = np.where(options.is_outcome_BPM, -beyond_BPM, -np.inf)
        return _take_best(candidates, priority_BPM, num_proposed_B, num_branches)


def uniform_share(num_proposed: int, num_branches: int) -> tuple[int, ...]:
    """Return F_0..F_m that differ by at most 1; the shortest lengths get the remainder."""
    share, left = divmod(num_branches, num_proposed + 1)
    return tuple(share + (k < left) for k in range(num_proposed + 1))


@lru_cache(maxsize=1024)
def geometric_share(
    acceptance: float, exponent: float, num_proposed: int, num_branches: int
) -> tuple[int, ...]:
    """Return the split with the highest hit rate for one acceptance of all tokens (SSD Theorem 12).

    With the miss probability F^-r among F ranked candidates, F_k is proportional to a^(k / (1+r))
    for k < m, and to (a^m / (1-a))^(1 / (1+r)) for k = m; rounded by largest remainder.

    Args:
        acceptance: a, between 0 and 1, both excluded.
        exponent: r, > 0.
        num_proposed: m.
        num_branches: N.

    Returns:
        F_0..F_m, whose sum is N.
    """
    weights = [acceptance ** (k / (1 + exponent)) for k in range(num_proposed + 1)]
    weights[-1] *= (1 - acceptance) ** (-1 / (1 + exponent))
    exact = [num_branches * weight / sum(weights) for weight in weights]
    floors = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: floors[k] - exact[k])
    for k in by_remainder[: num_branches - sum(floors)]:
        floors[k] += 1
    return tuple(floors)


POLICIES: dict[str, Callable[[], FanOutPolicy]] = {
    ADAPTIVE: Adaptive,
    "uniform": partial(Split, uniform_share),
    "geometric": partial(Split, partial(geometric_share, 0.8, 1.0)),
}


def make_policy(name: str) -> FanOutPolicy:
    """Return the policy with this name, a key of ``POLICIES``.

    Raises:
        SettingsError: the policy is unknown.
    """
    if name not in POLICIES:
        raise SettingsError(f"fan-out {name!r} is unknown; choose from {sorted(POLICIES)}")
    return POLICIES[name]()
