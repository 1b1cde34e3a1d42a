"""What the decode loop uses of other packages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.ports import Clock
from ssd.runtime.step_thread import Watchdog
from ssd_target.decoding.inbox import Inbox


class Runner(Protocol):
    """The part of ``TargetRunner`` that rounds use. Called from the step thread."""

    @property
    def engine(self) -> EngineConfig:
        """Shapes of its batches."""

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts that a verify may have, ascending; the last one fits every proposal."""

    def prepare(self, batch: PagedBatch) -> Any:
        """Build the inputs of ``verify`` for a batch."""

    def verify(self, prepared: Any) -> torch.Tensor:
        """Store a batch; returns logits_BPV float32, see ``TargetExecution.verify``."""

    @property
    def num_padding(self) -> int:
        """See ``TargetExecution.num_padding``."""

    def verify_seconds(self) -> float | None:
        """Return the time of the newest verify on its device; None if ``verify`` waits for it."""

    def prefill(self, batch: PagedBatch, before_pass: Callable[[], None]) -> int | None:
        """Store chunks of one prompt; returns the first column that is not finite, or None.

        ``before_pass`` is called before each pass, of which a long prompt needs several.
        """

    def bad_columns(self, prompts: PagedBatch) -> list[int | None]:
        """Return what ``prefill`` returns, for each prompt that the newest verify has stored."""


class Flusher(Protocol):
    """The part of ``serving.streams.Wakeups`` that rounds use. Called from the step thread."""

    def flush(self) -> None:
        """Wake the readers of all sinks that have received something since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """The objects that the decode loop shares with the rest of the process."""

    inbox: Inbox
    drafts: DraftPool
    wakeups: Flusher
    round_log: RoundLog
    clock: Clock
    watchdog: Watchdog
