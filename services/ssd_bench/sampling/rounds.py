"""Rounds of a pair on one device, whose outcomes are compared with the outcomes of tables.

Every proposal is the draft's, as after a hit. Letters as in ``laws``; N branches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ssd.speculation.fan_out import Adaptive, Candidates, FanOutPolicy
from ssd.speculation.fan_out_fit import FanOutFit, Rounds
from ssd.speculation.speed_model import PairTimes, Rates, plain_speed, speculative_speed
from ssd.types import Outcome
from ssd_bench.sampling.laws import Float32s, Law

if TYPE_CHECKING:
    from ssd_bench.sampling.model import Model

FITTED = "fitted"
"""Name of the policy ``adaptive`` with values that are fitted to the rounds before."""
_LEAST_KEPT = 16
_NORMAL_95 = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(slots=True)
class Cell:
    """What rounds of one law at one temperature have yielded."""

    temperature: float
    law: str
    cache_weight: float | None = None
    """C; None for coupled sampling."""
    rounds: int = 0
    tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Outcomes that the table of a policy contains."""

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a round with a proposal of the draft."""
        return self.tokens / self.rounds

    @property
    def own_policy(self) -> str:
        """The policy of the law's authors: this product, or the paper."""
        return "adaptive" if self.cache_weight is None else "geometric"

    def hit_rate(self, policy: str) -> float:
        """Return the share of outcomes that the table of a policy contains."""
        return self.hits[policy] / self.rounds

    def hit_interval(self, policy: str) -> tuple[float, float]:
        """Return the 95 % interval of a hit rate, as of independent rounds (Wilson's)."""
        rate, spread = self.hit_rate(policy), _NORMAL_95**2 / self.rounds
        center = (rate + spread / 2) / (1 + spread)
        half = math.sqrt(spread * (rate * (1 - rate) + spread / 4)) / (1 + spread)
        return center - half, center + half

    def speed_up(self, proposal_share: float, *, waits_after_miss: bool) -> float:
        """Return the predicted tokens/s over those of plain decoding, with tables in time.

        The tables are those of ``own_policy``.

        Args:
            proposal_share: time of a proposal without a table over that of a verify.
            waits_after_miss: whether the round after a miss waits for a proposal; otherwise it is
                plain.
        """
        times = PairTimes(plain=1, verify=1, proposal=proposal_share, table=1, overhead=0)
        rates = Rates(
            tokens_after_draft=self.tokens_per_round,
            hit_rate=self.hit_rate(self.own_policy),
            tokens_after_miss=self.tokens_per_round if waits_after_miss else 1.0,
            waits_after_miss=waits_after_miss,
        )
        speculative = speculative_speed(times, rates, 1)
        return speculative.tokens_per_second / plain_speed(times, 1).tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What all laws share."""

    pair: tuple["Model", "Model"]
    """Target and draft."""
    policies: Mapping[str, FanOutPolicy]
    """Fan-out policies by name."""
    lookahead: int
    """K."""
    branches: int
    """N of each table."""
    on_round: Callable[[], None]
    """Called after each round."""

    def add_rounds(
        self,
        cell: Cell,
        law: Law,
        prompt: Sequence[int],
        rounds: int,
        fit: FanOutFit | None = None,
    ) -> None:
        """Continue a prompt of at least two tokens and add the results to a cell of the law.

        The law is new for this prompt. ``fit`` is for the policy ``FITTED``; it learns from the
        rounds.
        """
        target, draft = self.pair
        policies = dict(self.policies)
        if fit is not None:
            policies[FITTED] = Adaptive(values_of=fit.values_of)
        last, position = prompt[-1], len(prompt)
        for model in self.pair:
            model.begin(prompt[:-1])
        for _ in range(rounds):
            proposal: list[int] = []
            rows = [draft.run([last])[0]]
            for _ in range(self.lookahead):
                proposal.append(law.propose(rows[-1], position + len(proposal)))
                rows.append(draft.run(proposal[-1:])[0])
            target_PV = target.run([last, *proposal])
            outcome = law.verify(target_PV, np.stack(rows), proposal, position)
            scores_PV = np.stack([law.scores(row, position + k) for k, row in enumerate(rows)])
            candidates = candidates_of(scores_PV, self.branches, cell.temperature)
            for name, policy in policies.items():
                outcomes = foreseen(policy, candidates, proposal, self.branches)
                is_hit = (outcome.accepted, outcome.bonus) in outcomes
                cell.hits[name] = cell.hits.get(name, 0) + is_hit
            if fit is not None:
                fit.add(_round(candidates, proposal, outcome))
                fit.learn()
            cell.rounds += 1
            cell.tokens += outcome.accepted + 1
            last, position = outcome.bonus, position + outcome.accepted + 1
            for model in self.pair:
                model.crop(position - 1)
            self.on_round()


def candidates_of(scores_PV: Float32s, branches: int, temperature: float) -> Candidates:
    """Return the candidates of one session, as many as a draft keeps."""
    num_candidates = min(max(_LEAST_KEPT, branches) + 1, scores_PV.shape[1])
    ids_PM = np.argsort(-scores_PV, axis=1, kind="stable")[:, :num_candidates]
    scores_PM = np.take_along_axis(scores_PV, ids_PM, axis=1)
    return Candidates(ids_PM[None], scores_PM[None], np.array([temperature], dtype=np.float32))


def foreseen(
    policy: FanOutPolicy, candidates: Candidates, proposal: Sequence[int], branches: int
) -> set[tuple[int, int]]:
    """Return the outcomes (accepted length, bonus token) that a table contains."""
    chosen = policy.choose(
        candidates, np.array([proposal], dtype=np.int64), np.array([len(proposal)]), branches
    )
    count = int(chosen.num_branches_B[0])
    pairs = zip(chosen.accepted_BN[0, :count], chosen.bonus_BN[0, :count], strict=True)
    return {(int(accepted), int(bonus)) for accepted, bonus in pairs}


def _round(candidates: Candidates, proposal: Sequence[int], outcome: Outcome) -> Rounds:
    assert candidates.temperature_B is not None
    return Rounds(
        candidates.ids_BPM,
        candidates.scores_BPM,
        candidates.temperature_B,
        np.array([proposal], dtype=np.int64),
        np.array([len(proposal)]),
        np.array([outcome.accepted]),
        np.array([outcome.bonus]),
    )
