"""What the ranks do in a step: rank 0 sends each pass, the others run their part of it.

``SplitTarget`` is the execution of rank 0. ``follow`` is the loop of the others. The logits of a
pass are those of a rank's own token ids; ``choose`` compares the best ids of all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.execution import TargetExecution
from ssd.engine.parallel.group import RankGroup
from ssd.engine.parallel.step import Operation, StepMessage
from ssd.engine.sampling.keyed import NoiseKeys, best_of_keys, compiled_on, to_device
from ssd.types import NO_TOKEN

KeysOf = Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]
"""Returns ``keyed.packed`` of slots and positions, [4, R]."""


class SplitTarget(TargetExecution):
    """An execution of which every rank runs a part. Step thread of rank 0.

    Raises:
        RankError: from each pass; a rank has ended or does not answer.
    """

    def __init__(
        self,
        part: TargetExecution,
        group: RankGroup,
        engine: EngineConfig,
        ids_of_ranks: Sequence[range],
    ) -> None:
        self.attention_name = part.attention_name
        self.num_blocks = part.num_blocks
        self.sequence_counts: Sequence[int] = part.sequence_counts
        self._part = part
        self._group = group
        self._num_ids = [len(ids) for ids in ids_of_ranks]
        self._device, self._num_columns = engine.device, engine.num_columns
        self._best = compiled_on(engine.device, best_of_keys)
        self._keys_of: KeysOf | None = None
        self._sent_4R: Tensor | None = None
        """Keys that the ranks have received with the newest verify, until it is chosen."""
        self._message = StepMessage(engine)

    def send_keys_of(self, keys_of: KeysOf) -> None:
        """Send these keys with each verify of slots; ``choose`` must follow with the same keys."""
        self._keys_of = keys_of

    def use_fewer_shapes(self) -> str | None:
        """See ``TargetExecution.use_fewer_shapes``."""
        self._message.write_fewer_shapes(self._deadline_ms)
        self._group.send_step(self._message.numbers_W)
        shapes = self._part.use_fewer_shapes()
        self.sequence_counts = self._part.sequence_counts
        return shapes

    def free_weights(self) -> None:
        """See ``Execution.free_weights``."""
        self._part.free_weights()

    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        self._send_pass(Operation.PREFILL, batch)
        return self._part.prefill(batch)

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        """Return the batch: all ranks prepare it at the same time, in ``verify``."""
        return batch

    def verify(self, prepared: PagedBatch) -> Tensor:
        """See ``TargetExecution.verify``; the logits are those of rank 0's token ids."""
        if prepared.slots_B is None or self._keys_of is None:
            return self._verify(prepared)
        columns = prepared.tokens_BP.shape[1]
        next_B1 = prepared.first_positions_B[:, None] + 1
        slots_R = prepared.slots_B.repeat_interleave(columns)
        position_R = (next_B1 + torch.arange(columns)).flatten()
        return self._verify(prepared, self._keys_of(slots_R.numpy(), position_R.numpy()))

    def _verify(self, batch: PagedBatch, keys_4R: Tensor | None = None) -> Tensor:
        self._sent_4R = keys_4R
        if keys_4R is None:
            self._send_pass(Operation.VERIFY, batch)
        else:
            self._send_pass(Operation.VERIFY_AND_CHOOSE, batch, keys_4R)
        return self._part.verify(self._part.prepare(batch))

    def verify_seconds(self) -> float | None:
        """See ``TargetExecution.verify_seconds``."""
        return self._part.verify_seconds()

    def choose(self, logits_RV: Tensor, keys_4R: Tensor, *, is_warm: bool) -> Tensor:
        """Return the token of each row of the newest verify; see ``keyed.choose_of_keys``.

        The logits are all rows that ``verify`` returned, and the keys ``keyed.packed``.
        """
        assert self._sent_4R is not None, "the ranks have no keys"
        assert torch.equal(self._sent_4R, keys_4R), "the ranks have other keys"
        self._sent_4R = None
        keys = NoiseKeys.unpacked(to_device(keys_4R, self._device))
        best = self._best(logits_RV, keys, is_warm=is_warm)
        return choose_of_ranks(*best, self._group)

    def gather(self, logits_RV: Tensor, rows_X: Tensor) -> Tensor:
        """Return the logits of all token ids at some rows of the newest verify, fp32 [X, V].

        ``logits_RV`` are all rows that ``verify`` returned; ``rows_X`` is int64 on the CPU.
        """
        most_ids = max(self._num_ids)
        self._message.write_gather(rows_X, most_ids, self._deadline_ms)
        self._group.send_step(self._message.numbers_W)
        parts_NXV = self._group.gather(_padded(logits_RV, rows_X, most_ids, self._device))
        parts = zip(parts_NXV, self._num_ids, strict=True)
        return torch.cat([part_XV[:, :count] for part_XV, count in parts], dim=1)

    # As in rounds: torch compiles once more for another mode.
    @torch.inference_mode()
    def warm_up_choice(self) -> None:
        """Choose with and without noise on all ranks, so that no request waits for a compiler."""
        zero_1, columns = torch.zeros(1, dtype=torch.int64), self._num_columns
        padding = PagedBatch(zero_1.expand(1, columns), zero_1, zero_1, zero_1[:, None])
        keys_4R = torch.zeros((4, columns), dtype=torch.int64)
        for is_warm in (False, True):
            # The other ranks read from the temperatures whether there is noise.
            keys_4R[3] = torch.tensor(float(is_warm)).view(torch.int32)
            logits_BPV = self._verify(padding, keys_4R)
            self.choose(logits_BPV.flatten(0, 1), keys_4R, is_warm=is_warm)

    @property
    def _deadline_ms(self) -> int:
        return round(self._group.deadline_seconds * 1000)

    def _send_pass(self, operation: Operation, batch: PagedBatch, *keys_4R: Tensor) -> None:
        self._message.write_pass(operation, batch, self._deadline_ms, *keys_4R)
        self._group.send_step(self._message.numbers_W)


