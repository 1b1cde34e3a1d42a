"""What the decode loop uses of other packages."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import PagedBatch, StoredNoise
from ssd.engine.config import EngineConfig
from ssd.pool.round_log import RoundLog
from ssd.pool.rounds import Lookup, NewSequence, VerifiedRound
from ssd.ports import Clock
from ssd.speculation.controller import Choice, Report
from ssd.speculation.round_samples import RoundSample
from ssd.step_thread import Watchdog
from ssd.types import PositionLogprobs, SequenceId, TokenId
from ssd_target.decoding.batch_builder import Proposals
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]


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

    def fill(self, sequences: Rows[Sequence], num_proposed_B: Ints) -> None:
        """Prepare the noise of the positions that the next round selects."""
        ...

    def choose(
        self, sequences: Rows[Sequence], proposals: Proposals, logits_BPV: torch.Tensor
    ) -> Ints:
        """Return the target's token at each row that verification reads, ``chosen_BP``."""
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


class Drafts(Protocol):
    """The part of ``ssd.pool.DraftPool`` that rounds use. Called from the step thread.

    No method raises: a draft that fails costs speed, never a token.
    """

    @property
    def num_sessions(self) -> int:
        """Number of sessions, open or opening."""
        ...

    @property
    def looked_up_at(self) -> float:
        """When the newest round had its lookups, before it sent its commits."""
        ...

    def begin(self, sequence: NewSequence) -> None:
        """Add a sequence."""
        ...

    def open_sessions(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Open a session for each of the sequences that has none, while drafts have room."""
        ...

    def round(
        self, results: Rows[VerifiedRound], decided_at: float, before_wait: Callable[[], None]
    ) -> list[Lookup]:
        """Look each outcome up in its table, and send the outcomes to the drafts.

        ``before_wait`` is called once if it waits.
        """
        ...

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Close the sessions of sequences that continue without a draft."""
        ...

    def end(self, sequence_id: SequenceId) -> None:
        """Remove a sequence that has ended."""
        ...


class RoundController(Protocol):
    """The part of ``ssd.speculation.controller.Controller`` that rounds use."""

    def choose(self, num_sequences: int) -> Choice:
        """Return the choice for the next round."""
        ...

    def note(self, sample: RoundSample) -> None:
        """Note the measurements of a round."""
        ...

    def report(self) -> Report:
        """Return the choice and its reason, for status and metrics."""
        ...


class Drafter(Protocol):
    """A draft on the target's own device, for mode SYNCHRONOUS. Called from the step thread."""

    def admit(self, sequence: Sequence) -> None:
        """Prepare for a sequence that begins, or continues after a preemption."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Free the resources of a sequence that has ended, if it has any."""
        ...

    def store(self, sequences: Iterable[Sequence]) -> None:
        """Store one more chunk of the first of these texts that is not stored yet."""
        ...

    def propose(self, sequences: Rows[Sequence]) -> dict[SequenceId, tuple[TokenId, ...]]:
        """Return the next proposals; a sequence may have none."""
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
    drafts: Drafts
    wakeups: Flusher
    round_log: RoundLog
    clock: Clock
    watchdog: Watchdog
