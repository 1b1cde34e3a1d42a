"""Mode SYNCHRONOUS: a draft on the target's own device proposes before each verify.

This is speculative decoding, the baseline of SSD: the same kernels, sampler, noise and backup, but
a round takes the time of K draft steps and of the verify. The text is the text of plain decoding,
because the target verifies every proposal.

A proposal is a table of one branch, whose root is the newest token: the draft's engine runs it as
it runs tables, for a small draft in one pass. The entries of the accepted tokens are appended to
the trunk in the next round. Nothing is rolled back: other entries are overwritten before they are
read.

Between steps, chosen tokens stay on the device of the draft. The host reads them once in a
proposal, so it queues all steps of a GPU without a wait, unless it stores chunks of a text.

Where the text repeats itself, the backup proposes instead if its tokens are accepted as often, see
``ssd.speculation.sources``. The draft does not run then, and stores the text by chunks.

*Decision*: one pass runs K+1 steps, and single steps are K, or K+1 after a round that accepted the
whole proposal, whose last token has no entry yet. *Because*: in a pass, a step costs less than the
pass of one token that would add the entry. *Not chosen*: K+1 steps always, which would slow the
baseline of large models. *Revisit when* a proposal of several sequences is one pass.

*Decision*: in a batch, each sequence has its own source. *Because*: 8 texts of the 208M pair (T =
0) had 231 tokens per second, and 204 without the backup. *Not chosen*: the backup for all or none.
*Revisit when* drafts on CPUs are large: their engine copies the trunks again when the set of
drafted sequences changes, 55 ms for four texts of 1,000 tokens and half a billion parameters.
"""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, StoredNoise
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.sampling.keyed import to_device
from ssd.speculation.backup import WINDOW_TOKENS, Backup
from ssd.speculation.sources import NO_CANDIDATES, Candidates, Sources
from ssd.types import NO_TOKEN, LookupResult, SequenceId, TokenId
from ssd_target.decoding.sampler import Proposal, Sampler
from ssd_target.decoding.sequence import Sequence

AHEAD_TOKENS = 1024
"""New tokens for which a text that has lost its blocks needs free ones, to begin again: with fewer,
it would soon lose them."""
MIN_REMAINING_TOKENS = 32
"""A sequence with fewer tokens to go does not begin again: storing its text would gain little."""
_MOST_PENDING = 2
"""Tokens without an entry before a proposal by single steps: the newest one, and one of the
proposal before it."""


