"""The tensors of the KV cache: one entry holds the keys and values of one position.

An *entry* is an address in the cache. A *slot* is the index of a session in arrays of all sessions.

Entries 0..num_blocks*C-1 are the pages. After them, a draft has for every session slot a proposal
segment (P entries) and an own segment (P x N entries, step-major, so that the columns of steps 0..s
of all branches are contiguous).

Z stands for all entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.engine.batch import AppendBatch
from ssd.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class EntryMap:
    """Addresses in a storage; pure arithmetic on the device of the arguments."""

    num_blocks: int
    block_size: int
    num_columns: int
    branches: int
    num_sessions: int

    @property
    def num_entries(self) -> int:
        """Number of entries of pages and segments."""
        per_session = self.num_columns * (1 + self.branches) if self.branches else 0
        return self.num_blocks * self.block_size + self.num_sessions * per_session

    def paged(self, block_tables_BJ: Tensor) -> Tensor:
        """Return the entries of all positions that block tables cover, int64 [B, J*C]."""
        offset_C = torch.arange(self.block_size)
        entries_BJC = block_tables_BJ[:, :, None] * self.block_size + offset_C
        return entries_BJC.flatten(1)

    def at(self, block_tables_BJ: Tensor, positions_BP: Tensor) -> Tensor:
        """Return the entries of some positions that block tables cover, int64 [B, P]."""
        size = self.block_size
        return block_tables_BJ.gather(1, positions_BP // size) * size + positions_BP % size

    def trunk(self, block_tables_BJ: Tensor, trunk_lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of the trunks, in whole blocks, and which entries are in use."""
        num_blocks = -(-int(trunk_lengths_B.max()) // self.block_size)
        tables_BJ = fit_block_tables(block_tables_BJ, num_blocks)
        in_use_BS = torch.arange(num_blocks * self.block_size) < trunk_lengths_B[:, None]
        return self.paged(tables_BJ), in_use_BS

    def proposal(self, slots_B: Tensor) -> Tensor:
        """Return the entries of proposal segments, int64 [B, P]."""
        first = self.num_blocks * self.block_size
        column_P = torch.arange(self.num_columns, device=slots_B.device)
        return first + slots_B[:, None] * self.num_columns + column_P

    def first_proposal(self, slot: int) -> int:
        """Return the first entry of a proposal segment."""
        return self.num_blocks * self.block_size + slot * self.num_columns

    def own(self, slots_B: Tensor, branches: int | None = None) -> Tensor:
        """Return the entries of own segments of the first branches, int64 [B, P, N]."""
        first = self.num_blocks * self.block_size + self.num_sessions * self.num_columns
        span = self.num_columns * self.branches
        column_X = torch.arange(span, device=slots_B.device)
        entries_BX = first + slots_B[:, None] * span + column_X
        return entries_BX.view(-1, self.num_columns, self.branches)[..., :branches]


class KVStorage:
    """Keys and values of all entries, [L, 2, Z, G*E]. All values are finite.

    Attention gathers entries that a query must not see: padding, blocks that another sequence has
    freed, rejected proposals. It adds -inf to their scores and multiplies their values by 0. Both
    give NaN if the entry contains NaN or infinity, so ``write`` stores 0 instead. The row that
    computed such a value keeps it in its hidden state, and its logits are not finite.

    *Decision*: entries are checked when they are written. *Because*: no reader needs a check then.
    It costs one small operation for keys and one for values: 0 to 2 % of a pass of the embedded
    pair (1 to 56 rows, bf16 and fp32). *Not chosen*: zeroing blocks when they are freed or
    allocated and writing padding elsewhere, which is free in a step but leaves rejected proposals
    visible to the rows of their own sequence. *Revisit when* a kernel writes the entries.
    """

    def __init__(
        self, model: ModelConfig, entries: EntryMap, dtype: torch.dtype, device: str
    ) -> None:
        self.entries = entries
        self.shape_GE = (model.num_kv_heads, model.head_size)
        width = model.num_kv_heads * model.head_size
        self.entries_L2ZW = torch.zeros(
            (model.num_layers, 2, entries.num_entries, width), dtype=dtype, device=device
        )
        # Views of each layer are made once, since a slice costs as much as a small kernel.
        self.keys = [layer[0].unflatten(1, self.shape_GE) for layer in self.entries_L2ZW]
        self.values = [layer[1].unflatten(1, self.shape_GE) for layer in self.entries_L2ZW]
        self.flat = [layer.flatten(0, 1) for layer in self.entries_L2ZW]
        self.entries_XZGE = self.entries_L2ZW.flatten(0, 1).unflatten(2, self.shape_GE)

    def write(self, layer: int, entries_R: Tensor, keys_RGE: Tensor, values_RGE: Tensor) -> None:
        """Store one layer's keys and values; values that are not finite are stored as 0."""
        self.keys[layer].index_copy_(0, entries_R, keys_RGE.nan_to_num(0.0, 0.0, 0.0))
        self.values[layer].index_copy_(0, entries_R, values_RGE.nan_to_num(0.0, 0.0, 0.0))

    def select(self, entries_BS: Tensor) -> Tensor:
        """Return entries, [X, B, G, S, E]; X are the keys and the values of each layer."""
        entries_XBGSE: Tensor = self.entries_XZGE[:, entries_BS].transpose(2, 3)
        return entries_XBGSE

    def put(self, entries_BS: Tensor, new_XBGSE: Tensor) -> None:
        """Store finite keys and values of all layers."""
        self.entries_XZGE[:, entries_BS] = new_XBGSE.transpose(2, 3)

    def copy(self, from_X: Tensor, to_X: Tensor) -> Tensor:
        """Copy entries of all layers; all sources are read before the first write."""
        copied = self.entries_L2ZW.index_select(2, from_X)
        return self.entries_L2ZW.index_copy_(2, to_X, copied)

    @torch.inference_mode()
    def append_proposal(self, batch: AppendBatch) -> Tensor:
        """Copy the first entries of proposal segments to the ends of their trunks."""
        slots_B, num_entries_B, trunk_lengths_B, block_tables_BJ = batch
        from_BP = self.entries.proposal(slots_B)
        column_P = torch.arange(self.entries.num_columns, device=slots_B.device)
        last = block_tables_BJ.shape[1] * self.entries.block_size - 1
        position_BP = (trunk_lengths_B[:, None] + column_P).clamp_(max=last)
        to_BP = self.entries.at(block_tables_BJ, position_BP)
        # Entries that are not appended are copied from entry 0 to itself.
        is_kept_BP = column_P < num_entries_B[:, None]
        from_BP, to_BP = from_BP.where(is_kept_BP, 0), to_BP.where(is_kept_BP, 0)
        return self.copy(from_BP.flatten(), to_BP.flatten())

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> Tensor:
        """Copy the own entries of one branch of each session into its proposal segment."""
        own_BPN = self.entries.own(slots_B)
        index_BP1 = branches_B[:, None, None].expand(-1, own_BPN.shape[1], 1)
        from_BP = own_BPN.gather(2, index_BP1).squeeze(2)
        return self.copy(from_BP.flatten(), self.entries.proposal(slots_B).flatten())


def fit_block_tables(block_tables_BJ: Tensor, num_blocks: int) -> Tensor:
    """Return block tables of ``num_blocks`` columns: cut, or filled with block 0."""
    missing = num_blocks - block_tables_BJ.shape[1]
    if missing <= 0:
        return block_tables_BJ[:, :num_blocks]
    return torch.nn.functional.pad(block_tables_BJ, (0, missing))