@torch.inference_mode()
def follow(
    part: TargetExecution,
    group: RankGroup,
    engine: EngineConfig,
    ids: range,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run this rank's part of each step that rank 0 sends, until another rank ends.

    The settings are the same on all ranks but for the device; ``ids`` are the token ids of this
    rank. ``waiting`` is entered while the rank waits for a step.

    Raises:
        RankError: a rank has ended or does not answer.
    """
    message, best = StepMessage(engine), compiled_on(engine.device, best_of_keys)
    num_valid = len(ids)
    if engine.num_token_ids is not None:
        num_valid = max(0, min(ids.stop, engine.num_token_ids) - ids.start)
    logits_RV = torch.empty(0)
    while True:
        with waiting():
            group.receive_step(message.numbers_W)
        header = message.read_header()
        group.set_deadline(header.deadline_ms / 1000)
        if header.operation is Operation.USE_FEWER_SHAPES:
            part.use_fewer_shapes()
        elif header.operation is Operation.PREFILL:
            part.prefill(message.read_pass())
        elif header.operation in (Operation.VERIFY, Operation.VERIFY_AND_CHOOSE):
            logits_RV = part.verify(part.prepare(message.read_pass())).flatten(0, 1)
            logits_RV[:, num_valid:] = -torch.inf
        elif header.operation is Operation.GATHER:
            rows_X = message.read_gather()
            group.gather(_padded(logits_RV, rows_X, header.num_blocks, engine.device))
        if header.operation is Operation.VERIFY_AND_CHOOSE:
            keys_4R = message.read_choice()
            keys = NoiseKeys.unpacked(to_device(keys_4R, engine.device))
            # The bits of a temperature of 0 are 0.
            is_warm = bool(keys_4R[3].any())
            scores_R, ids_R = best(logits_RV, keys, is_warm=is_warm, first_id=ids.start)
            choose_of_ranks(scores_R, ids_R, group)
        if header.operation is not Operation.VERIFY and engine.device.startswith("cuda"):
            # The step has ended when the device has; rank 0 reads its result at the same time.
            torch.cuda.synchronize(engine.device)


def _padded(logits_RV: Tensor, rows_X: Tensor, num_ids: int, device: str) -> Tensor:
    """Return some rows with as many columns as those of all ranks."""
    rows_XV = logits_RV[to_device(rows_X, device)]
    return pad(rows_XV, (0, num_ids - rows_XV.shape[1]), value=-torch.inf)


def choose_of_ranks(scores_R: Tensor, ids_R: Tensor, group: RankGroup) -> Tensor:
    """Return the token of each row.

    Args:
        scores_R: fp32, the best score of this rank's token ids.
        ids_R: int64, the id of this score.
        group: all ranks; each calls this function.

    Returns:
        int64 [R], the same on all ranks: the id of the best score, the lowest one of equal scores;
        ``NO_TOKEN`` where the best score is not finite.
    """
    # Both are exact in float64.
    scores_NR, ids_NR = group.gather(torch.stack((scores_R.double(), ids_R.double()))).unbind(1)
    # The maximum is NaN if a score is; of equal scores, the first rank has the lowest ids.
    best_R, ranks_R = scores_NR.max(dim=0)
    chosen_R = ids_NR.gather(0, ranks_R[None]).squeeze(0).long()
    return torch.where(best_R.isfinite(), chosen_R, NO_TOKEN)
