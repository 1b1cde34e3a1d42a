"""Which sequences run, and what each step stores and decodes. No tensors, no clock, no I/O.

``Scheduler.plan`` applies the events of a step to the state and returns what the step does: it
admits, preempts and releases sequences, gives blocks to those that grow, and selects the tokens
that are stored beside the decoding sequences.

- *Order*: first come, first served within a priority; see ``Arrival.precedence``. Everything
  follows this order: admission, prefill and, from its end, preemption.
- *Admission* needs a slot and the KV blocks of the committed tokens and of one proposal, beside one
  more block for each running sequence. Blocks of a prompt whose tokens are in the prefix cache are
  shared instead of stored again.
- *Growth*: a decoding sequence gets blocks when it needs them. If none is free, the last sequence
  is preempted: it loses its blocks and waits again. The first sequence always has enough, since one
  of maximum length fits, so every sequence ends.
- *Token budget*: beside decoding sequences, a step stores as many prompt tokens as it has rows, so
  that it takes about twice as long, or one chunk for each sequence that does not decode yet, if
  that is more. So a batch fills within the steps of one prompt, however many prompts wait.

*Same bits*: a position is always stored by a pass of the same shape. Prefills begin at multiples of
the chunk, also after a cached beginning. A preempted sequence stores its prompt by prefills and its
emitted tokens by verifies, as before.

*Decision*: chunks of prompts run in passes of their own, before the verify of the step. *Because*:
every engine can do that with the same bits, and the controller needs the time of a round without
prompts. *Not chosen*: rows of prompts in the verify, which only the engine openvino can do with the
same bits. With the embedded pair on one CPU, a verify of 7 rows takes 12 ms, one of 7 and 16 rows
17 ms, and the two passes 28 ms, so one stream pauses for more than twice its quiet time. With eight
streams, the two passes take about twice the time of the verify alone. *Revisit when* single streams
beside long prompts matter on CPUs.

*Decision*: no preemption for the sake of priority or of a waiting request. *Because*: its tokens
would be computed again while nothing is short. *Not chosen*: swapping blocks to host memory, which
has no gain on a CPU. *Revisit when* a GPU stores a text more slowly than it reads its entries.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from secrets import token_bytes

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool, chain_keys
from ssd.errors import OverloadedError, SSDError
from ssd.pool.round_log import SequenceCounts
from ssd.types import FinishReason, SequenceId
from ssd_target.decoding.sequence import Arrival, Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a sequence has disconnected, or the process ends."""

    sequence_id: SequenceId


