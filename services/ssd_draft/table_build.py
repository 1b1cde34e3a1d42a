"""The tables of some sessions while they are built. Changed by ``Tree`` only."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import BranchBatch
from ssd.speculation.fan_out import SelectedOutcomes

Ints = NDArray[np.int64]


class ChosenColumn:
    """One chosen column of a batch of tables, on its way to the host."""

    def __init__(self, rows_B: Ints, slots_B: Ints, step: int, chosen_BN: torch.Tensor) -> None:
        self.rows_B = rows_B
        self.slots_B = slots_B
        self.step = step
        self._copied: torch.cuda.Event | None = None
        if chosen_BN.is_cuda:
            pinned_BN = torch.empty_like(chosen_BN, device="cpu", pin_memory=True)
            self._chosen_BN = pinned_BN.copy_(chosen_BN, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._chosen_BN = chosen_BN.cpu()

    def wait(self) -> Ints:
        """Return the tokens, [B, N]."""
        if self._copied is not None:
            self._copied.synchronize()
        chosen_BN: Ints = self._chosen_BN.numpy()
        return chosen_BN


Steps = list[tuple[Ints, torch.Tensor]]
"""For each pass of a batch of tables, the rows of the sessions and the logits of the S steps of the
pass, [S, B, N, V]. A pass runs one step or all steps."""


@dataclass(slots=True)
class TableBuild:
    """One batch of tables while it is built. Changed by ``Tree`` only."""

    outcomes: SelectedOutcomes
    """The outcomes of all sessions at the start of the batch, in the rows of ``tables_BNK``."""
    tables_BNK: NDArray[np.int32]
    """The tokens after each outcome; -1 in the columns that are not chosen yet."""
    rows_B: Ints
    """The rows of the current sessions in ``tables_BNK``."""
    batch: BranchBatch
    """The next step, until all have run. Its tokens are on the device of the model."""
    slots_R: Ints
    """The slot of each branch, session by session."""
    positions_R: Ints
    """The position of the token that step 0 chooses for each branch."""
    length: int
    """Columns that the tables will have, at most K."""
    steps: Steps = field(default_factory=list)
    """The steps that have run. Step s chooses column s of the tables; the last step only ranks
    candidates."""
    unread: "deque[ChosenColumn]" = field(default_factory=deque)
    """Columns that are chosen and not yet in the tables."""
    depth: int = 0
    """Columns that are in the tables."""

    @property
    def branches(self) -> int:
        """N of these tables."""
        return self.batch.tokens_BN.shape[1]

    @property
    def num_steps(self) -> int:
        """Steps that have run."""
        return sum(len(logits_SBNV) for _, logits_SBNV in self.steps)

    @property
    def is_complete(self) -> bool:
        """Whether all steps have run, one more than the tables have columns."""
        return self.num_steps > self.length
