"""Which sequences run: (state, events) -> plan. No tensors, no clock, no I/O.

A sequence is admitted when a slot is free and the KV blocks for all that it may ever grow to can be
reserved, first come first served; so a running sequence never waits for memory and is never
preempted. One prefill chunk of one sequence goes with each round, so running streams keep going.

Decision: whole-life reservation of blocks. Because: every sequence ends, with no preemption and no
replay to get right. Not chosen: growth on demand with preemption by recomputation, which packs more
sequences when ``max_tokens`` is set far above what is used. Revisit when ``ssd_waiting_sequences``
stays above zero while most reserved blocks are unused.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import OverloadedError, SSDError
from ssd.types import FinishReason, SequenceId
from ssd_target.decoding.sequence import Arrival, Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller of a sequence has gone, or the process is leaving."""

    sequence_id: SequenceId


Event = Arrival | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may run and wait."""

    max_num_seqs: int
    max_queue: int
    block_size: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What there is to do."""

    running: int = 0
    waiting: int = 0
    eligible: int = 0
    """Those of the running whose mode may speculate, with a draft or without."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Positions [first, last) of a prompt, to be stored before the round."""

    sequence: Sequence
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What this round does."""

    refused: tuple[tuple[Arrival, SSDError], ...] = ()
    dropped: tuple[Arrival, ...] = ()
    """Cancelled while waiting."""
    cancelled: tuple[Sequence, ...] = ()
    """Cancelled while running; their blocks are free again."""
    admitted: tuple[Sequence, ...] = ()
    prefill: Prefill | None = None
    running: tuple[Sequence, ...] = ()
    """Everyone with a slot, oldest first."""
    decoding: tuple[Sequence, ...] = ()
    """Those of them that are rows of the round."""


class Scheduler:
    """Queue, running set and KV blocks. Step thread only."""

    def __init__(self, limits: Limits, blocks: BlockPool) -> None:
        self._limits = limits
        self._blocks = blocks
        self._waiting: deque[Arrival] = deque()
        self._running: dict[SequenceId, Sequence] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_changes = 0
        """Grows whenever who runs or waits has changed."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def load(self) -> Load:
        """Counts of what runs and waits."""
        return Load(
            running=self.num_running,
            waiting=self.num_waiting,
            eligible=sum(sequence.wants_draft for sequence in self._running.values()),
        )

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return self._blocks.num_free

    @property
    def num_used_blocks(self) -> int:
        """KV blocks of running sequences."""
        return self._blocks.num_taken

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def plan(self, events: Iterable[Event]) -> Plan:
        """Take the events in, admit whom there is room for, choose the rows of the round."""
        dropped: list[Arrival] = []
        cancelled: list[Sequence] = []
        for event in events:
            self.num_changes += 1
            if isinstance(event, Arrival):
                self._waiting.append(event)
            elif event.sequence_id in self._running:
                sequence = self._running[event.sequence_id]
                sequence.finish_reason = FinishReason.CANCELLED
                self._release(sequence)
                cancelled.append(sequence)
            else:
                dropped += self._drop_waiting(event.sequence_id)
        admitted = self._admit()
        refused = self._refuse_overflow()
        prefill = self._next_prefill()
        if prefill is not None:
            prefill.sequence.prefilled(prefill.last)
        return Plan(
            refused=tuple(refused),
            dropped=tuple(dropped),
            cancelled=tuple(cancelled),
            admitted=tuple(admitted),
            prefill=prefill,
            running=tuple(self._running.values()),
            decoding=tuple(each for each in self._running.values() if each.is_prefilled),
        )

    def finish(self, sequence: Sequence) -> None:
        """Free what an ended sequence holds."""
        assert sequence.finish_reason is not None
        self._release(sequence)

    def everyone(self) -> tuple[Arrival, ...]:
        """All requests that run or wait."""
        running = tuple(sequence.arrival for sequence in self._running.values())
        return running + tuple(self._waiting)

    def check(self) -> None:
        """Assert that slots and blocks add up."""
        slots = sorted([*self._free_slots, *(each.slot for each in self._running.values())])
        assert slots == list(range(self._limits.max_num_seqs)), f"slots do not add up: {slots}"
        blocks = [block for each in self._running.values() for block in each.blocks]
        assert len(blocks) == len(set(blocks)), "a KV block is owned twice"
        self._blocks.check()

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self._waiting and self._free_slots:
            count = -(-self._waiting[0].max_len // self._limits.block_size)
            if not self._blocks.can_allocate(count):
                break
            arrival = self._waiting.popleft()
            sequence = Sequence(
                arrival=arrival,
                slot=self._free_slots.pop(),
                blocks=tuple(self._blocks.allocate(count)),
            )
            self._running[sequence.sequence_id] = sequence
            self.num_changes += 1
            admitted.append(sequence)
        return admitted

    def _refuse_overflow(self) -> list[tuple[Arrival, SSDError]]:
        refused: list[tuple[Arrival, SSDError]] = []
        while len(self._waiting) > self._limits.max_queue:
            refused.append((self._waiting.pop(), queue_full(self._limits.max_queue)))
        return refused

    def _next_prefill(self) -> Prefill | None:
        for sequence in self._running.values():
            if not sequence.is_prefilled:
                return Prefill(sequence, *sequence.next_chunk(self._limits.prefill_chunk))
        return None

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence_id]
        self.num_changes += 1
        self._free_slots.append(sequence.slot)
        self._blocks.free(list(sequence.blocks))

    def _drop_waiting(self, sequence_id: SequenceId) -> list[Arrival]:
        found = [each for each in self._waiting if each.sequence_id == sequence_id]
        for arrival in found:
            self._waiting.remove(arrival)
        return found


def queue_full(max_queue: int) -> OverloadedError:
    """The refusal of a request that finds the queue full."""
    return OverloadedError(f"{max_queue} requests are waiting (max_queue); try again later")
