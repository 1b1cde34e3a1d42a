"""Admission, queue and blocks under arrivals, cancellations and ends in random order."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import OverloadedError
from ssd.types import GenerationChunk, Request, SamplingParams
from ssd_target.decoding.scheduler import Cancel, Event, Plan, Scheduler
from ssd_target.decoding.sequence import Arrival, Sequence

ENGINE = EngineConfig(max_model_len=64, max_num_seqs=3, block_size=4, prefill_chunk=8)
MAX_QUEUE = 4


class NoSink:
    is_abandoned = False

    def put(self, chunk: GenerationChunk) -> None: ...

    def fail(self, error: Exception) -> None: ...


def arrival(sequence_id: int, prompt: int = 5, limit: int = 4) -> Arrival:
    return Arrival(
        sequence_id=sequence_id,
        request=Request(
            request_id=str(sequence_id),
            prompt_ids=tuple(range(1, prompt + 1)),
            sampling=SamplingParams(max_tokens=limit),
        ),
        eos_token_ids=frozenset({0}),
        sink=NoSink(),
    )


def scheduler(blocks: int = 100) -> Scheduler:
    return Scheduler(ENGINE, MAX_QUEUE, BlockPool(blocks))


def finish_all(plan: Plan, scheduler: Scheduler) -> None:
    for sequence in plan.decoding:
        sequence.append([7] * sequence.num_remaining)
        scheduler.finish(sequence)


def test_a_prompt_is_prefilled_in_chunks_that_end_at_multiples() -> None:
    subject = scheduler()
    chunks = []
    plan = subject.plan([arrival(1, prompt=20)])
    while plan.prefill is not None:
        chunks.append((plan.prefill.first, plan.prefill.last))
        assert bool(plan.decoding) == (plan.prefill.last == 19)
        plan = subject.plan([])
    assert chunks == [(0, 8), (8, 16), (16, 19)]
    assert [row.sequence_id for row in plan.decoding] == [1]


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    plan = scheduler().plan([arrival(1, prompt=1)])
    assert plan.prefill is None
    assert len(plan.decoding) == 1


def test_running_rows_decode_while_another_prompt_is_prefilled() -> None:
    subject = scheduler()
    subject.plan([arrival(1, prompt=2)])
    plan = subject.plan([arrival(2, prompt=30)])
    assert plan.prefill is not None
    assert [row.sequence_id for row in plan.decoding] == [1]


def test_the_newest_is_refused_when_the_queue_is_full() -> None:
    plan = scheduler().plan([arrival(number) for number in range(9)])
    assert [each.sequence_id for each in plan.admitted] == [0, 1, 2]
    assert [refused.sequence_id for refused, _ in plan.refused] == [8, 7]
    assert all(isinstance(error, OverloadedError) for _, error in plan.refused)


def test_a_smaller_request_does_not_overtake_an_earlier_one() -> None:
    subject = scheduler(blocks=6)  # one is reserved
    plan = subject.plan([arrival(1, 8, 8), arrival(2, 8, 8), arrival(3, 2, 2)])
    assert [each.sequence_id for each in plan.admitted] == [1]


def test_a_cancelled_sequence_frees_its_blocks_in_the_same_plan() -> None:
    subject = scheduler(blocks=6)
    subject.plan([arrival(1, 8, 8), arrival(2, 8, 8)])
    plan = subject.plan([Cancel(1)])
    assert [each.sequence_id for each in plan.cancelled] == [1]
    assert [each.sequence_id for each in plan.admitted] == [2]
    subject.check()


def test_cancelling_an_ended_sequence_is_ignored() -> None:
    subject = scheduler()
    finish_all(subject.plan([arrival(1)]), subject)
    plan = subject.plan([Cancel(1)])
    assert not plan.cancelled
    assert not plan.dropped


@dataclass
class Ends:
    """The requests that have ended."""

    ended: set[int] = field(default_factory=set)

    def note(self, plan: Plan) -> None:
        numbers = [each.sequence_id for each, _ in plan.refused]
        numbers += [each.sequence_id for each in plan.dropped]
        numbers += [each.sequence_id for each in plan.cancelled]
        for number in numbers:
            self.end(number)

    def end(self, number: int) -> None:
        assert number not in self.ended, "a request ended twice"
        self.ended.add(number)


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), max_size=5),
        st.lists(st.integers(0, 40), max_size=3),
        st.integers(1, 5),
    ),
    max_size=20,
)


def commit_some(decoding: tuple[Sequence, ...], emitted: int) -> list[Sequence]:
    ended = []
    for sequence in decoding:
        sequence.append([7] * emitted)
        if sequence.finish_reason is not None:
            ended.append(sequence)
    return ended


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, blocks=st.integers(17, 40))
def test_every_request_ends_once_and_no_block_leaks(
    steps: list[tuple[list[tuple[int, int]], list[int], int]], blocks: int
) -> None:
    pool = BlockPool(blocks)
    all_free = pool.num_free
    subject = Scheduler(ENGINE, MAX_QUEUE, pool)
    ends = Ends()
    arrived = 0
    script = deque(steps)
    while script or not subject.is_idle:
        sizes, cancels, emitted = script.popleft() if script else ([], [], 3)
        events: list[Event] = [arrival(arrived + i, *size) for i, size in enumerate(sizes)]
        arrived += len(sizes)
        events += [Cancel(number) for number in cancels if number < arrived]
        plan = subject.plan(events)
        ends.note(plan)
        for sequence in commit_some(plan.decoding, emitted):
            subject.finish(sequence)
            ends.end(sequence.sequence_id)
        subject.check()
    assert ends.ended == set(range(arrived))
    assert pool.num_free == all_free
