"""Text that the target itself writes, after the beginnings of texts of the corpus."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_bench.sampling.model import Model

TEMPERATURES = (1.0, 0.6, 0.0)
"""Temperatures of the windows, in turn."""
TOGETHER = 64
"""Windows of one batch."""


def write_windows(
    target: Model,
    stream_S: Tensor,
    shape: tuple[int, int],
    seed: int,
    *,
    prefix: Sequence[int] = (),
    on_windows: Callable[[int], None] = lambda _count: None,
) -> Tensor:
    """Return windows of which the target writes the last half or more.

    Args:
        target: the model; its present texts are removed.
        stream_S: int64, text whose parts are the prompts: 1/8 to 1/2 of a window.
        shape: windows, and tokens of each.
        seed: of prompts and noise.
        prefix: tokens with which each text of the model begins.
        on_windows: called with the number of windows that a batch has added.

    Returns:
        int64 [windows, tokens].
    """
    num_windows, length = shape
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.empty(0, length, dtype=torch.int64)]
    for index, first in enumerate(range(0, num_windows, TOGETHER)):
        count = min(TOGETHER, num_windows - first)
        num_prompt = max(1, length * (1 + index % 4) // 8)
        start_B = torch.randint(0, len(stream_S) - num_prompt, (count,), generator=generator)
        prompts_BS = stream_S[start_B[:, None] + torch.arange(num_prompt)]
        first_BS = torch.tensor([prefix] * count, dtype=torch.int64)
        pieces.append(_continued(target, torch.cat((first_BS, prompts_BS), 1), length, generator))
        on_windows(count)
    return torch.cat(pieces)


def _continued(model: Model, prompts_BS: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue equally long prompts, each at its own temperature, to ``length`` tokens."""
    temperature_B1 = torch.tensor(TEMPERATURES).repeat(len(prompts_BS))[: len(prompts_BS), None]
    tokens_BS, fresh_BS = prompts_BS, prompts_BS
    model.clear()
    while tokens_BS.shape[1] < length:
        logits_BV = model.extend(fresh_BS, num_last=1)[:, -1].cpu()
        noise_BV = -torch.empty_like(logits_BV).exponential_(generator=generator).log()
        fresh_BS = (logits_BV + temperature_B1 * noise_BV).argmax(dim=-1, keepdim=True)
        tokens_BS = torch.cat((tokens_BS, fresh_BS), dim=1)
    return tokens_BS
