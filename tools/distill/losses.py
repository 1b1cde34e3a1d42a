"""Losses of the embedded pair beside that of ``ssd distill``."""

from torch import Tensor
from torch.nn import functional

from ssd_distill.losses import divergence
from ssd_distill.models import Logits
from ssd_distill.training import LossFunction


def text_loss(model: Logits) -> LossFunction:
    """Return the cross entropy of the next token under ``model``."""

    def loss(tokens_BS: Tensor) -> Tensor:
        logits_BSV = model(tokens_BS[:, :-1])
        return functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()
        )

    return loss


def agreement_loss(
    target: Logits, draft: Logits, weight: float, num_text_rows: int
) -> LossFunction:
    """Return cross entropy of the target on text plus ``weight`` KL(target || draft) on all rows.

    Args:
        target: Trained on the text and towards its draft.
        draft: Trained towards the target's distribution.
        weight: Nats of text for a nat of divergence.
        num_text_rows: Number of first rows of a batch that are text of the corpus. The target
            generated the other rows, which have no loss on text.
    """

    def loss(tokens_BS: Tensor) -> Tensor:
        inputs_BS, goals_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
        wanted_BSV, logits_BSV = target(inputs_BS), draft(inputs_BS)
        text = functional.cross_entropy(
            wanted_BSV[:num_text_rows].flatten(0, 1).float(), goals_BS[:num_text_rows].flatten()
        )
        return text + weight * divergence(wanted_BSV, logits_BSV)

    return loss
