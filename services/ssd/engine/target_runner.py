"""The target's forward passes: ``verify``, of which plain decoding is the case with one column.

*Same bits*: the warm-up proves that a row has the same bits in every pass; see ``same_bits``. Where
it has not, verifies run in fewer shapes, and the proof starts again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import TargetExecution
from ssd.engine.runner import ModelRunner, Progress, first_bad
from ssd.engine.same_bits import find_difference, find_joined_difference, proved
from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")


class TargetRunner(ModelRunner):
    """Runs verifies over a paged KV storage. Step thread only."""

    execution: TargetExecution

    def __init__(
        self, execution: TargetExecution, model: ModelConfig, engine: EngineConfig
    ) -> None:
        super().__init__(execution, model, engine)
        self._joins_chunks = execution.packs_rows

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts that a verify may have, ascending; the last one fits every proposal."""
        if self.execution.packs_rows:
            return self.engine.verify_columns
        return (self.engine.num_columns,)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows of a sequence whose times differ, ascending; their bits are the same."""
        if self.execution.packs_rows:
            return tuple(range(1, self.engine.num_columns + 1))
        return self.verify_columns

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify P columns, or one column, of up to ``max_num_seqs`` sequences.

        Returns:
            fp32 logits [B, P, V], see ``TargetExecution.verify``. Row i of a sequence selects the
            token after column i. Rows of padding columns are undefined. A row that is not finite
            affects no other row.
        """
        return self.verify(self.prepare(batch)).clone()

    @torch.inference_mode()
    def prepare(self, batch: PagedBatch) -> Any:
        """Compute entries and masks: the part of ``forward`` before the model."""
        return self.execution.prepare(batch)

    @torch.inference_mode()
    def verify(self, prepared: Any) -> Tensor:
        """Run a prepared batch; see ``forward``."""
        return self._without_padding_ids(self.execution.verify(prepared))

    @property
    def num_padding(self) -> int:
        """See ``TargetExecution.num_padding``."""
        return self.execution.num_padding

    def verify_seconds(self) -> float | None:
        """See ``TargetExecution.verify_seconds``."""
        return self.execution.verify_seconds()

    @property
    def joins_prompts(self) -> bool:
        """See ``TargetExecution.joins_prompts``."""
        return self.execution.joins_prompts

    @property
    def joined_rows(self) -> int:
        """Most rows of a verify that stores prompts too; 0 if it cannot."""
        return self.execution.most_rows if self.joins_prompts else 0

    def bad_columns(self, prompts: PagedBatch) -> list[int | None]:
        """Return the result of ``prefill`` for each prompt that the newest verify has stored."""
        assert len(self.execution.finite_prompts) == len(prompts.tokens_BP)
        return [first_bad(is_finite_P) for is_finite_P in self.execution.finite_prompts]

    @torch.inference_mode()
    def warm_up(self, on_progress: Progress) -> None:
        """Prove that the bits of rows do not depend on the shape of their pass.

        The passes of the proof are the warm-up. Where no shape needs one, a kept result suffices.
        """

        def find() -> str | None:
            counts = self.execution.sequence_counts
            return find_difference(self, counts, lambda share: on_progress("warm-up", share))

        def prove(shapes: str, find: Callable[[], str | None] = find) -> str | None:
            if self.folder is None or not self.execution.packs_rows:
                # These engines prepare their shapes with the passes of the proof.
                return find()
            return proved(self.folder, self.engine, self.num_blocks, shapes, find)

        self._prove_shapes(prove)
        if self.joins_prompts:
            joined = f"{self.execution.shapes}, with prompts"
            reason = prove(
                joined, partial(find_joined_difference, self, partial(on_progress, "warm-up"))
            )
            if reason is not None:
                self.execution.joins_prompts = False
                _log.warning("prompts_alone", reason=reason, consequence="slower prompts")
        self.execution.free_weights()

    def _prove_shapes(self, prove: Callable[[str], str | None]) -> None:
        """Let verifies have fewer shapes until all rows have the same bits, or log that none have.

        ``prove`` returns a difference between the passes of these shapes.
        """
        difference = prove(self.execution.shapes)
        while difference is not None:
            shapes = self.execution.use_fewer_shapes()
            if shapes is None:
                _log.error("different_bits", reason=difference, consequence="texts can differ")
                return
            cost = "slower forward passes"
            _log.warning("fewer_shapes", reason=difference, shapes=shapes, consequence=cost)
            self._joins_chunks = self.execution.packs_rows
            difference = prove(shapes)
