"""The interface between the runners and the engines that execute the passes of a model.

A runner decides which passes run and what their results mean. An *execution* is one model with its
KV entries on one engine. Scheduling, sampling, verification and trees do not depend on the engine.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch, StoredNoise
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.sampling.choose import choose
from ssd.engine.sampling.soft_filters import lowered

ONE_SHAPE = "all verifies have one shape"
"""See ``TargetExecution.use_fewer_shapes``."""


class Execution(Protocol):
    """What every execution has. Step thread only.

    Tensors that a pass returns are valid until the next pass.
    """

    attention_name: str
    """Name of the attention, for logs and ``GetModelInfo``."""
    num_blocks: int
    """Number of KV blocks, block 0 included."""

    def free_weights(self) -> None:
        """Free the memory of weights that the passes no longer read, after the warm-up.

        An engine whose passes read the weights where they are has none.
        """
        return

    def prefill(self, batch: PagedBatch) -> Tensor:
        """Store one chunk of one prompt; returns whether each column is finite, bool [P] or less.

        Padding columns may be missing from the result, and are not read.
        """


class TargetExecution(Execution, Protocol):
    """The passes of a target. An execution inherits what its engine has no other answer to."""

    packs_rows: bool = False
    """Whether a verify runs only the rows of each sequence, so that shorter proposals take less
    time. Otherwise each sequence of a pass has K+1 rows."""
    joins_prompts: bool = False
    """Whether a verify can store ``PagedBatch.prompts``, with the bits of ``prefill``."""
    finite_prompts: Sequence[Tensor] = ()
    """Whether each column is finite, bool [P], for each prompt in the newest verify."""
    num_padding: int = 0
    """Rows of padding in the newest verify that keep the number of rows of the verify before."""
    sequence_counts: Sequence[int]
    """Numbers of sequences that are shapes of their own, ascending."""

    @property
    def most_rows(self) -> int:
        """Largest number of rows of a pass; 0 if the engine decides. More take further passes."""
        return 0

    @property
    def shapes(self) -> str:
        """What the shapes of verifies have in common; empty if the settings alone decide it."""
        return ""

    def use_fewer_shapes(self) -> str | None:
        """Run verifies in fewer shapes from now on.

        Returns:
            What the shapes have in common; None if all verifies have one shape already: the largest
            number of sequences with K+1 rows each.
        """
        if len(self.sequence_counts) == 1:
            return None
        self.sequence_counts = self.sequence_counts[-1:]
        return ONE_SHAPE

    def prepare(self, batch: PagedBatch) -> Any:
        """Compute what ``verify`` needs besides the model."""

    def verify(self, prepared: Any) -> Tensor:
        """Store the columns of a batch; returns fp32 logits [B, P, V], undefined at padding.

        B is the number of sequences and then of prompts in the batch. A prompt has the logits
        of its last column, in column 0.

        Of several ranks, V are the token ids of the rank.
        """

    def verify_seconds(self) -> float | None:
        """Return the time of the newest verify on its device; waits for its end.

        None if ``verify`` itself waits, so that its duration is that time.
        """
        return None


class TreePasses(Protocol):
    """The passes of a draft's tree. Trunks are in pages, see ``kv_cache/storage.py``.

    Step thread only. Tensors that a pass returns are valid until the next pass.
    """

    whole_tables: Collection[tuple[int, int]] = ()
    """Numbers of branches and columns of the tables that ``run_columns`` builds in one pass."""

    def end_session(self, slot: int) -> None:  # noqa: ARG002 - for engines with copies
        """Drop copies of the entries of a session that ends; its slot is free."""
        return

    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """Run the newest token and the proposal of each session, and fill the proposal segments.

        Returns:
            fp32 logits [B, P, V].
        """

    def run_branches(self, batch: BranchBatch) -> Tensor:
        """Run one step of all branches; returns fp32 logits [B, N, V].

        Steps run in order from 0. The entries, accepted lengths and trunks apply to all steps with
        the same tensor ``slots_B``. Other passes may run between them. The logits are valid until
        a later table of one of these sessions begins.
        """

    def run_columns(self, batch: BranchBatch, noise: StoredNoise) -> tuple[Tensor, Tensor]:
        """Run all steps of a table, from the tokens of step 0.

        This is one pass for one session and a size of ``whole_tables``, else several passes.

        The table has as many columns as ``noise``, K or fewer. Each step but the last one chooses
        the best of logits / T + noise for each branch, after the filters of ``noise``. The next
        step runs the chosen tokens.

        Returns:
            The chosen tokens, int32 [K, 1, N], valid until the next pass, with ``NO_TOKEN`` in the
            first step of a branch that is not finite; and the logits of each step, fp32
            [P, 1, N, V], valid like those of ``run_branches``.
        """
        tokens_KBN: list[Tensor] = []
        logits: list[Tensor] = []
        for step, rows_R in enumerate(noise.rows_KR):
            logits.append(self.run_branches(replace(batch, step=step)))
            noise_RV = noise.noise_YV[torch.from_numpy(rows_R)]
            logits_RV = logits[-1].flatten(0, 1)
            if noise.filters is not None:
                ranks_R = torch.from_numpy(noise.filters.ranks_R)
                logits_RV = lowered(logits_RV, ranks_R, torch.from_numpy(noise.filters.min_logit_R))
            chosen_R = choose(logits_RV, noise.temperature_R, noise_RV)
            tokens_KBN.append(chosen_R.view(batch.tokens_BN.shape))
            batch = replace(batch, tokens_BN=tokens_KBN[-1].clamp_min(0))
        logits.append(self.run_branches(replace(batch, step=len(logits))))
        return torch.stack(tokens_KBN).int(), torch.stack(logits)

    def append_proposal(self, batch: AppendBatch) -> object:
        """Append proposal columns to the trunks. The result has no use."""

    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> object:
        """Copy the own entries of one branch of each session into its proposal segment."""


class DraftExecution(Execution, TreePasses, Protocol):
    """The passes of a draft."""

    chunk_sizes: Sequence[int] = (1,)
    """Numbers of columns of a chunk of a prompt, one for each shape of ``prefill``."""


class TreeRunner(TreePasses, Protocol):
    """The methods of ``DraftRunner`` that a tree uses."""

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store the KV of chunks of one prompt; returns the first column that is not finite."""


Load = Callable[[Path, ModelConfig, EngineConfig, Callable[[float], None], Group], Any]
ENGINES = {
    "openvino": "ssd.engine.openvino_engine.load",
    "static": "ssd.engine.static_execution",
    "torch": "ssd.engine.torch_execution",
}


def load_execution(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group = ALONE,
) -> Any:
    """Read a model folder into the engine of the settings.

    Returns:
        A ``DraftExecution`` if the engine has branches, else a ``TargetExecution``. With
        several ranks, the execution of the rank's part, which returns logits of the rank's own
        token ids only.

    Raises:
        SetupError: the weights or the memory do not allow it.
    """
    load = cast("Load", import_module(ENGINES[engine.engine]).load)
    return load(folder, model, engine, on_progress, group)
