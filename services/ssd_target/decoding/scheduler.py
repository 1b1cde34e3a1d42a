"""Which sequences run. No tensors, no clock, no I/O.

``Scheduler.plan`` applies the events of a round to the state and returns what the round does: it
admits sequences, releases cancelled ones and counts the next prefill chunk as stored.

Sequences are admitted first come, first served. Admission needs a free slot and the KV blocks of
the sequence's maximum length, which are reserved. A running sequence therefore never waits for
memory and is never preempted. Each round stores one prefill chunk of one sequence, so that running
streams continue during a long prefill.

Decision: blocks are reserved for the maximum length. Because: every sequence ends, without
preemption and recomputation. Not chosen: growth on demand with preemption, which runs more
sequences when ``max_tokens`` is far above the tokens that are generated. Revisit when
``ssd_waiting_sequences`` stays above zero while most reserved blocks are unused.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import OverloadedError, SSDError
from ssd.types import FinishReason, SequenceId
from ssd_target.decoding.sequence import Arrival, Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a sequence has disconnected, or the process ends."""

    sequence_id: SequenceId


Event = Arrival | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """Sequences and KV blocks that the scheduler holds."""

    running: int = 0
    waiting: int = 0
    eligible: int = 0
    """Running sequences whose mode allows speculation, with or without a draft."""
    free_blocks: int = 0
    used_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Positions [first, last) of a prompt that are stored before the round."""

    sequence: Sequence
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one round does."""

    refused: tuple[tuple[Arrival, SSDError], ...] = ()
    dropped: tuple[Arrival, ...] = ()
    """Cancelled while waiting."""
    cancelled: tuple[Sequence, ...] = ()
    """Cancelled while running; their blocks are free again."""
    admitted: tuple[Sequence, ...] = ()
    prefill: Prefill | None = None
    running: tuple[Sequence, ...] = ()
    """Sequences that have a slot, oldest first."""
    decoding: tuple[Sequence, ...] = ()
    """The running sequences that take part in the round."""


class Scheduler:
    """Owns the queue, the running sequences and the KV blocks. Step thread only."""

    def __init__(self, engine: EngineConfig, max_queue: int, blocks: BlockPool) -> None:
        self._engine = engine
        self._max_queue = max_queue
        self._blocks = blocks
        self._waiting: deque[Arrival] = deque()
        self._running: dict[SequenceId, Sequence] = {}
        self._num_eligible = 0
        self._free_slots = list(range(engine.max_num_seqs - 1, -1, -1))

    @property
    def counts(self) -> SchedulerCounts:
        """Sequences and blocks now."""
        return SchedulerCounts(
            running=len(self._running),
            waiting=len(self._waiting),
            eligible=self._num_eligible,
            free_blocks=self._blocks.num_free,
            used_blocks=self._blocks.num_taken,
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def plan(self, events: Iterable[Event]) -> Plan:
        """Apply the events, admit sequences while there is room, select the sequences of the round.

        The caller must run the whole plan: its prefill chunk already counts as stored.
        """
        dropped: list[Arrival] = []
        cancelled: list[Sequence] = []
        for event in events:
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
        """Free the slot and the blocks of a sequence that has ended."""
        assert sequence.finish_reason is not None
        self._release(sequence)

    def arrivals(self) -> tuple[Arrival, ...]:
        """Return all requests that run or wait."""
        running = tuple(sequence.arrival for sequence in self._running.values())
        return running + tuple(self._waiting)

    def check(self) -> None:
        """Assert that slots, blocks and counts are consistent."""
        slots = sorted([*self._free_slots, *(each.slot for each in self._running.values())])
        assert slots == list(range(self._engine.max_num_seqs)), (
            f"slots are lost or used twice: {slots}"
        )
        blocks = [block for each in self._running.values() for block in each.blocks]
        assert len(blocks) == len(set(blocks)), "a KV block is owned twice"
        num_eligible = sum(each.may_speculate for each in self._running.values())
        assert self._num_eligible == num_eligible, f"eligible sequences: {self._num_eligible}"
        self._blocks.check()

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self._waiting and self._free_slots:
            count = -(-self._waiting[0].max_len // self._engine.block_size)
            if not self._blocks.can_allocate(count):
                break
            arrival = self._waiting.popleft()
            sequence = Sequence(
                arrival=arrival,
                slot=self._free_slots.pop(),
                blocks=tuple(self._blocks.allocate(count)),
            )
            self._running[sequence.sequence_id] = sequence
            self._num_eligible += sequence.may_speculate
            admitted.append(sequence)
        return admitted

    def _refuse_overflow(self) -> list[tuple[Arrival, SSDError]]:
        refused: list[tuple[Arrival, SSDError]] = []
        while len(self._waiting) > self._max_queue:
            refused.append((self._waiting.pop(), queue_full(self._max_queue)))
        return refused

    def _next_prefill(self) -> Prefill | None:
        for sequence in self._running.values():
            if not sequence.is_prefilled:
                return Prefill(sequence, *sequence.next_chunk(self._engine.prefill_chunk))
        return None

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence_id]
        self._num_eligible -= sequence.may_speculate
        self._free_slots.append(sequence.slot)
        self._blocks.free(list(sequence.blocks))

    def _drop_waiting(self, sequence_id: SequenceId) -> list[Arrival]:
        found = [each for each in self._waiting if each.sequence_id == sequence_id]
        for arrival in found:
            self._waiting.remove(arrival)
        return found


def queue_full(max_queue: int) -> OverloadedError:
    """Return the error of a request that arrives while the queue is full."""
    return OverloadedError(f"{max_queue} requests are waiting (max_queue); try again later")
