"""Mode SYNCHRONOUS: a draft on the target's own device proposes before each verify.

This is classical speculative decoding, the baseline of SSD: the same kernels, sampler and noise,
but a round takes the time of K draft steps and of the verify. The tokens are those of plain
decoding, because the target verifies every proposal.

The draft's KV cache is paged like the target's and has blocks of its own. Nothing is rolled back:
entries after the committed tokens are overwritten before they are read.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.types import NO_TOKEN, SequenceId, TokenId
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.ports import Runner, Sampler
from ssd_target.decoding.scheduler import Stored
from ssd_target.decoding.sequence import Sequence

COLUMNS = 2
"""Columns of the first pass of a round: the newest token, and the one before it, whose KV entry is
missing after a round that accepted the whole proposal. The engine of the draft has this number."""


class SequentialDrafter:
    """Proposes tokens with a draft model of the target's process. Step thread only.

    Sequences that are longer than the draft allows, or for which it has no free blocks, get no
    proposals. It stores texts by itself, a chunk in each step: the target skips what is in its
    prefix cache. Blocks are reserved for the maximum length, because it may lose speed only.
    """

    def __init__(self, runner: Runner, blocks: BlockPool, sampler: Sampler, lookahead: int) -> None:
        """Construct a drafter.

        Args:
            runner: of the draft model, with ``COLUMNS`` columns.
            blocks: of its KV cache.
            sampler: of the target, which holds the noise.
            lookahead: tokens of a full proposal (K).
        """
        self._runner = runner
        self._blocks = blocks
        self._sampler = sampler
        self._lookahead = lookahead
        self._builder = BatchBuilder(runner.engine, (COLUMNS,))
        self._held: dict[SequenceId, list[int]] = {}
        self._num_stored: dict[SequenceId, int] = {}
        """Of texts that are not stored yet: a multiple of the chunk."""

    def admit(self, sequence: Sequence) -> None:
        """Allocate blocks for a sequence that begins, or continues after a preemption."""
        engine = self._runner.engine
        max_len = sequence.arrival.max_len
        count = -(-max_len // engine.block_size)
        if max_len <= engine.max_model_len and self._blocks.can_allocate(count):
            blocks = self._held[sequence.sequence_id] = self._blocks.allocate(count)
            self._num_stored[sequence.sequence_id] = 0
            self._builder.set_blocks(sequence.slot, blocks)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has ended, if it has any."""
        blocks = self._held.pop(sequence.sequence_id, None)
        if blocks is not None:
            self._num_stored.pop(sequence.sequence_id, None)
            self._blocks.free(blocks)

    def store(self, sequences: Iterable[Sequence]) -> None:
        """Store one more chunk of the first of these texts that is not stored yet.

        A text is stored but for the columns of the first pass of ``propose``, which goes on storing
        it from then on.
        """
        if not self._num_stored:
            return
        chunk = self._runner.engine.prefill_chunk
        for sequence in sequences:
            first = self._num_stored.get(sequence.sequence_id)
            if first is None:
                continue
            end = len(sequence.tokens) - COLUMNS
            last = min(first + chunk, end)
            self._num_stored[sequence.sequence_id] = last
            if last >= end:
                del self._num_stored[sequence.sequence_id]
            if first < last:
                work = Stored(sequence, first, last)
                self._runner.prefill(self._builder.stored([work], chunk))
                return

    def propose(self, sequences: Rows[Sequence]) -> dict[SequenceId, tuple[TokenId, ...]]:
        """Return the next proposal of each sequence that the draft knows; at most K tokens."""
        drafted = [
            each
            for each in sequences
            if each.sequence_id in self._held
            and each.sequence_id not in self._num_stored
            and each.num_remaining > 1
        ]
        if not drafted:
            return {}
        count = len(drafted)
        slots_B = np.fromiter((each.slot for each in drafted), np.int64, count)
        lengths_B = np.fromiter((len(each.tokens) for each in drafted), np.int64, count)
        remaining_B = np.fromiter((each.num_remaining for each in drafted), np.int64, count)
        limits_B = np.minimum(remaining_B - 1, self._lookahead)
        self._sampler.fill(drafted, limits_B)
        proposals_BK = np.full((count, self._lookahead), NO_TOKEN, dtype=np.int64)
        given_B = np.minimum(lengths_B, COLUMNS)
        newest = [each.tokens[-COLUMNS:] for each in drafted]
        tokens_BP = np.array([tokens + [0] * (COLUMNS - len(tokens)) for tokens in newest])
        first_B = lengths_B - given_B
        alive_B = np.arange(count)
        for step in range(int(limits_B.max())):
            batch = self._builder.columns(slots_B[alive_B], tokens_BP, first_B, given_B)
            logits_BPV = self._runner.verify(self._runner.prepare(batch))
            logits_BV = logits_BPV[torch.arange(len(alive_B)), torch.from_numpy(given_B - 1)]
            positions_B = lengths_B[alive_B] + step
            chosen_B = self._sampler.choose_at(slots_B[alive_B], positions_B, logits_BV)
            proposals_BK[alive_B, step] = chosen_B
            goes_on_B = (chosen_B != NO_TOKEN) & (limits_B[alive_B] > step + 1)
            alive_B = alive_B[goes_on_B]
            if not len(alive_B):
                break
            tokens_BP = chosen_B[goes_on_B][:, None]
            first_B, given_B = positions_B[goes_on_B], np.ones_like(alive_B)
        return {
            each.sequence_id: tuple(token for token in row if token != NO_TOKEN)
            for each, row in zip(drafted, proposals_BK.tolist(), strict=True)
        }
