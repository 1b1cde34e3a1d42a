"""The rows and prompts of a pass of the target as inputs of its graph. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import PagedBatch
from ssd.engine.config import BLOCK_SIZES

TILE_ROWS = 16
"""Rows of a matrix in a register of AMX."""
MIN_STORED = 2
"""Smallest number of rows of a prefill."""
BLOCK_SIZE = BLOCK_SIZES["openvino"]
Ints = NDArray[np.int64]
Inputs = dict[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A part of a prompt, one sequence of a pass: at least ``MIN_STORED`` rows."""

    tokens_R: Ints
    count: int
    """Number of tokens; the other rows are copies. The entries of copies, at the next positions,
    are overwritten before they are read."""
    first: int
    """Position of the first token."""
    table_J: Ints

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + len(self.tokens_R)

    @property
    def blocks(self) -> Ints:
        """Blocks of all positions up to the end. Those beyond the table are the reserved one."""
        num_blocks = -(-self.end // BLOCK_SIZE)
        return np.pad(self.table_J, (0, max(0, num_blocks - len(self.table_J))))[:num_blocks]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The rows of a verify, packed, where they are in the batch, and the prompts beside them."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    tokens_R: Ints
    positions_R: Ints
    tables_RJ: Ints
    shape: tuple[int, int]
    """Sequences and columns of the batch."""
    is_row_BP: NDArray[np.bool_] | None
    """Which logits the pass computes, those of prompts at the end; None if all of the batch."""
    keeps_rows: bool
    """See ``PagedBatch``."""
    prompts: Sequence[Prompt]
    """Parts of prompts that the pass stores too; see ``TargetExecution.verify``."""


_NONE = np.zeros(0, np.int64)
NO_ROWS = PackedPass(
    num_sequences=0,
    tokens_R=_NONE,
    positions_R=_NONE,
    tables_RJ=_NONE[:, None],
    shape=(0, 0),
    is_row_BP=None,
    keeps_rows=False,
    prompts=(),
)


class Rows:
    """The memory that the graph reads and writes in verifies of R rows. The rows are sequences.

    Verifies of one shape write their values in place: after a forward pass, the caches of a CPU
    have neither code nor data of the host, so each call of numpy or torch costs 10 to 50 us.
    """

    def __init__(self, num_rows: int, num_blocks: int, vocab_size: int) -> None:
        # One row more: the empty sequence.
        begins = np.minimum(np.arange(num_rows + 2, dtype=np.int32), num_rows)
        self.tokens_R, self.positions_R = np.zeros((2, num_rows), np.int32)
        self.past_lens = np.zeros(num_rows + 1, np.int32)
        self.tables_RJ = np.zeros((num_rows, num_blocks), np.int32)
        self.longest = np.zeros(1, np.int32)
        self.logits_RV = torch.empty((num_rows, vocab_size))
        self.inputs = {
            "tokens": self.tokens_R,
            "logit_rows": begins[:num_rows],
            "positions": self.positions_R,
            "past_lens": self.past_lens,
            "subsequence_begins": begins,
            "block_indices": self.tables_RJ.reshape(-1),
            "block_indices_begins": begins * num_blocks,
            "max_context_len": self.longest,
        }

    def write(self, tokens_R: Ints, positions_R: Ints, tables_RJ: Ints, last_position: int) -> None:
        """Write the rows of a verify. Missing ones are padding, in the reserved block."""
        count, width = len(tokens_R), min(self.tables_RJ.shape[1], tables_RJ.shape[1])
        if count < len(self.tokens_R):
            for array in (self.tokens_R, self.positions_R, self.past_lens, self.tables_RJ):
                array[count:] = 0
        self.tokens_R[:count] = tokens_R
        self.past_lens[:count] = positions_R
        np.minimum(self.past_lens[:-1], last_position, out=self.positions_R)
        self.tables_RJ[:count, :width] = tables_RJ[:, :width]
        # Blocks beyond the table are the reserved one, also after rows with longer tables.
        self.tables_RJ[:count, width:] = 0
        self.longest[0] = self.past_lens.max() + 1


def divided(prompts: Sequence[Prompt], num_rows: int, most: int) -> list[list[Prompt]]:
    """Divide prompts into passes of at most ``most`` rows, in order.

    The first one also has ``num_rows`` rows of a verify. A longer prompt is alone.
    """
    groups, room = [list[Prompt]()], most - num_rows
    for prompt in prompts:
        if len(prompt.tokens_R) > room:
            groups.append([])
            room = most
        groups[-1].append(prompt)
        room -= len(prompt.tokens_R)
    return groups


def prompts_of(batch: PagedBatch, least: int = MIN_STORED, *, packs_rows: bool) -> list[Prompt]:
    """Return the prompts of a batch, without padding if rows are packed."""
    tokens_BP, tables_BJ = batch.tokens_BP.numpy(), batch.block_tables_BJ.numpy()
    counts_B = batch.num_columns_B.tolist() if packs_rows else [tokens_BP.shape[1]] * len(tokens_BP)
    rows = zip(tokens_BP, counts_B, batch.first_positions_B.tolist(), tables_BJ, strict=True)
    return [
        prompt_of(tokens_P[:count], first, table_J, least)
        for tokens_P, count, first, table_J in rows
    ]


def prompt_of(tokens_R: Ints, first: int, table_J: Ints, least: int = MIN_STORED) -> Prompt:
    """Return a part of a prompt with so many rows at least."""
    count = len(tokens_R)
    return Prompt(np.resize(tokens_R, max(count, least, MIN_STORED)), count, first, table_J)


def pack(
    batch: PagedBatch, num_sequences: int, least: int = MIN_STORED, *, packs_rows: bool
) -> PackedPass:
    """Return the rows of a batch, and its prompts with so many rows at least.

    Without ``packs_rows``, padding is rows too.
    """
    tokens_BP, tables_BJ = batch.tokens_BP.numpy(), batch.block_tables_BJ.numpy()
    num_columns = tokens_BP.shape[1]
    counts_B = batch.num_columns_B.numpy() if packs_rows else num_columns
    positions_BP = batch.first_positions_B.numpy()[:, None] + np.arange(num_columns)
    prompts = []
    if batch.prompts is not None:
        prompts = prompts_of(batch.prompts, least, packs_rows=packs_rows)
    is_row_BP = None
    if not prompts and (not packs_rows or counts_B.sum() == tokens_BP.size):
        tokens_R, positions_R = tokens_BP.reshape(-1), positions_BP.reshape(-1)
    else:
        is_row_BP = np.arange(num_columns) < counts_B[:, None]
        tokens_R, positions_R = tokens_BP[is_row_BP], positions_BP[is_row_BP]
        is_last_P = np.arange(num_columns) == 0
        is_row_BP = np.concatenate([is_row_BP, is_last_P[None].repeat(len(prompts), axis=0)])
    return PackedPass(
        num_sequences,
        tokens_R,
        positions_R,
        tables_BJ.repeat(counts_B, axis=0),
        tokens_BP.shape,
        is_row_BP,
        batch.keeps_rows,
        prompts,
    )


def fast_rows(num_rows: int) -> int:
    """Return how many rows a pass with so many should have in bfloat16 with AMX, with padding.

    Products divide the rows into equal parts of up to 16, and into parts of 128 if there are more
    than 64. *Measured* (208M weights, one core of a Xeon, ms of a pass): 43, 46, 48, 49, 51, 52,
    57, 59, 60 and 64 rows 74, 79, 67, 79, 82, 72, 82, 86, 74 and 76; 96, 112, 120 and 128 rows 123,
    139, 145 and 130. Of the products alone (3 layers), 192, 224, 240 and 256 rows take 63, 75, 77
    and 65 ms.
    """
    if num_rows <= 2 * TILE_ROWS:
        return num_rows
    if num_rows <= 4 * TILE_ROWS:
        return -(-num_rows // 4) * 4
    rest = num_rows % (8 * TILE_ROWS)
    return num_rows - rest + 8 * TILE_ROWS if rest > 6 * TILE_ROWS else num_rows


def inputs_of(
    packed: PackedPass, prompts: Sequence[Prompt], last_position: int, padding: int = 0
) -> Inputs:
    """Return the inputs of a pass: first the rows as sequences, then the prompts, then none.

    Rows of padding follow the rows, in the reserved block; this pass computes no logits of them.
    """
    num_rows, longest = len(packed.tokens_R), int(packed.positions_R.max(initial=-1)) + 1
    tables_RJ = packed.tables_RJ[:, : -(-longest // BLOCK_SIZE)]
    blocks = [prompt.blocks for prompt in prompts]
    num_blocks = [tables_RJ.shape[1]] * num_rows + [1] * padding + [*map(len, blocks)]
    none = np.zeros(padding, np.int64)
    sizes = [1] * (num_rows + padding) + [len(prompt.tokens_R) for prompt in prompts]
    begins = np.cumsum([0, *sizes, 0])
    counts = [prompt.count for prompt in prompts]
    tokens = [none, *(prompt.tokens_R for prompt in prompts)]
    positions = [none, *(np.arange(prompt.first, prompt.end) for prompt in prompts)]
    values = {
        "tokens": np.concatenate([packed.tokens_R, *tokens]),
        "logit_rows": np.concatenate(
            [begins[:num_rows], begins[num_rows + padding : -2] + counts - 1]
        ),
        "positions": np.minimum(np.concatenate([packed.positions_R, *positions]), last_position),
        "past_lens": [*packed.positions_R, *none, *(prompt.first for prompt in prompts), 0],
        "subsequence_begins": begins,
        "block_indices": np.concatenate([tables_RJ.reshape(-1), none, *blocks]),
        "block_indices_begins": np.cumsum([0, *num_blocks, 0]),
        "max_context_len": [max(longest, *(prompt.end for prompt in prompts))],
    }
    return {name: np.array(numbers, dtype=np.int32) for name, numbers in values.items()}
