"""The context of one forward pass: made once per pass, used by every layer.

Q: queries of a sequence; U = Q x heads of a group; S: entries of one context chunk; X: chunks that
one kernel call covers; Y = X x B.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ssd.engine.attention.cpu import attend, attend_whole, merge_partials
from ssd.engine.kv_cache.storage import KVStorage

MAX_CHUNKS_A_CALL = 8
"""Limits the size of one gather operation."""
MIN_WIDTH = 128


@dataclass(frozen=True, slots=True)
class ContextRun:
    """Context chunks of one width for one kernel call: gathered entries, and the mask."""

    num_chunks: int
    gather_Z: Tensor
    """Entries of the keys, then of the values: [2, X, B, S], flattened."""
    mask_Y1US: Tensor
    dead_Y1U: Tensor | None
    """Rows that see no entry of a chunk; None if there are none."""


class AttentionPass:
    """One pass over the KV storage: writes the new entries of a layer, then attends.

    Masks can have more query rows than there are queries, since the kernel's bits depend on it.
    """

    def __init__(
        self,
        storage: KVStorage,
        write_entries_R: Tensor,
        runs: list[ContextRun],
        num_sequences: int,
        *,
        is_whole: bool,
    ) -> None:
        """Prepare a pass; ``is_whole`` if one chunk of one run contains the whole context."""
        self._is_whole = is_whole
        self._storage = storage
        self._write_entries_R = write_entries_R
        self._runs = runs
        self._num_sequences = num_sequences

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store a layer's new keys and values and return the attention output, [R, H*E]."""
        storage = self._storage
        storage.write(layer, self._write_entries_R, keys_RGE, values_RGE)
        num_kv_heads, head_size = storage.shape_GE
        batch, rows = self._num_sequences, queries_RHE.shape[0]
        group = queries_RHE.shape[1] // num_kv_heads
        queries_BGUE = (
            queries_RHE.view(batch, -1, num_kv_heads, group, head_size)
            .transpose(1, 2)
            .reshape(batch, num_kv_heads, -1, head_size)
        )
        num_real = queries_BGUE.shape[2]
        if num_idle := self._runs[0].mask_Y1US.shape[2] - num_real:
            queries_BGUE = functional.pad(queries_BGUE, (0, 0, 0, num_idle))
        seen = self._attend_whole if self._is_whole else self._attend_chunks
        out_BGUE = seen(layer, queries_BGUE)[:, :, :num_real]
        out_BGQXE = out_BGUE.view(batch, num_kv_heads, -1, group, head_size)
        return out_BGQXE.transpose(1, 2).reshape(rows, -1)

    def _attend_whole(self, layer: int, queries_BGUE: Tensor) -> Tensor:
        (run,) = self._runs
        keys_BSGE, values_BSGE = self._gather(layer, run)
        return attend_whole(queries_BGUE, keys_BSGE, values_BSGE, run.mask_Y1US)

    def _attend_chunks(self, layer: int, queries_BGUE: Tensor) -> Tensor:
        parts = [self._attend_run(layer, queries_BGUE, run) for run in self._runs]
        if len(parts) == 1 and self._runs[0].num_chunks == 1:
            return parts[0][0]
        outs_YGUE, masses_YGU = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return merge_partials(
            outs_YGUE.view(-1, *queries_BGUE.shape),
            masses_YGU.view(-1, *queries_BGUE.shape[:3]),
        )

    def _attend_run(
        self, layer: int, queries_BGUE: Tensor, run: ContextRun
    ) -> tuple[Tensor, Tensor]:
        """Return the partial results of a run's chunks, [Y, G, U, E] and [Y, G, U]."""
        keys_YSGE, values_YSGE = self._gather(layer, run)
        queries_YGUE = (
            queries_BGUE if run.num_chunks == 1 else queries_BGUE.repeat(run.num_chunks, 1, 1, 1)
        )
        out_YGUE, mass_YGU = attend(queries_YGUE, keys_YSGE, values_YSGE, run.mask_Y1US)
        if run.dead_Y1U is not None:
            mass_YGU = mass_YGU.masked_fill(run.dead_Y1U, -torch.inf)
        return out_YGUE, mass_YGU

    def _gather(self, layer: int, run: ContextRun) -> tuple[Tensor, Tensor]:
        entries_ZW = self._storage.flat[layer].index_select(0, run.gather_Z)
        shape = (2, len(run.mask_Y1US), -1, *self._storage.shape_GE)
        keys_YSGE, values_YSGE = entries_ZW.view(shape).unbind(0)
        return keys_YSGE, values_YSGE


def make_run(
    entries_XBS: Tensor, visible_XBQS: Tensor, group: int, num_entries: int, dtype: torch.dtype
) -> ContextRun:
    """Build a run.

    Args:
        entries_XBS: int64, the entries of each chunk.
        visible_XBQS: bool, the entries that a query sees.
        group: number of query heads of a key/value head.
        num_entries: entries of the storage; the values of entry z are in row num_entries + z.
        dtype: of the mask.

    Returns:
        The run. Rows that see no entry of a chunk get an open mask and are marked dead, since the
        result of a kernel for a fully masked row is not specified.
    """
    flat_Z = entries_XBS.flatten()
    visible_YQS = visible_XBQS.flatten(0, 1)
    sees_YQ = visible_YQS.any(dim=2)
    open_YQS = visible_YQS | ~sees_YQ[:, :, None]
    mask_YQS = torch.zeros(open_YQS.shape, dtype=dtype).masked_fill_(~open_YQS, -torch.inf)
    dead = None
    if not bool(sees_YQ.all()):
        dead = (~sees_YQ).repeat_interleave(group, dim=1)[:, None]
    return ContextRun(
        num_chunks=len(entries_XBS),
        gather_Z=torch.cat((flat_Z, flat_Z + num_entries)),
        mask_Y1US=mask_YQS.repeat_interleave(group, dim=1)[:, None],
        dead_Y1U=dead,
    )


def whole_width(num_entries: int) -> int:
    """Return the padded width of a whole context of ``num_entries`` entries.

    oneDNN compiles a kernel for each shape (0.5 ms and 0.7 MiB), so there are few widths: multiples
    of a quarter of the next power of two, at least 128.
    """
    step = max(MIN_WIDTH, 1 << (num_entries - 1).bit_length() >> 2)
    return -(-num_entries // step) * step


def widen(entries_BS: Tensor, visible_BQS: Tensor) -> tuple[Tensor, Tensor]:
    """Add invisible entries up to the ``whole_width``."""
    missing = whole_width(entries_BS.shape[1]) - entries_BS.shape[1]
    return functional.pad(entries_BS, (0, missing)), functional.pad(visible_BQS, (0, missing))


def first_entries(run: ContextRun, used: int) -> ContextRun:
    """Keep the first ``used`` entries of a run of one chunk, and mask the padding of its width."""
    width = min(whole_width(used), run.mask_Y1US.shape[-1])
    gather_2BS = run.gather_Z.view(2, len(run.mask_Y1US), -1)
    mask_B1US = run.mask_Y1US[..., :width].clone()
    mask_B1US[..., used:] = -torch.inf
    return ContextRun(
        num_chunks=run.num_chunks,
        gather_Z=gather_2BS[..., :width].flatten(),
        mask_Y1US=mask_B1US,
        dead_Y1U=run.dead_Y1U,
    )
