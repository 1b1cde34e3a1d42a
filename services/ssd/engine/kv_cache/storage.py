"""The tensors of the KV cache: slots of keys and values, paged first, a draft's segments behind.

Slots 0..num_blocks*C-1 are the pages. A draft's engine has, behind them and for every session slot
b, its proposal segment (P slots) and its own segment (P x N slots, step-major, so that the columns
of steps 0..s of all branches are one run).

Z stands for all slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Where things are in a storage; pure arithmetic."""

    num_blocks: int
    block_size: int
    num_columns: int
    branches: int
    num_sessions: int

    @property
    def num_slots(self) -> int:
        """Slots of pages and segments together."""
        per_session = self.num_columns * (1 + self.branches) if self.branches else 0
        return self.num_blocks * self.block_size + self.num_sessions * per_session

    def paged(self, block_tables_BJ: Tensor) -> Tensor:
        """Return the slots of all positions that block tables cover, int64 [B, J*C]."""
        offset_C = torch.arange(self.block_size)
        slots_BJC = block_tables_BJ[:, :, None] * self.block_size + offset_C
        return slots_BJC.flatten(1)

    def proposal(self, slots_B: Tensor) -> Tensor:
        """Return the slots of proposal segments, int64 [B, P]."""
        first = self.num_blocks * self.block_size
        return first + slots_B[:, None] * self.num_columns + torch.arange(self.num_columns)

    def own(self, slots_B: Tensor) -> Tensor:
        """Return the slots of own segments, int64 [B, P, N]."""
        first = self.num_blocks * self.block_size + self.num_sessions * self.num_columns
        columns = torch.arange(self.num_columns * self.branches)
        span = self.num_columns * self.branches
        slots_BX = first + slots_B[:, None] * span + columns
        return slots_BX.view(-1, self.num_columns, self.branches)


class KVStorage:
    """Keys and values of all slots, [L, 2, Z, G*E], zeroed so that padding is never NaN."""

    def __init__(self, model: ModelConfig, slots: SlotMap, dtype: torch.dtype, device: str) -> None:
        self.slots = slots
        self.shape_GE = (model.num_kv_heads, model.head_size)
        width = model.num_kv_heads * model.head_size
        self.entries_L2ZW = torch.zeros(
            (model.num_layers, 2, slots.num_slots, width), dtype=dtype, device=device
        )
        # Views by layer, made once: a slice costs as much as a small kernel.
        self.keys = [layer[0].unflatten(1, self.shape_GE) for layer in self.entries_L2ZW]
        self.values = [layer[1].unflatten(1, self.shape_GE) for layer in self.entries_L2ZW]
        self.flat = [layer.flatten(0, 1) for layer in self.entries_L2ZW]

    def copy(self, from_X: Tensor, to_X: Tensor) -> None:
        """Copy slots, all layers at once; sources are read before anything is written."""
        self.entries_L2ZW[:, :, to_X] = self.entries_L2ZW[:, :, from_X]


def bytes_per_slot(model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one slot over all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * dtype.itemsize


def segment_slots(engine: EngineConfig) -> int:
    """Return the slots behind the pages that a draft's engine needs, 0 for a target's."""
    if engine.branches == 0:
        return 0
    return engine.max_num_seqs * engine.num_columns * (1 + engine.branches)
