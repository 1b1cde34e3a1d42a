"""Which sequences run, and what each step stores and decodes. No tensors, no clock, no I/O.

``Scheduler.plan`` applies the events of a step to the state and returns what the step does: it
admits, preempts and releases sequences, gives blocks to those that grow, and selects the tokens
that are stored beside the decoding sequences.

- *Order*: first come, first served within a priority; see ``Sequence.precedence``. Everything
  follows this order: admission, prefill and, from its end, preemption.
- *Admission* needs a slot and the KV blocks of the committed tokens and of one proposal, beside one
  more block for each running sequence. Blocks of a prompt whose tokens are in the prefix cache are
  shared instead of stored again.
- *Growth*: a decoding sequence gets blocks when it needs them. If none is free, the last sequence
  is preempted: it loses its blocks and waits again. The first sequence always has enough, since one
  of maximum length fits, so every sequence ends.
- *Token budget*: beside decoding sequences, a step stores as many prompt tokens as it has rows, so
  that it takes about twice as long, or one chunk for each sequence that does not decode yet, if
  that is more. So a batch fills within the steps of one prompt, however many prompts wait. A verify
  that stores prompts too stores up to ``JOINED_TOKENS`` for each of these sequences.

*Same bits*: a position of a prompt is always stored by a prefill, alone or in a verify, and a later
one by the rows of a verify. Prefills begin at multiples of the chunk, also after a cached
beginning. A preempted sequence stores its prompt by prefills and its emitted tokens by verifies, as
before.

*Decision*: where the engine has the same bits then, the verify of a step stores the chunks of
prompts too; else they run in passes of their own before it. *Because*: each pass reads all weights,
which takes most of the time of a pass with few rows. The verify that completes a prompt returns the
logits of its last position, so the first token needs no further pass.

*Decision*: no preemption for the sake of priority or of a waiting request. *Because*: its tokens
would be computed again while nothing is short. *Not chosen*: swapping blocks to host memory, which
has no gain on a CPU. *Revisit when* a GPU stores a text more slowly than it reads its entries.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm
from secrets import token_bytes

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool, Key, chain_keys
from ssd.errors import OverloadedError, SSDError
from ssd.pool.round_log import SequenceCounts
from ssd.types import FinishReason, SequenceId, TokenId
from ssd_target.decoding.sequence import Sequence
from ssd_target.settings import TargetSettings

JOINED_TOKENS = 64
"""In bfloat16 with AMX (one core), a pass of 8 rows takes twice as long with so many more: 39 ms
alone, 80 with 48 more and 137 with 89 more (208M weights); 6.5, 11.5 and 15.4 ms (14M). With
several waiting prompts a step takes longer, up to ``step_tokens``, but the steps are fewer."""
_SALT = token_bytes(16)
"""Secret of the keys of prompts, see ``chain_keys``."""
Event = Sequence | SequenceId
"""A new sequence, or the id of one to cancel: its client has left, or the process ends."""


Part = tuple[Sequence, range]
"""Positions of a sequence that the step stores."""


@dataclass(slots=True)
class StepPlan:
    """What one step does."""

    refused: list[tuple[Sequence, SSDError]] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)
    """Sequences that were cancelled while they waited."""
    cancelled: list[Sequence] = field(default_factory=list)
    """Sequences that were cancelled while they ran; their slots and blocks are free again."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that wait again; their slots and blocks are free."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that have a slot from now on, some of them again."""
    moved: list[Sequence] = field(default_factory=list)
    """Sequences that have other blocks than before."""
    prefills: list[Part] = field(default_factory=list)
    """Parts of prompts. They begin at multiples of the chunk."""
    is_joined: bool = False
    """Whether the verify of the round stores the prefills."""
    completing: list[Sequence] = field(default_factory=list)
    """Sequences whose first token the verify chooses, since it completes their prompts. Their parts
    are the first ones of ``prefills``."""
    replays: list[Part] = field(default_factory=list)
    """Emitted tokens of sequences that were preempted, at most K+1 of each."""
    running: list[Sequence] = field(default_factory=list)
    """Sequences that have a slot, in order."""
    decoding: list[Sequence] = field(default_factory=list)
    """The running sequences that take part in the round, ``completing`` at the end."""

    @property
    def num_stored(self) -> int:
        """Tokens that the step stores beside the round."""
        return sum(len(positions) for _, positions in (*self.prefills, *self.replays))


class Scheduler:
    """Owns the queue, the running sequences and the KV blocks. Step thread only."""

    def __init__(
        self,
        engine: EngineConfig,
        blocks: BlockPool,
        settings: TargetSettings,
        *,
        joined_rows: int = 0,
    ) -> None:
        """Construct; ``joined_rows``: see ``TargetRunner``."""
        self._engine = engine
        self._joined_rows = joined_rows
        # A verify stores the last token of the prompt, unless the pass of its prefill has logits.
        self._num_later = 0 if joined_rows else 1
        self._settings = settings
        self.blocks = blocks
        self._sequences: dict[SequenceId, Sequence] = {}
        """All sequences that run or wait."""
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_new = 0
        """Waiting sequences that have not run yet."""
        self._num_new_prompts = 0
        """Prompts of these requests; the continuations of one request have one prompt."""
        self._num_new_tokens = 0
        """Tokens of these prompts."""
        self._num_eligible = 0
        self._num_auto = 0
        self._free_slots = list(range(engine.max_num_seqs - 1, -1, -1))
        # Shared blocks end where a prefill begins.
        self._granule = lcm(engine.block_size, engine.prefill_chunk)

    def counts(self, *, auto_speculates: bool) -> SequenceCounts:
        """Return the sequences now; ``auto_speculates``: sequences in mode AUTO are eligible."""
        eligible = self._num_eligible - (0 if auto_speculates else self._num_auto)
        return SequenceCounts(len(self._running), len(self._waiting), eligible)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._sequences

    def plan(self, events: Iterable[Event], num_rows: int = 0) -> StepPlan:
        """Apply the events, select the sequences and tokens of the step.

        The caller must run the whole plan: what it stores counts as stored. It calls ``keep`` for
        each part of ``prefills`` whose entries are finite.

        Args:
            events: events since the last call.
            num_rows: rows of the newest round, as an estimate of this one.
        """
        plan = StepPlan()
        new: list[Sequence] = []
        for event in events:
            if isinstance(event, Sequence):
                new.append(event)
                self._enqueue(event)
            elif (ended := self._sequences.get(event)) is not None:
                ended.finish_reason = FinishReason.CANCELLED
                (plan.cancelled if self._is_running(ended) else plan.dropped).append(ended)
                self._remove(ended)
        self._grow(plan)
        if self._waiting and not plan.preempted:
            self._admit(plan)
        self._refuse_overflow(new, plan)
        self._select_parts(plan, num_rows)
        plan.running = self._running.copy()
        self._select_decoding(plan)
        return plan

    def _select_decoding(self, plan: StepPlan) -> None:
        """Select the sequences of the round; those whose prompts its verify completes come last."""
        stored = [sequence for sequence in self._running if sequence.is_stored]
        if plan.is_joined:
            # A sequence that runs again has its first tokens already.
            joined = {sequence for sequence, _ in plan.prefills}
            plan.completing = [
                sequence for sequence in stored if sequence in joined and not sequence.num_emitted
            ]
            plan.prefills.sort(key=lambda part: part[0] not in plan.completing)
            stored = [sequence for sequence in stored if sequence not in joined]
        plan.decoding = stored + plan.completing

    def keep(self, sequence: Sequence, stored: range) -> None:
        """Put the blocks that a prefill has filled into the prefix cache."""
        size = self._engine.block_size
        for index in range(stored.start // size, min(stored.stop // size, len(sequence.keys))):
            self.blocks.keep(sequence.blocks[index], sequence.keys[index])

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a sequence that has ended."""
        assert sequence.finish_reason is not None
        self._remove(sequence)

    def sequences(self) -> tuple[Sequence, ...]:
        """Return all sequences that run or wait."""
        return tuple(self._sequences.values())

    def _is_running(self, sequence: Sequence) -> bool:
        place = bisect_left(self._running, sequence.precedence, key=_precedence)
        return place < len(self._running) and self._running[place] is sequence

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.num_prefill = sequence.num_prompt - self._num_later
        self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, sequence, key=_precedence)
        if not sequence.num_preemptions:
            self.num_new += 1
            if not sequence.choice:
                self._num_new_prompts += 1
                self._num_new_tokens += sequence.num_prompt

    def _dequeue(self, sequence: Sequence) -> None:
        del self._waiting[bisect_left(self._waiting, sequence.precedence, key=_precedence)]
        if not sequence.num_preemptions:
            self.num_new -= 1
            if not sequence.choice:
                self._num_new_prompts -= 1
                self._num_new_tokens -= sequence.num_prompt

    def _stop(self, sequence: Sequence) -> None:
        """Take the slot and the blocks from a running sequence."""
        del self._running[bisect_left(self._running, sequence.precedence, key=_precedence)]
        self._num_eligible -= sequence.may_speculate
        self._num_auto -= sequence.is_auto
        self._free_slots.append(sequence.slot)
        self.blocks.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_stored = 0

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self._is_running(sequence):
            self._stop(sequence)
        else:
            self._dequeue(sequence)
        del self._sequences[sequence.sequence_id]

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.num_preemptions += 1
        self._enqueue(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        """Return the blocks of the committed tokens and of the longest next proposal."""
        longest = min(len(sequence.tokens) + self._engine.lookahead, sequence.max_len - 1)
        return -(-longest // self._engine.block_size)

    def _grow(self, plan: StepPlan) -> None:
        """Give blocks to decoding sequences, and preempt the last ones if none is free."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            missing = self._num_blocks(sequence) - len(sequence.blocks)
            if missing > self.blocks.num_free:
                assert len(self._running) > 1, "a sequence of maximum length does not fit"
                plan.preempted.append(last := self._running[-1])
                self._preempt(last)
                continue
            if missing > 0:
                sequence.blocks += self.blocks.allocate(missing)
                plan.moved.append(sequence)
            index += 1

    def _admit(self, plan: StepPlan) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            if self._settings.prefix_cache and not sequence.keys:
                sequence.keys = prompt_keys(sequence.prompt_ids, self._engine.block_size)
            shared = self._find(sequence)
            self.blocks.share(shared)
            missing = self._num_blocks(sequence) - len(shared)
            if not self.blocks.can_allocate(missing + len(self._running)):
                self.blocks.free(shared)
                return
            self._dequeue(sequence)
            sequence.blocks = shared + self.blocks.allocate(missing)
            sequence.slot = self._free_slots.pop()
            self._add_shared(sequence, len(shared))
            insort(self._running, sequence, key=_precedence)
            self._num_eligible += sequence.may_speculate
            self._num_auto += sequence.is_auto
            plan.admitted.append(sequence)
            plan.moved.append(sequence)

    def _find(self, sequence: Sequence) -> list[int]:
        """Return blocks of the prefix cache with the next positions of a sequence."""
        if sequence.num_stored % self._granule:
            return []
        size = self._engine.block_size
        blocks = self.blocks.find(sequence.keys[sequence.num_stored // size :])
        return blocks[: len(blocks) * size // self._granule * self._granule // size]

    def _add_shared(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.num_stored += num_blocks * self._engine.block_size
        if not sequence.num_preemptions:
            sequence.num_cached += num_blocks * self._engine.block_size

    def _share(self, sequence: Sequence) -> bool:
        """Use what another sequence has stored since the admission; returns whether there is any.

        Requests with one prompt that arrive together store it once.
        """
        if not (shared := self._find(sequence)):
            return False
        first = sequence.num_stored // self._engine.block_size
        places = slice(first, first + len(shared))
        self.blocks.share(shared)
        self.blocks.free(sequence.blocks[places])
        sequence.blocks[places] = shared
        self._add_shared(sequence, len(shared))
        return True

    def _select_parts(self, plan: StepPlan, num_rows: int) -> None:
        """Select the parts of prompts and the emitted tokens that the step stores."""
        missing = [sequence for sequence in self._running if not sequence.is_stored]
        if not missing:
            return
        num_decoding = len(self._running) - len(missing)
        for sequence in missing:
            # A preempted sequence may find its whole prompt, and then stores tokens in this step.
            if sequence.num_stored < sequence.num_prefill and self._share(sequence):
                plan.moved.append(sequence)
            first = sequence.num_stored
            if first >= sequence.num_prefill and not sequence.is_stored:
                # Emitted tokens of a preempted sequence.
                last = min(first + self._engine.num_columns, len(sequence.tokens) - 1)
                plan.replays.append((sequence, range(first, last)))
                sequence.num_stored = last
        new = [sequence for sequence in missing if sequence.num_stored < sequence.num_prefill]
        chunk = self._engine.prefill_chunk
        budget = self._settings.step_tokens
        plan.is_joined = bool(self._joined_rows and new)
        if num_decoding:
            per_sequence = max(chunk, min(JOINED_TOKENS, self._joined_rows - num_rows))
            budget = min(budget, max(num_rows, num_decoding, len(new) * per_sequence))
        num_chunks = max(1, budget // chunk)
        for sequence in new:
            first = sequence.num_stored
            last = min(sequence.num_prefill, first + num_chunks * chunk)
            plan.prefills.append((sequence, range(first, last)))
            sequence.num_stored = last
            num_chunks -= -(-(last - first) // chunk)
            if not num_chunks:
                break

    def _refuse_overflow(self, new: list[Sequence], plan: StepPlan) -> None:
        """Refuse the newest arrivals while too much waits. Preempted sequences do not count."""
        settings = self._settings
        for sequence in reversed(new):
            if self.num_new > settings.max_queue:
                error = queue_full(settings.max_queue)
            elif self._num_new_tokens > settings.max_queue_tokens and self._num_new_prompts > 1:
                if sequence.choice:
                    # This continuation ends with the first one, which has the prompt.
                    continue
                error = queue_of_tokens_full(settings.max_queue_tokens)
            else:
                break
            if sequence.finish_reason is None and not self._is_running(sequence):
                self._remove(sequence)
                plan.refused.append((sequence, error))


def prompt_keys(prompt_ids: tuple[TokenId, ...], block_size: int) -> list[Key]:
    """Return the keys of the full blocks of a prompt that a prefill stores. Any thread."""
    # Without the last token: its pass has the logits of the first one.
    return chain_keys(prompt_ids[:-1], block_size, _SALT)


def _precedence(sequence: Sequence) -> tuple[int, SequenceId]:
    return sequence.precedence


def queue_full(max_queue: int) -> OverloadedError:
    """Return the error of a request that arrives while the queue is full."""
    return OverloadedError(f"{max_queue} requests are waiting (max_queue); try again later")


def queue_of_tokens_full(max_queue_tokens: int) -> OverloadedError:
    """Return the error of a request that arrives while too many prompt tokens wait."""
    return OverloadedError(
        f"{max_queue_tokens} prompt tokens are waiting (max_queue_tokens); try again later"
    )
