"""The training loop: batches, rates, optimizers, and the state that a checkpoint holds.

Everything is a function of the seed, the device and the number of threads: the batches, the
initial weights and the order of every sum.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ssd.errors import SettingsError

LossFunction = Callable[[Tensor], Tensor]
"""From token ids [B, S+1] to the mean loss of the batch, a scalar."""
OUTER = ("embed_tokens", "lm_head")
"""Matrices that AdamW trains, with or without Muon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Steps, batches and learning rates of a training run."""

    num_steps: int
    """Optimizer steps, > 0."""
    batch_size: int
    """Sequences in a batch."""
    length: int
    """Number of predicted tokens of each sequence."""
    adam_rate: float
    """Peak learning rate of AdamW (embeddings and norms, or everything without Muon)."""
    muon_rate: float = 0.0
    """Peak learning rate of Muon for the matrices, in AdamW's units; 0 trains all with AdamW."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    warmup_steps: int = 50
    """Steps of linear warm-up, before a cosine down to a hundredth of the peak."""

    @property
    def num_tokens(self) -> int:
        """Tokens predicted in all steps together."""
        return self.num_steps * self.batch_size * self.length


def windows(stream_S: Tensor, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of windows without end: each epoch is shuffled and starts at a new offset.

    Args:
        stream_S: int64, the whole text, longer than a window.
        recipe: Gives the batch size and the length.
        generator: The source of the order.

    Yields:
        int64 [batch_size, length + 1]; a window's last token is only predicted.
    """
    span = recipe.length + 1
    pending: list[Tensor] = []
    while True:
        last = len(stream_S) - span
        offset = int(torch.randint(0, min(recipe.length, last + 1), (), generator=generator))
        starts = torch.arange(offset, last + 1, recipe.length)
        for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
            pending.append(stream_S[start : start + span])
            if len(pending) == recipe.batch_size:
                yield torch.stack(pending)
                pending = []


def mixed_batches(
    stream_S: Tensor, written_BS: Tensor, recipe: Recipe, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield batches of which one half is text of the corpus and the other the target's own.

    Args:
        stream_S: int64, text of the corpus.
        written_BS: int64 [num_windows, length + 1], by the target; without rows, all is corpus.
        recipe: Gives the batch size and the length.
        generator: The source of the order.
    """
    half = recipe.batch_size // 2 if len(written_BS) else 0
    corpus = windows(stream_S, replace(recipe, batch_size=recipe.batch_size - half), generator)
    for corpus_BS in corpus:
        chosen_N = torch.randint(0, max(1, len(written_BS)), (half,), generator=generator)
        yield torch.cat((corpus_BS, written_BS[chosen_N]))


def rate_factor(step: int, recipe: Recipe) -> float:
    """Return the learning rate at a step as a share of its peak: linear up, cosine down."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1.0 + float(torch.cos(torch.tensor(done * torch.pi))))


def optimizers(model: nn.Module, recipe: Recipe) -> list[Optimizer]:
    """Return Muon for the inner matrices (if its rate is not 0) and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [(any(part in name for part in OUTER), p) for name, p in named if p.dim() == 2]
    inner = [p for is_outer, p in matrices if not is_outer]
    groups: list[dict[str, Any]] = [
        {"params": [p for is_outer, p in matrices if is_outer], "weight_decay": 0.0},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    chosen: list[Optimizer] = []
    if recipe.muon_rate > 0:
        chosen.append(
            Muon(
                inner,
                lr=recipe.muon_rate,
                weight_decay=recipe.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    else:
        groups.append({"params": inner, "weight_decay": recipe.weight_decay})
    chosen.append(AdamW(groups, lr=recipe.adam_rate, betas=(0.9, 0.95), eps=1e-10, fused=True))
    return chosen


def is_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite."""
    return all(parameter.isfinite().all() for parameter in model.parameters())


class Training:
    """A model that changes in place, and its optimizers. One thread."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model = model
        self._recipe = recipe
        self._optimizers = optimizers(model, recipe)
        self._peaks = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers
        ]
        self._losses: list[float] = []

    @property
    def num_done(self) -> int:
        """Steps so far."""
        return len(self._losses)

    @property
    def loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        tail = self._losses[-max(1, len(self._losses) // 10) :]
        return sum(tail) / len(tail)

    def run(
        self, batches: Iterator[Tensor], loss_of: LossFunction, on_step: Callable[[], None]
    ) -> None:
        """Take the steps that are left.

        Args:
            batches: Token ids, [B, S+1] each, from the first step on; those of steps that are done
                are left out.
            loss_of: The loss of a batch; must depend on the parameters of the model.
            on_step: Called after each step.

        Raises:
            SettingsError: the weights are not finite any more.
        """
        for batch_BS in islice(batches, self.num_done, self._recipe.num_steps):
            self._take_step(loss_of(batch_BS))
            on_step()

    def _take_step(self, loss: Tensor) -> None:
        factor = rate_factor(self.num_done, self._recipe)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._losses.append(float(loss.detach()))
        # They are not finite either if the loss was not.
        if not is_finite(self._model):
            raise SettingsError(
                f"the weights are not finite after step {self.num_done}: lower --rate, "
                f"which is {self._recipe.adam_rate:g}"
            )

    def state(self) -> dict[str, Tensor]:
        """Return weights, state of the optimizers and losses, for ``restore``."""
        state = {
            f"model.{name}": parameter.detach()
            for name, parameter in self._model.named_parameters()
        }
        for number, optimizer in enumerate(self._optimizers):
            for index, held in optimizer.state_dict()["state"].items():
                state |= {f"{number}.{index}.{name}": tensor for name, tensor in held.items()}
        return state | {"losses": torch.tensor(self._losses, dtype=torch.float64)}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state`` of the same model and recipe."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(state[f"model.{name}"])
        for number, optimizer in enumerate(self._optimizers):
            held: dict[int, dict[str, Tensor]] = defaultdict(dict)
            for key, tensor in state.items():
                owner, _, rest = key.partition(".")
                if owner == str(number):
                    index, _, name = rest.partition(".")
                    held[int(index)][name] = tensor
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": dict(held), "param_groups": groups})
        self._losses = state["losses"].tolist()