@dataclass(slots=True)
class _Text:
    """The draft's copy of one sequence."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    num_stored: int = 0
    """Length of the trunk."""
    is_stored: bool = False
    """Whether the trunk has been stored; proposals extend it from then on."""
    run: tuple[TokenId, ...] = ()
    """Tokens after the trunk whose entries are in the proposal segment."""
    candidates: Candidates = NO_CANDIDATES
    """What was proposed for the newest round."""
    num_before: int = 0
    """Committed tokens before that round."""
    newest: "array[TokenId]" = field(default_factory=lambda: array("q"))
    """The newest tokens up to that round, for the backup, which copies a list in 20 us."""


class SequentialDrafter:
    """Proposes with a draft model of the target's process, or the backup. Step thread only.

    Sequences that are longer than the draft allows, or for which it has too few free blocks, get no
    proposals. It stores texts by itself, a chunk in each step: the target skips what is in its
    prefix cache. A sequence gets blocks as its text grows, because few texts reach their maximum
    length. If no block is free, the sequence that was admitted last loses its blocks.
    """

    def __init__(
        self,
        runner: DraftRunner,
        blocks: BlockPool,
        sampler: Sampler,
        backup: Callable[[], Backup],
    ) -> None:
        """Construct a drafter.

        Args:
            runner: of the draft model, with one branch and the lookahead of the target.
            blocks: blocks of the draft's KV cache.
            sampler: sampler of the target, which holds the noise.
            backup: returns the backup of the present settings.
        """
        self._runner = runner
        self._vocab_size = runner.model.vocab_size
        """Of the draft, with padding. That of the target can differ."""
        engine = self._engine = runner.engine
        self._blocks = blocks
        self._sampler = sampler
        self._lookahead = engine.lookahead
        self._backup = backup
        self._sources = Sources()
        shape_SJ = engine.max_num_seqs, engine.blocks_per_sequence
        self._block_tables_SJ = np.zeros(shape_SJ, np.int64)
        self._texts: dict[SequenceId, _Text] = {}

    def admit(self, sequence: Sequence) -> None:
        """Allocate blocks for a sequence that begins, or continues after a preemption."""
        text = _Text(sequence.slot)
        if self._has_room(sequence) and self._allocate(sequence, text):
            self._texts[sequence.sequence_id] = text

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has ended, if it has any."""
        if sequence.sequence_id in self._texts:
            self._drop(sequence.sequence_id)

    def _drop(self, number: SequenceId) -> None:
        text = self._texts.pop(number)
        self._runner.end_session(text.slot)
        self._blocks.free(text.blocks)

    def _has_room(self, sequence: Sequence) -> bool:
        """Return whether the draft allows a text of this length with a proposal."""
        return len(sequence.tokens) + self._lookahead < self._engine.max_model_len

    def _may_begin_again(self, sequence: Sequence) -> bool:
        """Return whether it pays to store the text of a sequence without blocks again."""
        num_entries = len(sequence.tokens) + min(sequence.num_remaining, AHEAD_TOKENS)
        has_blocks = self._blocks.can_allocate(-(-num_entries // self._engine.block_size))
        return has_blocks and sequence.num_remaining >= MIN_REMAINING_TOKENS

    def _allocate(self, sequence: Sequence, text: _Text) -> bool:
        """Allocate the blocks that a text needs for the next round; return whether it has them."""
        num_entries = min(len(sequence.tokens) + self._lookahead, sequence.max_len)
        num_owned = len(text.blocks)
        missing = max(0, -(-num_entries // self._engine.block_size) - num_owned)
        if not self._blocks.can_allocate(missing):
            return False
        text.blocks += self._blocks.allocate(missing)
        table_J = self._block_tables_SJ[text.slot]
        table_J[num_owned:] = 0
        table_J[num_owned : num_owned + missing] = text.blocks[num_owned:]
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate blocks for the next round. If none is free, the newest texts lose their blocks.

        Returns:
            Whether the sequence still has a text.
        """
        number = sequence.sequence_id
        while number in self._texts:
            if self._has_room(sequence) and self._allocate(sequence, self._texts[number]):
                return True
            self._drop(next(reversed(self._texts)) if self._has_room(sequence) else number)
        return False

    def store(self, sequences: Iterable[Sequence]) -> None:
        """Store one more chunk of the first of these texts that is not stored yet.

        A text is stored but for its newest token. A sequence without blocks gets some again, once
        there are enough for ``AHEAD_TOKENS`` more tokens.
        """
        for sequence in sequences:
            if sequence.sequence_id not in self._texts and self._may_begin_again(sequence):
                self.admit(sequence)
            text = self._texts.get(sequence.sequence_id)
            if text is None or text.is_stored or not self._grow(sequence):
                continue
            # A target that stores a whole prompt chooses the first token without a proposal.
            first, end = text.num_stored, max(sequence.num_prefill, len(sequence.tokens) - 1)
            self._store_chunk(sequence, end)
            text.is_stored = text.num_stored == end
            if first < text.num_stored:
                return

    def _store_chunk(self, sequence: Sequence, end: int) -> None:
        """Append the next chunk of the tokens before ``end`` to a trunk."""
        text = self._texts[sequence.sequence_id]
        chunk, first = self._engine.prefill_chunk, text.num_stored
        text.num_stored = last = min(first + chunk, end)
        if first < last:
            tokens_1P = torch.zeros((1, chunk), dtype=torch.int64)
            tokens_1P[0, : last - first] = torch.tensor(sequence.tokens[first:last])
            where = torch.tensor([first]), torch.tensor([last - first])
            table_1J = self._block_tables_SJ[sequence.slot][None]
            self._runner.prefill(PagedBatch(tokens_1P, *where, torch.from_numpy(table_1J)))

    def propose(
        self, sequences: Rows[Sequence], before_pass: Callable[[], None]
    ) -> list[tuple[Sequence, Proposal, LookupResult]]:
        """Return the sequences that have proposals, with at most K tokens each.

        The result of a proposal is ``BACKUP`` if its draft has not run, else ``NONE``.

        Args:
            sequences: sequences of the round.
            before_pass: called once before the passes of the draft, if there are some.
        """
        able = [sequence for sequence in sequences if self._can_propose(sequence)]
        # Another sequence may have taken its blocks.
        able = [sequence for sequence in able if sequence.sequence_id in self._texts]
        if not able:
            return []
        self._append(able)
        self._sampler.fill(able, [self._limit(sequence) for sequence in able])
        from_backup = self._from_backup(able)
        drafted = [each for each in able if each.sequence_id not in from_backup]
        behind = [each for each in able if self._is_behind(each, self._engine.prefill_chunk)]
        if drafted or behind:
            before_pass()
        for sequence in behind:
            self._store_chunk(sequence, len(sequence.tokens) - 1)
        proposals = from_backup | (self._from_draft(drafted) if drafted else {})
        results = dict.fromkeys(from_backup, LookupResult.BACKUP)
        numbers = [sequence.sequence_id for sequence in able]
        return [
            (sequence, proposals[number], results.get(number, LookupResult.NONE))
            for sequence, number in zip(able, numbers, strict=True)
        ]

    def _from_backup(self, able: Rows[Sequence]) -> dict[SequenceId, Proposal]:
        """Return the proposals of the backup, for sequences whose draft does not run."""
        texts = [self._texts[sequence.sequence_id] for sequence in able]
        rows = list(zip(able, texts, strict=True))
        # One call for all: the acceptances of earlier rounds lose weight in each.
        self._sources.add_round(
            (text.candidates, sequence.tokens[text.num_before :]) for sequence, text in rows
        )
        of_draft, of_backup = self._sources.acceptances(repeats=True)
        is_better = of_backup >= of_draft and not self._sources.is_trial
        proposals: dict[SequenceId, Proposal] = {}
        for sequence, text in rows:
            text.newest.extend(sequence.tokens[text.num_before :])
            found = self._backup()(text.newest[-WINDOW_TOKENS:], self._limit(sequence))
            text.candidates, text.num_before = Candidates((), *found), len(sequence.tokens)
            if found.repeats and is_better:
                proposals[sequence.sequence_id] = found.tokens
        return proposals

    def _from_draft(self, drafted: Rows[Sequence]) -> dict[SequenceId, Proposal]:
        """Return the proposals of the draft."""
        slots_B = np.array([sequence.slot for sequence in drafted])
        limits_B = np.array([self._limit(sequence) for sequence in drafted])
        noise = self._whole_noise(drafted, slots_B, limits_B)
        for sequence in drafted:
            while self._is_behind(sequence, _MOST_PENDING if noise is None else 1):
                self._store_chunk(sequence, len(sequence.tokens) - 1)
        if noise is not None:
            proposals = [self._run_whole(drafted[0], slots_B, noise)]
        else:
            proposals = self._run_steps(drafted, slots_B, limits_B)
        self._runner.promote_branches(
            torch.from_numpy(slots_B), torch.zeros(len(drafted), dtype=torch.int64)
        )
        found = {}
        for sequence, tokens, limit in zip(drafted, proposals, limits_B.tolist(), strict=True):
            text = self._texts[sequence.sequence_id]
            found[sequence.sequence_id] = proposal = tokens[:limit]
            text.candidates = text.candidates._replace(from_draft=proposal)
        return found

    def _is_behind(self, sequence: Sequence, most_pending: int) -> bool:
        """Return whether more tokens than these have no entry."""
        return len(sequence.tokens) - self._texts[sequence.sequence_id].num_stored > most_pending

    def _limit(self, sequence: Sequence) -> int:
        """Return the largest number of tokens to propose; it leaves room for the bonus token."""
        return min(sequence.num_remaining - 1, self._lookahead)

    def _can_propose(self, sequence: Sequence) -> bool:
        text = self._texts.get(sequence.sequence_id)
        is_able = text is not None and text.is_stored and sequence.num_remaining > 1
        return is_able and self._grow(sequence)

    def _append(self, drafted: Rows[Sequence]) -> None:
        """Append the entries of committed tokens to the trunks."""
        slots_B = np.array([sequence.slot for sequence in drafted])
        texts = [self._texts[sequence.sequence_id] for sequence in drafted]
        counts = []
        for sequence, text in zip(drafted, texts, strict=True):
            committed = sequence.tokens[text.num_stored : -1]
            pairs = zip(committed, text.run, strict=False)
            counts.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if any(counts):
            # Operations of torch release the interpreter, and a reader may take it.
            lengths_B = np.array([text.num_stored for text in texts])
            arrays = (slots_B, np.array(counts), lengths_B, self._block_tables_SJ[slots_B])
            self._runner.append_proposal(AppendBatch(*map(torch.from_numpy, arrays)))
        for text, count in zip(texts, counts, strict=True):
            text.num_stored += count
            text.run = ()

    def _whole_noise(
        self, drafted: Rows[Sequence], slots_B: NDArray[np.int64], limits_B: NDArray[np.int64]
    ) -> StoredNoise | None:
        """Return the noise of all steps of one pass; None if the draft runs single steps."""
        if len(drafted) > 1 or (1, self._lookahead) not in self._runner.whole_tables:
            return None
        step_K1 = np.arange(self._lookahead)[:, None]
        # The last tokens are not used, so their noise does not matter.
        positions_K1 = len(drafted[0].tokens) + np.minimum(step_K1, limits_B)
        noise = self._sampler.stored_noise(slots_B, positions_K1)
        has_other_size = noise is not None and noise.noise_YV.shape[1] != self._vocab_size
        return None if has_other_size else noise

    def _run_whole(
        self, sequence: Sequence, slots_B: NDArray[np.int64], noise: StoredNoise
    ) -> Proposal:
        """Choose the tokens after one sequence in one pass."""
        text = self._texts[sequence.sequence_id]
        pending = sequence.tokens[text.num_stored :]
        lengths_B = np.array([text.num_stored])
        batch = self._batch(slots_B, lengths_B, torch.from_numpy(np.array([pending])))
        chosen_K11, _ = self._runner.run_columns(batch, noise)
        tokens = _before_no_token(chosen_K11.flatten().tolist())
        text.run = (*pending, *tokens)
        return tokens

    def _run_steps(
        self, drafted: Rows[Sequence], slots_B: NDArray[np.int64], limits_B: NDArray[np.int64]
    ) -> list[tuple[TokenId, ...]]:
        """Choose the tokens after several sequences step by step."""
        texts = [self._texts[sequence.sequence_id] for sequence in drafted]
        pairs = zip(drafted, texts, strict=True)
        pending = [sequence.tokens[text.num_stored :] for sequence, text in pairs]
        num_pending_B = np.array([len(row_tokens) for row_tokens in pending])
        assert num_pending_B.max() <= _MOST_PENDING, "a committed token was never run"
        num_steps = int((num_pending_B - 1 + limits_B).max())
        tokens_BP = np.full((len(drafted), num_pending_B.max()), NO_TOKEN)
        for row, row_tokens in enumerate(pending):
            tokens_BP[row, : len(row_tokens)] = row_tokens
        lengths_B = np.array([text.num_stored for text in texts])
        columns = list(to_device(torch.from_numpy(tokens_BP), self._engine.device).unbind(1))
        batch = self._batch(slots_B, lengths_B, columns[0][:, None])
        for step in range(num_steps):
            # A row after NO_TOKEN runs any token: nothing after it is proposed.
            batch = replace(batch, tokens_BN=columns[step][:, None].clamp_min(0), step=step)
            logits_BV = self._runner.run_branches(batch)[:, 0]
            number_B = step + 1 - num_pending_B
            rows_A = np.flatnonzero((number_B >= 0) & (number_B < limits_B))
            if not rows_A.size:
                continue
            positions_B = lengths_B + step + 1
            chosen_B = self._sampler.choose_at(slots_B, positions_B, logits_BV, rows_A)
            if step + 1 == len(columns):
                columns.append(chosen_B)
            else:
                pending_B = columns[step + 1]
                columns[step + 1] = chosen_B.where(pending_B == NO_TOKEN, pending_B)
        tokens_BS = torch.stack(columns, dim=1).cpu()
        proposals = []
        for text, row_tokens, num_pending in zip(
            texts, tokens_BS.tolist(), num_pending_B, strict=True
        ):
            tokens = _before_no_token(row_tokens)
            text.run = tokens[:num_steps]
            proposals.append(tokens[num_pending:])
        return proposals

    def _batch(
        self, slots_B: NDArray[np.int64], lengths_B: NDArray[np.int64], tokens_B1: Tensor
    ) -> BranchBatch:
        """Return step 0 of one branch after each trunk; the branches see no proposal."""
        accepted_B1 = np.full((len(slots_B), 1), -1)
        slots, accepted, lengths, tables = map(
            torch.from_numpy, (slots_B, accepted_B1, lengths_B, self._block_tables_SJ[slots_B])
        )
        return BranchBatch(slots, tokens_B1, accepted, 0, lengths, tables)


def _before_no_token(tokens: Iterable[TokenId]) -> tuple[TokenId, ...]:
    return tuple(takewhile(lambda token: token != NO_TOKEN, tokens))
