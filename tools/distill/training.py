"""Training loops: from text, and from a teacher.

Everything is a function of the seed and the number of threads: the batches, the initial weights
and the order of every sum.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer

logger = logging.getLogger(__name__)

LossFunction = Callable[[Tensor], Tensor]
"""From token ids [B, S+1] to the mean loss of the batch, a scalar in nats per token."""


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
    compiled: bool = True
    """Fuse forward, loss and backward with torch.compile: no faster where products dominate."""

    @property
    def num_tokens(self) -> int:
        """Tokens predicted in all steps together."""
        return self.num_steps * self.batch_size * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Result of a run of ``learn``."""

    loss: float
    """Mean loss of the last tenth of the steps, nats per token."""
    seconds: float
    """Wall time."""


def windows(stream_S: Tensor, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of windows without end: each epoch is shuffled and starts at a new offset.

    Args:
        stream_S: int64, the whole text.
        recipe: Gives the batch size and the length.
        generator: The source of the order.

    Yields:
        int64 [batch_size, length + 1]; a window's last token is only predicted.
    """
    span = recipe.length + 1
    pending: list[Tensor] = []
    while True:
        offset = int(torch.randint(0, recipe.length, (), generator=generator))
        starts = torch.arange(offset, len(stream_S) - span + 1, recipe.length)
        for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
            pending.append(stream_S[start : start + span])
            if len(pending) == recipe.batch_size:
                yield torch.stack(pending)
                pending = []


def rate_factor(step: int, recipe: Recipe) -> float:
    """Return the learning rate at a step as a share of its peak: linear up, cosine down."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1.0 + float(torch.cos(torch.tensor(done * torch.pi))))


def optimizers(model: nn.Module, recipe: Recipe) -> list[Optimizer]:
    """Return Muon for the inner matrices (if its rate is not 0) and AdamW for the rest."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.dim() == 2 and "embed_tokens" not in name]
    outer = [p for name, p in named if p.dim() == 2 and "embed_tokens" in name]
    norms = [p for _, p in named if p.dim() == 1]
    groups = [
        {"params": outer, "weight_decay": 0.0},
        {"params": norms, "weight_decay": 0.0},
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


def text_loss(model: Callable[[Tensor], Tensor]) -> LossFunction:
    """Return the cross entropy of the next token under ``model``."""

    def loss(tokens_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BSV = model(tokens_BS[:, :-1])
        return functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten()
        )

    return loss


def teacher_loss(
    student: Callable[[Tensor], Tensor], teacher: Callable[[Tensor], Tensor]
) -> LossFunction:
    """Return KL(teacher || student) at temperature 1."""

    def loss(tokens_BS: Tensor) -> Tensor:
        inputs_BS = tokens_BS[:, :-1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted_BSV = teacher(inputs_BS)
            logits_BSV = student(inputs_BS)
        return divergence(wanted_BSV, logits_BSV)

    return loss


def agreement_loss(
    target: Callable[[Tensor], Tensor],
    draft: Callable[[Tensor], Tensor],
    weight: float,
    num_text_rows: int,
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
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted_BSV = target(inputs_BS)
            logits_BSV = draft(inputs_BS)
        text = functional.cross_entropy(
            wanted_BSV[:num_text_rows].flatten(0, 1).float(), goals_BS[:num_text_rows].flatten()
        )
        return text + weight * divergence(wanted_BSV, logits_BSV)

    return loss


def divergence(wanted_BSV: Tensor, logits_BSV: Tensor) -> Tensor:
    """Return the mean KL divergence from ``wanted`` to ``logits``, nats per token."""
    log_p_RV = functional.log_softmax(wanted_BSV.flatten(0, 1).float(), dim=-1)
    log_q_RV = functional.log_softmax(logits_BSV.flatten(0, 1).float(), dim=-1)
    return functional.kl_div(log_q_RV, log_p_RV, log_target=True, reduction="batchmean")


def learn(
    model: nn.Module,
    recipe: Recipe,
    batches: Iterator[Tensor],
    loss_of: LossFunction,
    *,
    title: str,
) -> Progressed:
    """Take ``recipe.num_steps`` steps on ``model``, in place.

    Args:
        model: The model whose parameters change.
        recipe: Rates and lengths.
        batches: Token ids, [B, S+1] each.
        loss_of: The loss of a batch; must depend on the parameters of ``model``.
        title: Name of the run in the progress bar and the log lines.

    Returns:
        The last loss and the time it took.
    """
    if recipe.compiled:
        loss_of = torch.compile(loss_of)
    movers = optimizers(model, recipe)
    peaks = [[group["lr"] for group in mover.param_groups] for mover in movers]
    started = time.perf_counter()
    losses_S = torch.zeros(recipe.num_steps)
    with _bar() as bar:
        task = bar.add_task(title, total=recipe.num_steps)
        for step in range(recipe.num_steps):
            factor = rate_factor(step, recipe)
            for mover, peak in zip(movers, peaks, strict=True):
                for group, rate in zip(mover.param_groups, peak, strict=True):
                    group["lr"] = rate * factor
            loss = loss_of(next(batches))
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for mover in movers:
                mover.step()
                mover.zero_grad(set_to_none=True)
            losses_S[step] = loss.detach()
            bar.advance(task)
            if (step + 1) % 20 == 0 or step + 1 == recipe.num_steps:
                seconds = time.perf_counter() - started
                logger.info(
                    "%s: step %d of %d, loss %.3f, %.0f tokens a second, %.0f s",
                    title,
                    step + 1,
                    recipe.num_steps,
                    float(losses_S[max(0, step - 19) : step + 1].mean()),
                    (step + 1) * recipe.batch_size * recipe.length / seconds,
                    seconds,
                )
    tail_S = losses_S[-max(1, recipe.num_steps // 10) :]
    return Progressed(loss=float(tail_S.mean()), seconds=time.perf_counter() - started)


def _bar() -> Progress:
    """Return a progress bar that draws only on a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
