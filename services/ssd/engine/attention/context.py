"""What one forward pass attends to: made once a pass, used by every layer.

Q: queries of a sequence; U = Q x heads of a group; S: slots of one context chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.engine.attention.backend import AttentionBackend
from ssd.engine.attention.merge import merge_partials
from ssd.engine.kv_cache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A run of context slots: where to gather, and what each query may see."""

    gather_X: Tensor
    """Slots of the keys, then of the values, flattened over sequences: [2 * B * S]."""
    mask_B1US: Tensor
    dead_B1U: Tensor | None
    """Rows that see nothing here; None when every row sees something."""


class AttentionPass:
    """One pass over the KV storage: writes the new entries of a layer, then attends."""

    def __init__(
        self,
        backend: AttentionBackend,
        storage: KVStorage,
        write_slots_R: Tensor,
        chunks: list[ContextChunk],
        num_sequences: int,
    ) -> None:
        self._backend = backend
        self._storage = storage
        self._write_slots_R = write_slots_R
        self._chunks = chunks
        self._num_sequences = num_sequences

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store a layer's new keys and values and return what the queries see, [R, H*E]."""
        storage = self._storage
        storage.keys[layer].index_copy_(0, self._write_slots_R, keys_RGE)
        storage.values[layer].index_copy_(0, self._write_slots_R, values_RGE)
        num_kv_heads, head_size = storage.shape_GE
        batch, rows = self._num_sequences, queries_RHE.shape[0]
        group = queries_RHE.shape[1] // num_kv_heads
        queries_BGUE = (
            queries_RHE.view(batch, -1, num_kv_heads, group, head_size)
            .transpose(1, 2)
            .reshape(batch, num_kv_heads, -1, head_size)
        )
        outs, masses = [], []
        for chunk in self._chunks:
            entries = storage.flat[layer].index_select(0, chunk.gather_X)
            keys_BSGE, values_BSGE = entries.view(2, batch, -1, num_kv_heads, head_size).unbind(0)
            out_BGUE, mass_BGU = self._backend.attend(
                queries_BGUE, keys_BSGE, values_BSGE, chunk.mask_B1US
            )
            outs.append(out_BGUE)
            if chunk.dead_B1U is not None:
                mass_BGU = mass_BGU.masked_fill(chunk.dead_B1U, -torch.inf)
            masses.append(mass_BGU)
        out_BGUE = outs[0] if len(outs) == 1 else merge_partials(outs, masses)
        out_BGQXE = out_BGUE.view(batch, num_kv_heads, -1, group, head_size)
        return out_BGQXE.transpose(1, 2).reshape(rows, -1)


def make_chunk(
    slots_BS: Tensor, visible_BQS: Tensor, group: int, num_slots: int, like: Tensor
) -> ContextChunk:
    """Build a chunk.

    Args:
        slots_BS: int64, the slots of this run.
        visible_BQS: bool, which of them a query sees.
        group: query heads of a key/value head.
        num_slots: slots of the storage; the values of slot z stand at row num_slots + z.
        like: gives the mask's dtype and device.

    Returns:
        The chunk. Rows that see nothing get an open mask and are marked dead, since a kernel's
        answer to an all-masked row is not specified.
    """
    flat_X = slots_BS.flatten()
    sees_BQ = visible_BQS.any(dim=2)
    open_BQS = visible_BQS | ~sees_BQ[:, :, None]
    mask_BQS = torch.zeros(open_BQS.shape, dtype=like.dtype).masked_fill_(~open_BQS, -torch.inf)
    dead = None
    if not bool(sees_BQ.all()):
        dead = (~sees_BQ).repeat_interleave(group, dim=1)[:, None].to(like.device)
    return ContextChunk(
        gather_X=torch.cat((flat_X, flat_X + num_slots)).to(like.device),
        mask_B1US=mask_BQS.repeat_interleave(group, dim=1)[:, None].to(like.device),
        dead_B1U=dead,
    )
