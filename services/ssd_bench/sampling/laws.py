"""Laws of speculative sampling: how drafts choose proposed tokens, and targets accept them. Pure.

Each law yields tokens with the distribution of the target. They differ in how many proposed tokens
are accepted, and in how well the draft can foresee the bonus token.

- ``Coupled``: both add the same noise and take the largest (speculation.md, section 4).
- ``Rejection``: d is accepted with probability min(1, p(d) / q(d)); after a rejection, the bonus
  token has the distribution max(p - q, 0), normalised (arXiv 2211.17192).
- ``Saguaro``: ``Rejection`` with a draft that chooses the tokens of its cache, its F most likely
  ones, with C times their probability. After a rejection, the bonus token is then more often one of
  them (arXiv 2603.03251, section 4.2). C = 1 is ``Rejection``.

Letters: K proposed tokens, P = K + 1 positions, V tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ssd.speculation.noise import gumbel_noise
from ssd.types import Outcome

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


class Law(Protocol):
    """The choices of one text at one temperature. A law is used once for each position."""

    def propose(self, logits_V: Float32s, position: int) -> int:
        """Return the token that the draft chooses at a position of the text."""

    def scores(self, logits_V: Float32s, position: int) -> Float32s:
        """Return what the draft ranks outcomes by, float32 [V], in units of logits."""

    def verify(
        self, target_PV: Float32s, draft_PV: Float32s, proposal: list[int], position: int
    ) -> Outcome:
        """Return the outcome of a proposal.

        Args:
            target_PV: logits of the target; row i selects the token after i proposed ones.
            draft_PV: those of the draft.
            proposal: d_1..d_K, of ``propose``.
            position: of d_1.
        """


def softmax(logits_V: Float32s, temperature: float) -> Float64s:
    """Return the probabilities of tokens; at temperature 0, 1 for the first of the best ones."""
    if temperature == 0:
        best_V = np.zeros(len(logits_V))
        best_V[logits_V.argmax()] = 1.0
        return best_V
    weight_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
    return np.asarray(weight_V / weight_V.sum())


class Coupled:
    """Coupled sampling, as the module defines it."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._seed = seed

    def scores(self, logits_V: Float32s, position: int) -> Float32s:
        """See ``Law``."""
        if self._temperature == 0:
            return logits_V
        noise_V = gumbel_noise(self._seed, [position], len(logits_V))[0]
        return np.asarray(logits_V + np.float32(self._temperature) * noise_V)

    def propose(self, logits_V: Float32s, position: int) -> int:
        """See ``Law``."""
        return int(self.scores(logits_V, position).argmax())

    def verify(
        self, target_PV: Float32s, draft_PV: Float32s, proposal: list[int], position: int
    ) -> Outcome:
        """See ``Law``."""
        del draft_PV
        for k, proposed in enumerate(proposal):
            chosen = self.propose(target_PV[k], position + k)
            if chosen != proposed:
                return Outcome(k, chosen)
        return Outcome(len(proposal), self.propose(target_PV[-1], position + len(proposal)))


@dataclass(slots=True)
class Saguaro:
    """Saguaro sampling, as the module defines it; ``Rejection`` with ``cache_weight`` 1."""

    temperature: float
    rng: np.random.Generator
    cache_weight: float = 1.0
    """C, 0..1."""
    cache_size: int = 0
    """F, tokens of the draft's cache at each position."""

    def scores(self, logits_V: Float32s, position: int) -> Float32s:
        """See ``Law``. The random numbers of the target are unknown to the draft."""
        del position
        return logits_V

    def proposal_distribution(self, logits_V: Float32s) -> Float64s:
        """Return the probabilities with which the draft chooses, [V]."""
        q_V = softmax(logits_V, self.temperature)
        if self.cache_weight == 1.0 or self.cache_size == 0:
            return q_V
        weighted_V = q_V.copy()
        weighted_V[np.argpartition(-q_V, self.cache_size)[: self.cache_size]] *= self.cache_weight
        total = weighted_V.sum()
        # With C = 0, a draft that is certain has nothing else to choose.
        return np.asarray(weighted_V / total) if total > 0 else q_V

    def propose(self, logits_V: Float32s, position: int) -> int:
        """See ``Law``."""
        del position
        return self._drawn(self.proposal_distribution(logits_V))

    def verify(
        self, target_PV: Float32s, draft_PV: Float32s, proposal: list[int], position: int
    ) -> Outcome:
        """See ``Law``."""
        del position
        for k, proposed in enumerate(proposal):
            p_V = softmax(target_PV[k], self.temperature)
            q_V = self.proposal_distribution(draft_PV[k])
            if self.rng.random() * q_V[proposed] >= p_V[proposed]:
                residual_V = np.maximum(p_V - q_V, 0.0)
                return Outcome(k, self._drawn(residual_V / residual_V.sum()))
        return Outcome(len(proposal), self._drawn(softmax(target_PV[-1], self.temperature)))

    def _drawn(self, probability_V: Float64s) -> int:
        # A sum of many float64 can be below the number that is drawn.
        place = np.searchsorted(np.cumsum(probability_V), self.rng.random(), side="right")
        return int(min(place, np.flatnonzero(probability_V)[-1]))