Event = Arrival | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much waits, and how much a step stores."""

    max_queue: int = 256
    """Maximum number of requests that wait."""
    max_queue_tokens: int = 1 << 20
    """Maximum number of prompt tokens that wait; one request may wait whatever its length."""
    step_tokens: int = 256
    """Token budget of a step: the most prompt tokens that it stores."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts(SequenceCounts):
    """Sequences and KV blocks that the scheduler holds."""

    auto: int = 0
    """Eligible sequences in mode AUTO."""
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """Positions [first, last) of a sequence that the step stores."""

    sequence: Sequence
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one step does."""

    refused: tuple[tuple[Arrival, SSDError], ...] = ()
    dropped: tuple[Sequence, ...] = ()
    """Cancelled while waiting."""
    cancelled: tuple[Sequence, ...] = ()
    """Cancelled while running; their blocks are free again."""
    preempted: tuple[Sequence, ...] = ()
    """Wait again; their slots and blocks are free."""
    admitted: tuple[Sequence, ...] = ()
    """Have a slot from now on, some of them again."""
    moved: tuple[Sequence, ...] = ()
    """Have other blocks than before."""
    prefills: tuple[Stored, ...] = ()
    """Parts of prompts. They begin at multiples of the chunk."""
    replays: tuple[Stored, ...] = ()
    """Emitted tokens of sequences that were preempted, at most K+1 of each."""
    running: tuple[Sequence, ...] = ()
    """Sequences that have a slot, in order."""
    decoding: tuple[Sequence, ...] = ()
    """The running sequences that take part in the round."""

    @property
    def num_stored(self) -> int:
        """Tokens that the step stores beside the round."""
        return sum(each.last - each.first for each in (*self.prefills, *self.replays))


class Scheduler:
    """Owns the queue, the running sequences and the KV blocks. Step thread only."""

    def __init__(
        self, engine: EngineConfig, blocks: BlockPool, limits: SchedulerLimits | None = None
    ) -> None:
        self._engine = engine
        self._limits = limits or SchedulerLimits()
        self._blocks = blocks
        self._sequences: dict[SequenceId, Sequence] = {}
        """Those that run or wait."""
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_new = 0
        """Waiting requests that have not run yet."""
        self._num_new_tokens = 0
        """Tokens of their prompts."""
        self._num_eligible = 0
        self._num_auto = 0
        self._free_slots = list(range(engine.max_num_seqs - 1, -1, -1))
        self._newest_prefills: tuple[Stored, ...] = ()
        self._salt = token_bytes(16)
        # Shared blocks end where a prefill begins.
        self._granule = lcm(engine.block_size, engine.prefill_chunk)

    @property
    def counts(self) -> SchedulerCounts:
        """Sequences and blocks now."""
        return SchedulerCounts(
            running=len(self._running),
            waiting=len(self._waiting),
            eligible=self._num_eligible,
            auto=self._num_auto,
            free_blocks=self._blocks.num_free - self._blocks.num_cached,
            cached_blocks=self._blocks.num_cached,
            used_blocks=self._blocks.num_taken,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._sequences

    def plan(self, events: Iterable[Event], num_rows: int = 0) -> Plan:
        """Apply the events, select the sequences and tokens of the step.

        The caller must run the whole plan: what it stores counts as stored.

        Args:
            events: since the last call.
            num_rows: rows of the newest round, as an estimate of this one.
        """
        for prefill in self._newest_prefills:
            if prefill.sequence.finish_reason is None:
                self._keep(prefill)
        self._newest_prefills = ()
        dropped: list[Sequence] = []
        cancelled: list[Sequence] = []
        new: list[Sequence] = []
        for event in events:
            if isinstance(event, Arrival):
                new.append(sequence := Sequence(arrival=event))
                self._enqueue(sequence)
            elif (ended := self._sequences.get(event.sequence_id)) is not None:
                (cancelled if self._is_running(ended) else dropped).append(ended)
                ended.finish_reason = FinishReason.CANCELLED
                self._remove(ended)
        preempted, moved = self._grow()
        admitted = [] if preempted else self._admit()
        refused = self._refuse_overflow(new)
        num_decoding = sum(each.is_stored for each in self._running)
        replays = self._replays()
        prefills, shared = self._prefills(max(num_rows, num_decoding) if num_decoding else 0)
        self._newest_prefills = prefills
        return Plan(
            refused=tuple(refused),
            dropped=tuple(dropped),
            cancelled=tuple(cancelled),
            preempted=tuple(preempted),
            admitted=tuple(admitted),
            moved=(*moved, *admitted, *shared),
            prefills=prefills,
            replays=replays,
            running=tuple(self._running),
            decoding=tuple(each for each in self._running if each.is_stored),
        )

    def finish(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a sequence that has ended."""
        assert sequence.finish_reason is not None
        if sequence.finish_reason is not FinishReason.FAILED:
            for prefill in self._newest_prefills:
                if prefill.sequence is sequence:
                    self._keep(prefill)
        self._remove(sequence)

    def arrivals(self) -> tuple[Arrival, ...]:
        """Return all requests that run or wait."""
        return tuple(sequence.arrival for sequence in self._sequences.values())

    def check(self) -> None:
        """Assert that slots, blocks and counts are consistent."""
        slots = sorted([*self._free_slots, *(each.slot for each in self._running)])
        assert slots == list(range(self._engine.max_num_seqs)), (
            f"slots are lost or used twice: {slots}"
        )
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_precedence), "the order is lost"
        assert {*self._running, *self._waiting} == set(self._sequences.values())
        assert not any(each.blocks for each in self._waiting), "a waiting sequence owns blocks"
        num_eligible = sum(each.may_speculate for each in self._running)
        assert self._num_eligible == num_eligible, f"eligible sequences: {self._num_eligible}"
        num_auto = sum(each.is_auto for each in self._running)
        assert self._num_auto == num_auto, f"sequences in mode AUTO: {self._num_auto}"
        new = [each.num_prompt for each in self._waiting if not each.num_preemptions]
        assert (self._num_new, self._num_new_tokens) == (len(new), sum(new)), "the queue is lost"
        owned = {block for each in self._running for block in each.blocks}
        assert len(owned) == self._blocks.num_taken, "a KV block has no owner"
        for each in self._running:
            assert len(each.blocks) == len(set(each.blocks)), "a sequence owns a KV block twice"
        self._blocks.check()

    def _is_running(self, sequence: Sequence) -> bool:
        place = bisect_left(self._running, sequence.precedence, key=_precedence)
        return place < len(self._running) and self._running[place] is sequence

    def _enqueue(self, sequence: Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, sequence, key=_precedence)
        if not sequence.num_preemptions:
            self._num_new += 1
            self._num_new_tokens += sequence.num_prompt

    def _dequeue(self, sequence: Sequence) -> None:
        del self._waiting[bisect_left(self._waiting, sequence.precedence, key=_precedence)]
        if not sequence.num_preemptions:
            self._num_new -= 1
            self._num_new_tokens -= sequence.num_prompt

    def _stop(self, sequence: Sequence) -> None:
        """Take the slot and the blocks from a running sequence."""
        del self._running[bisect_left(self._running, sequence.precedence, key=_precedence)]
        self._num_eligible -= sequence.may_speculate
        self._num_auto -= sequence.is_auto
        self._free_slots.append(sequence.slot)
        self._blocks.free(sequence.blocks)
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

    def _keep(self, prefill: Stored) -> None:
        """Put the blocks that a prefill of the newest step has filled into the prefix cache."""
        size, sequence = self._engine.block_size, prefill.sequence
        for index in range(prefill.first // size, min(prefill.last // size, len(sequence.keys))):
            self._blocks.keep(sequence.blocks[index], sequence.keys[index])

    def _num_blocks(self, sequence: Sequence) -> int:
        """Return the blocks of the committed tokens and of the longest next proposal."""
        longest = min(len(sequence.tokens) + self._engine.num_columns - 1, sequence.max_len - 1)
        return -(-longest // self._engine.block_size)

    def _grow(self) -> tuple[list[Sequence], list[Sequence]]:
        """Give blocks to decoding sequences; returns the preempted ones and those that grew."""
        preempted: list[Sequence] = []
        grown: list[Sequence] = []
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            missing = self._num_blocks(sequence) - len(sequence.blocks)
            if missing > self._blocks.num_free:
                assert len(self._running) > 1, "a sequence of maximum length does not fit"
                preempted.append(last := self._running[-1])
                self._preempt(last)
                continue
            if missing > 0:
                sequence.blocks += self._blocks.allocate(missing)
                grown.append(sequence)
            index += 1
        return preempted, grown

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            if self._limits.prefix_cache and not sequence.keys:
                sequence.keys = chain_keys(
                    sequence.tokens[: sequence.num_prefill], self._engine.block_size, self._salt
                )
            shared = self._find(sequence)
            self._blocks.share(shared)
            missing = self._num_blocks(sequence) - len(shared)
            if not self._blocks.can_allocate(missing + len(self._running)):
                self._blocks.free(shared)
                break
            self._dequeue(sequence)
            sequence.blocks = shared + self._blocks.allocate(missing)
            sequence.slot = self._free_slots.pop()
            self._note_shared(sequence, len(shared))
            insort(self._running, sequence, key=_precedence)
            self._num_eligible += sequence.may_speculate
            self._num_auto += sequence.is_auto
            admitted.append(sequence)
        return admitted

    def _find(self, sequence: Sequence) -> list[int]:
        """Return blocks of the prefix cache with the next positions of a sequence."""
        if sequence.num_stored % self._granule:
            return []
        size = self._engine.block_size
        found = self._blocks.find(sequence.keys[sequence.num_stored // size :])
        return found[: len(found) * size // self._granule * self._granule // size]

    def _note_shared(self, sequence: Sequence, num_blocks: int) -> None:
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
        self._blocks.share(shared)
        self._blocks.free(sequence.blocks[places])
        sequence.blocks[places] = shared
        self._note_shared(sequence, len(shared))
        return True

    def _prefills(self, num_rows: int) -> tuple[tuple[Stored, ...], list[Sequence]]:
        """Select the parts of prompts that the step stores; returns sequences that share, too.

        Args:
            num_rows: of the decoding sequences, 0 if there are none.
        """
        chunk = self._engine.prefill_chunk
        budget = self._limits.step_tokens
        if num_rows:
            num_new = sum(each.num_stored < each.num_prefill for each in self._running)
            budget = min(budget, max(num_rows, num_new * chunk))
        num_chunks = max(1, budget // chunk)
        prefills: list[Stored] = []
        shared: list[Sequence] = []
        for sequence in self._running:
            if sequence.num_stored >= sequence.num_prefill:
                continue
            if self._share(sequence):
                shared.append(sequence)
            first = sequence.num_stored
            last = min(sequence.num_prefill, first + num_chunks * chunk)
            if first < last:
                prefills.append(Stored(sequence, first, last))
                sequence.num_stored = last
                num_chunks -= -(-(last - first) // chunk)
            if not num_chunks:
                break
        return tuple(prefills), shared

    def _replays(self) -> tuple[Stored, ...]:
        """Select the emitted tokens that preempted sequences store again."""
        replays: list[Stored] = []
        for sequence in self._running:
            first = sequence.num_stored
            if first < sequence.num_prefill or sequence.is_stored:
                continue
            last = min(first + self._engine.num_columns, len(sequence.tokens) - 1)
            replays.append(Stored(sequence, first, last))
            sequence.num_stored = last
        return tuple(replays)

    def _refuse_overflow(self, new: list[Sequence]) -> list[tuple[Arrival, SSDError]]:
        """Refuse the newest arrivals while too much waits. Preempted sequences do not count."""
        limits = self._limits
        refused: list[tuple[Arrival, SSDError]] = []
        for sequence in reversed(new):
            if self._num_new > limits.max_queue:
                error = queue_full(limits.max_queue)
            elif self._num_new_tokens > limits.max_queue_tokens and self._num_new > 1:
                error = queue_of_tokens_full(limits.max_queue_tokens)
            else:
                break
            if sequence.finish_reason is None and not self._is_running(sequence):
                self._remove(sequence)
                refused.append((sequence.arrival, error))
        return refused


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
