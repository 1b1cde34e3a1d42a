"""Figures of a pair on held-out text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ssd.speculation.fan_out import make_policy
from ssd_bench.sampling.laws import Coupled
from ssd_bench.sampling.model import Model
from ssd_bench.sampling.rounds import Cell, Experiment
from ssd_distill.losses import divergence
from ssd_distill.models import Logits, logits_of

LOOKAHEAD = 6
BRANCHES = 24
PROMPT_TOKENS = 64
ROUNDS_OF_A_TEXT = 20
MOST_TOKENS = PROMPT_TOKENS + ROUNDS_OF_A_TEXT * (LOOKAHEAD + 1)
"""Maximum tokens of a text."""
TEMPERATURES = (0.0, 1.0)
POLICY = "adaptive"
MAX_WINDOWS = 64
"""Windows of held-out text for the losses."""
TOGETHER = 4
"""Windows of one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures on held-out text; losses and divergence in nats per token."""

    target_loss: float
    """Cross entropy of the target."""
    draft_loss: float
    """Cross entropy of the draft."""
    kl: float
    """KL divergence from the distribution of the target to that of the draft."""
    agreement: float
    """Share of positions at which both have the same greedy choice."""
    tokens_per_round: dict[str, float]
    """Tokens of a round by temperature, with ``LOOKAHEAD`` tokens of the draft in each proposal."""
    hit_rate: dict[str, float]
    """Share of outcomes that a table of ``BRANCHES`` branches contains, by temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What both evaluations of a run share."""

    stream_S: Tensor
    """Token ids, int64."""
    length: int
    """Tokens of a window for the losses."""
    rounds: int
    """Rounds of each temperature."""
    prefix: tuple[int, ...]
    """Tokens with which each text of the models begins."""
    num_token_ids: int
    """Ids from this one on are padding."""
    dtype: torch.dtype
    """Data type of the arithmetic of losses."""

    def evaluate(self, target: Any, draft: Any, on_round: Callable[[], None]) -> Evaluation:
        """Measure two models of transformers. The texts do not depend on the draft."""
        logits = [logits_of(model, self.num_token_ids, self.dtype) for model in (target, draft)]
        windows_BS = self.stream_S.unfold(0, self.length + 1, self.length)
        every = 1 + len(windows_BS) // MAX_WINDOWS
        losses = text_losses(logits[0], logits[1], windows_BS[::every])
        experiment = Experiment(
            pair=(Model(target, self.num_token_ids), Model(draft, self.num_token_ids)),
            policies={POLICY: make_policy(POLICY)},
            lookahead=LOOKAHEAD,
            branches=BRANCHES,
            on_round=on_round,
        )
        num_texts = -(-self.rounds // ROUNDS_OF_A_TEXT)
        last = len(self.stream_S) - PROMPT_TOKENS
        cells = [Cell(temperature, "coupled") for temperature in TEMPERATURES]
        for cell in cells:
            for index in range(num_texts):
                start = last * index // num_texts
                text = self.stream_S[start : start + PROMPT_TOKENS].tolist()
                prompt = [*self.prefix, *text]
                rounds = min(ROUNDS_OF_A_TEXT, self.rounds - cell.rounds)
                experiment.add_rounds(cell, Coupled(cell.temperature, index), prompt, rounds)
        named = {f"{cell.temperature:g}": cell for cell in cells}
        return Evaluation(
            **losses,
            tokens_per_round={name: round(c.tokens_per_round, 3) for name, c in named.items()},
            hit_rate={name: round(cell.hit_rate(POLICY), 3) for name, cell in named.items()},
        )


@torch.inference_mode()
def text_losses(target: Logits, draft: Logits, windows_BS: Tensor) -> dict[str, float]:
    """Return the losses of an ``Evaluation`` on windows of text, by name."""
    sums_4 = torch.zeros(4)
    for piece_BS in windows_BS.split(TOGETHER):
        wanted_BSV, logits_BSV = (model(piece_BS[:, :-1]).float() for model in (target, draft))
        goal_R = piece_BS[:, 1:].flatten().to(wanted_BSV.device)
        losses = (
            functional.cross_entropy(wanted_BSV.flatten(0, 1), goal_R),
            functional.cross_entropy(logits_BSV.flatten(0, 1), goal_R),
            divergence(wanted_BSV, logits_BSV),
            (wanted_BSV.argmax(-1) == logits_BSV.argmax(-1)).float().mean(),
        )
        sums_4 += len(piece_BS) * torch.stack(losses).cpu()
    means = (sums_4 / len(windows_BS)).tolist()
    names = ("target_loss", "draft_loss", "kl", "agreement")
    return {name: round(mean, 4) for name, mean in zip(names, means, strict=True)}
