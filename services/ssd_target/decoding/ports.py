"""What the decode loop uses of other packages."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import PagedBatch, StoredNoise
from ssd.engine.config import EngineConfig
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.ports import Clock
from ssd.step_thread import Watchdog
from ssd.types import PositionLogprobs, TokenId
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]
Proposal = tuple[TokenId, ...]


class Runner(Protocol):
    """The part of ``TargetRunner`` that rounds use. Called from the step thread."""

    @property
    def engine(self) -> EngineConfig:
        """Shapes of its batches."""
        ...

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts that a verify may have, ascending; the last one fits every proposal."""
        ...

    def prepare(self, batch: PagedBatch) -> Any:
        """Build the inputs of ``verify`` for a batch."""
        ...

    def verify(self, prepared: Any) -> torch.Tensor:
        """Store the rows of a batch; returns logits_BPV float32."""
        ...

    def verify_seconds(self) -> float | None:
        """Return the time of the newest verify on its device; None if ``verify`` waits for it."""
        ...

    def prefill(self, batch: PagedBatch) -> int | None:
        """Store chunks of one prompt; returns the first column that is not finite, or None."""
        ...


class Sampler(Protocol):
    """Selects the target's tokens; see ``sampler``. Called from the step thread."""

    def admit(self, sequence: Sequence) -> None:
        """Assign the noise of a sequence's seed to its slot.

        A preempted sequence is admitted again, with the tokens that it has emitted.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Release the noise of a sequence."""
        ...

    def fill(self, sequences: Rows[Sequence], num_proposed: Rows[int]) -> None:
        """Prepare the noise of the positions that the next round selects."""
        ...

    def choose(
        self, sequences: Rows[Sequence], proposals: Rows[Proposal], logits_BPV: torch.Tensor
    ) -> list[list[TokenId]]:
        """Return the target's tokens of each sequence, at least as many as verification reads."""
        ...

    def logprobs(self, sequence: Sequence) -> tuple[PositionLogprobs, ...]:
        """Return the log-probabilities at the rows of the newest ``choose``, if asked for.

        There can be more than tokens of the round.
        """
        ...

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> StoredNoise | None:
        """Return the noise of prepared positions; None if it is computed with each choice."""
        ...

    def choose_at(self, slots_B: Ints, positions_B: Ints, logits_BV: torch.Tensor) -> Ints:
        """Return one token of each slot, at a position that is prepared."""
        ...


class Flusher(Protocol):
    """The part of ``serving.streams.Wakeups`` that rounds use. Called from the step thread."""

    def flush(self) -> None:
        """Wake the readers of all sinks that have received something since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """The objects that the decode loop shares with the rest of the process."""

    inbox: Inbox
    drafts: DraftPool
    wakeups: Flusher
    round_log: RoundLog
    clock: Clock
    watchdog: Watchdog
