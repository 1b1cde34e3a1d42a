"""What a draft is trained for: to make the choice of its target, given the same noise.

With coupled sampling, target and draft each add the same Gumbel noise to their logits and choose
the argmax. They agree with the probability ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` (Daliri,
Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
2024). This is the acceptance of a token.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ssd_distill.models import Logits
from ssd_distill.training import LossFunction

TEMPERATURES = (1.0, 0.5)
"""Temperatures at which target and draft agree. At lower ones, few tokens have a gradient."""
NUM_TOKENS = 32
"""Number of tokens with the largest mean probability that are computed one by one."""
KL_WEIGHT = 0.3
"""Weight of the divergence. It gives all tokens a gradient, which a new draft needs. It also trains
the order of tokens that are not chosen: they are the branches of a table."""
LOSS = f"{KL_WEIGHT} KL - agreement at T = {' and '.join(map(str, TEMPERATURES))}"
"""Name of the loss: a run does not go on with another one."""


def teacher_loss(student: Logits, teacher: Logits) -> LossFunction:
    """Return the loss of a draft: KL divergence, less the agreement with its target."""

    def loss(tokens_BS: Tensor) -> Tensor:
        inputs_BS = tokens_BS[:, :-1]
        with torch.no_grad():
            wanted_BSV = teacher(inputs_BS)
        pair = log_probabilities(wanted_BSV), log_probabilities(student(inputs_BS))
        agreements = torch.stack([agreement(*pair, temperature) for temperature in TEMPERATURES])
        return KL_WEIGHT * _divergence(*pair) - agreements.mean()

    return loss


def divergence(wanted_BSV: Tensor, logits_BSV: Tensor) -> Tensor:
    """Return the mean KL divergence from ``wanted`` to ``logits``, nats per token."""
    return _divergence(log_probabilities(wanted_BSV), log_probabilities(logits_BSV))


def log_probabilities(logits_BSV: Tensor) -> Tensor:
    """Return the logarithms of the probabilities at temperature 1, float32 [B*S, V]."""
    return functional.log_softmax(logits_BSV.flatten(0, 1).float(), dim=-1)


def agreement(log_p_RV: Tensor, log_q_RV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean probability that both choose the same token with the same noise.

    It is exact for at most ``NUM_TOKENS`` tokens. With more, all other tokens count as one: their
    own agreement is left out, and that of the likely ones is slightly too large.

    Args:
        log_p_RV: ``log_probabilities`` of the target.
        log_q_RV: those of the draft.
        temperature: > 0, at which both choose.
    """
    if temperature != 1.0:
        log_p_RV = functional.log_softmax(log_p_RV / temperature, dim=-1)
        log_q_RV = functional.log_softmax(log_q_RV / temperature, dim=-1)
    with torch.no_grad():
        count = min(NUM_TOKENS, log_p_RV.shape[-1])
        likely_RN = (log_p_RV.exp() + log_q_RV.exp()).topk(count, dim=-1).indices
    log_p_RN, log_q_RN = log_p_RV.gather(-1, likely_RN), log_q_RV.gather(-1, likely_RN)
    log_ratios_RNM = torch.maximum(
        _with_rest(log_p_RN)[:, None] - log_p_RN[..., None],
        _with_rest(log_q_RN)[:, None] - log_q_RN[..., None],
    )
    return (-log_ratios_RNM.logsumexp(-1)).exp().sum(-1).mean()


def _divergence(log_p_RV: Tensor, log_q_RV: Tensor) -> Tensor:
    return functional.kl_div(log_q_RV, log_p_RV, log_target=True, reduction="batchmean")


def _with_rest(log_p_RN: Tensor) -> Tensor:
    """Append the logarithm of the probability of all other tokens, [R, N+1]."""
    rest_R1 = (1.0 - log_p_RN.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()
    return torch.cat((log_p_RN, rest_R1), dim=-1)
