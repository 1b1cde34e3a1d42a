"""Admission, queue, blocks and prefix cache under events in random order.

No model runs: ``Ledger`` notes what each plan stores in which block.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sequences import check_scheduler
from tests.unit.ssd_target.decoding.plans import ENGINE, K, arrival, ids, run_step

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import OverloadedError
from ssd.types import FinishReason
from ssd_target.decoding.scheduler import Event, Scheduler, StepPlan
from ssd_target.decoding.sequence import PLACES_PER_PRIORITY, Sequence
from ssd_target.settings import TargetSettings

MAX_QUEUE = 4


def scheduler(
    blocks: int = 100,
    *,
    max_queue: int = MAX_QUEUE,
    max_queue_tokens: int = 1000,
    step_tokens: int = 8,
    prefix_cache: bool = True,
    engine: EngineConfig = ENGINE,
) -> Scheduler:
    limits = TargetSettings(
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        step_tokens=step_tokens,
        prefix_cache=prefix_cache,
    )
    return Scheduler(engine, BlockPool(blocks), limits)


def run_until_stored(subject: Scheduler, *events: Event) -> Sequence:
    """Store the only prompt; return its sequence, which decodes now."""
    (sequence,) = run_step(subject, events).running
    while not sequence.is_stored:
        run_step(subject)
    return sequence


def end(subject: Scheduler, sequence: Sequence) -> None:
    sequence.append([7] * sequence.num_remaining)
    subject.finish(sequence)


def test_a_prompt_is_stored_in_chunks_that_end_at_multiples() -> None:
    subject = scheduler()
    chunks = []
    plan = run_step(subject, [arrival(1, prompt=20)])
    while plan.prefills:
        assert bool(plan.decoding) == (plan.prefills[-1][1].stop == 19)
        chunks += [(each.start, each.stop) for _, each in plan.prefills]
        plan = run_step(subject)
    assert chunks == [(0, 8), (8, 16), (16, 19)]
    assert ids(plan.decoding) == [1]


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    plan = run_step(scheduler(), [arrival(1, prompt=1)])
    assert not plan.num_stored
    assert len(plan.decoding) == 1


def test_running_rows_decode_while_another_prompt_is_stored() -> None:
    subject = scheduler()
    run_step(subject, [arrival(1, prompt=2)])
    plan = run_step(subject, [arrival(2, prompt=30)])
    assert ids(plan.decoding) == [1]
    assert ids(each for each, _ in plan.prefills) == [2]


def test_the_token_budget_of_a_step_is_shared_by_several_prompts() -> None:
    subject = scheduler(step_tokens=24)
    plan = run_step(subject, [arrival(1, 18), arrival(2, (9,) * 30), arrival(3, 30)])
    assert [(each.start, each.stop) for _, each in plan.prefills] == [(0, 17)]
    plan = run_step(subject)
    assert [(each.start, each.stop) for _, each in plan.prefills] == [(0, 16)]


@pytest.mark.parametrize(("num_rows", "stored"), [(1, 8), (15, 8), (17, 16), (40, 40), (100, 48)])
def test_beside_decoding_rows_a_step_stores_as_many_tokens_within_the_budget(
    num_rows: int, stored: int
) -> None:
    subject = scheduler(step_tokens=48)
    run_step(subject, [arrival(1, prompt=1, limit=60)])
    plan = run_step(subject, [arrival(2, prompt=60)], num_rows)
    assert plan.num_stored == stored


def test_beside_one_decoding_row_each_new_prompt_stores_a_chunk_within_the_budget() -> None:
    subject = scheduler(step_tokens=48)
    run_step(subject, [arrival(1, prompt=1, limit=60)])
    plan = run_step(subject, [arrival(2, prompt=40), arrival(3, (9,) * 40)], 1)
    assert plan.num_stored == 16
    assert ids(each for each, _ in plan.prefills) == [2]


def test_the_newest_is_refused_when_the_queue_is_full() -> None:
    plan = run_step(scheduler(), [arrival(number) for number in range(9)])
    assert [each.sequence_id for each in plan.admitted] == [0, 1, 2]
    assert [refused.sequence_id for refused, _ in plan.refused] == [8, 7]
    assert all(isinstance(error, OverloadedError) for _, error in plan.refused)


def test_a_request_is_refused_when_too_many_prompt_tokens_wait() -> None:
    subject = scheduler(max_queue_tokens=30)
    run_step(subject, [arrival(number) for number in range(3)])
    plan = run_step(subject, [arrival(3, 40), arrival(4, 1)])
    # A prompt above the limit may wait alone.
    assert [refused.sequence_id for refused, _ in plan.refused] == [4]
    assert "30 prompt tokens are waiting (max_queue_tokens)" in str(plan.refused[0][1])
    check_scheduler(subject)


def test_the_continuations_of_a_request_count_with_one_prompt() -> None:
    def request(first: int, prompt: int) -> list[Sequence]:
        return [replace(arrival(first + k, prompt), choice=k) for k in range(4)]

    subject = scheduler(max_queue=20, max_queue_tokens=30)
    alone = run_step(subject, request(0, 40))
    assert (ids(alone.running), alone.refused) == ([0, 1, 2], [])
    plan = run_step(subject, [*request(4, 20)])
    assert not plan.refused
    plan = run_step(subject, [*request(8, 20)])
    assert [refused.sequence_id for refused, _ in plan.refused] == [8]
    check_scheduler(subject)


def test_a_smaller_request_does_not_overtake_an_earlier_one() -> None:
    subject = scheduler(blocks=6)  # one is reserved
    plan = run_step(subject, [arrival(1, 8, 8), arrival(2, 14, 2), arrival(3, 2, 2)])
    assert ids(plan.admitted) == [1]


def test_a_cancelled_sequence_frees_its_blocks_in_the_same_plan() -> None:
    subject = scheduler(blocks=6)
    run_step(subject, [arrival(1, 14, 2), arrival(2, 14, 2)])
    plan = run_step(subject, [1])
    assert ids(plan.cancelled) == [1]
    assert ids(plan.admitted) == [2]
    check_scheduler(subject)


def test_a_higher_priority_is_admitted_first_and_equal_ones_keep_their_order() -> None:
    subject = scheduler()
    run_step(subject, [arrival(number) for number in range(3)])
    run_step(subject, [arrival(3), arrival(4, priority=1), arrival(5, priority=1), arrival(6)])
    order = []
    while not subject.is_idle:
        plan = run_step(subject)
        order += ids(plan.admitted)
        if plan.decoding:
            end(subject, plan.decoding[-1])
    assert order == [4, 5, 3, 6]


def test_a_request_is_overtaken_by_a_bounded_number_of_more_important_ones() -> None:
    subject = scheduler(max_queue=10)
    run_step(subject, [arrival(0, 1), arrival(1, 1), arrival(2, 1), arrival(3, 1)])
    overtaken = 0
    for number in range(4, 4 + 3 * PLACES_PER_PRIORITY):
        plan = run_step(subject, [arrival(number, 1, priority=2)])
        if 3 in ids(plan.admitted):
            break
        overtaken += len(plan.admitted)
        end(subject, plan.decoding[0])
    assert overtaken == 2 * PLACES_PER_PRIORITY - 1


def test_blocks_are_allocated_as_a_sequence_grows() -> None:
    subject = scheduler()
    sequence = run_until_stored(subject, arrival(1, 5, 50))
    for _ in range(49):
        plan = run_step(subject)
        assert len(sequence.blocks) == -(-min(len(sequence.tokens) + K, 54) // 4)
        has_grown = len(sequence.tokens) % 4 == 2 and len(sequence.tokens) <= 50
        assert (sequence in plan.moved) == has_grown
        sequence.append([7])


def test_the_last_sequence_is_preempted_and_stores_its_text_in_the_same_way() -> None:
    subject = scheduler(blocks=17, prefix_cache=False)
    first = run_until_stored(subject, arrival(1, 9, 55))
    plan = run_step(subject, [arrival(2, tuple(range(20, 40)), 30)])
    (second,) = plan.admitted
    while not second.is_stored:
        run_step(subject)
    for _ in range(12):
        run_step(subject)
        second.append([7])
    text = list(second.tokens)
    while not (plan := run_step(subject)).preempted:
        assert ids(plan.decoding) == [1, 2]
        first.append([7])
    assert plan.preempted == [second]
    assert plan.decoding == [first]
    assert not second.blocks
    check_scheduler(subject)
    end(subject, first)
    plan = run_step(subject)
    assert plan.admitted == [second]
    stored = list(plan.prefills)
    while not plan.decoding:
        plan = run_step(subject)
        stored += [*plan.prefills, *plan.replays]
    assert [(each.start, each.stop) for _, each in stored] == [
        *((0, 8), (8, 16), (16, 19)),
        *((19, 23), (23, 27), (27, 31)),
    ]
    assert second.tokens == text


def test_a_repeated_prompt_shares_the_blocks_of_whole_chunks() -> None:
    subject = scheduler()
    first = run_until_stored(subject, arrival(1, 20))
    blocks = first.blocks[:4]
    end(subject, first)
    plan = run_step(subject, [arrival(2, 20), arrival(3, (*range(1, 13), *range(50, 60)))])
    second, third = plan.admitted
    assert second.blocks[:4] == blocks
    assert [(each.sequence_id, part.start) for each, part in plan.prefills] == [(2, 16)]
    # 12 equal tokens are 3 blocks, but a prefill begins at a multiple of 8.
    assert third.blocks[:2] == blocks[:2]
    assert (second.num_cached, third.num_cached) == (16, 8)
    check_scheduler(subject)


def test_equal_prompts_that_arrive_together_are_stored_once() -> None:
    subject = scheduler()
    plan = run_step(subject, [arrival(number, 20) for number in range(3)])
    stored = []
    while plan.num_stored:
        stored += [(each.sequence_id, part.start) for each, part in plan.prefills]
        check_scheduler(subject)
        plan = run_step(subject)
    assert stored == [(0, 0), (0, 8), (0, 16), (1, 16), (2, 16)]
    first, second, third = plan.decoding
    assert first.blocks[:4] == second.blocks[:4] == third.blocks[:4]


@pytest.mark.parametrize(("num_steps", "num_cached"), [(1, 0), (2, 8), (3, 8), (4, 16)])
def test_a_block_that_a_chunk_fills_in_part_is_not_shared(num_steps: int, num_cached: int) -> None:
    """Chunks of 4 tokens in blocks of 8; the first prompt is cancelled after some of them."""
    engine = replace(ENGINE, block_size=8, prefill_chunk=4)
    subject = scheduler(step_tokens=4, engine=engine)
    run_step(subject, [arrival(1, 25)])
    for _ in range(num_steps - 1):
        run_step(subject)
    plan = run_step(subject, [1, arrival(2, 25)])
    assert [each.num_cached for each in plan.admitted] == [num_cached]
    assert [(each.start, each.stop) for _, each in plan.prefills] == [(num_cached, num_cached + 4)]


@pytest.mark.parametrize("num_cached", [0, 8])
def test_a_preempted_sequence_does_not_count_its_own_entries_as_cached(num_cached: int) -> None:
    subject = scheduler(blocks=17)
    prompt = tuple(range(20, 40))
    end(subject, run_until_stored(subject, arrival(0, (*prompt[:num_cached], 99))))
    first = run_until_stored(subject, arrival(1, 9, 55))
    (second,) = run_step(subject, [arrival(2, prompt, 30)]).admitted
    assert second.num_cached == num_cached
    while not second.is_stored:
        run_step(subject)
    while not run_step(subject).preempted:
        first.append([7])
    end(subject, first)
    plan = run_step(subject)
    assert plan.admitted == [second]
    assert [each.start for _, each in plan.prefills] == [16]
    assert second.num_cached == num_cached


def test_the_least_recently_used_blocks_lose_their_entries_first() -> None:
    subject = scheduler(blocks=17)
    for number, start in ((1, 100), (2, 200), (3, 100)):
        prompt = tuple(range(start, start + 17))
        end(subject, run_until_stored(subject, arrival(number, prompt)))
    end(subject, run_until_stored(subject, arrival(4, tuple(range(300, 340)))))
    plan = run_step(
        subject, [arrival(5, tuple(range(100, 117))), arrival(6, tuple(range(200, 217)))]
    )
    assert [each.num_cached for each in plan.admitted] == [16, 0]


def test_a_failed_prefill_stores_nothing_for_other_prompts() -> None:
    subject = scheduler()
    (sequence,) = subject.plan([arrival(1, 20)]).running
    sequence.finish_reason = FinishReason.FAILED
    subject.finish(sequence)
    (again,) = run_step(subject, [arrival(2, 20)]).admitted
    assert again.num_cached == 0


def test_without_the_prefix_cache_no_block_is_shared() -> None:
    subject = scheduler(prefix_cache=False)
    end(subject, run_until_stored(subject, arrival(1, 20)))
    (again,) = run_step(subject, [arrival(2, 20)]).admitted
    assert again.num_cached == 0
    assert subject.blocks.num_cached == 0


def test_cancelling_an_ended_sequence_is_ignored() -> None:
    subject = scheduler()
    end(subject, run_until_stored(subject, arrival(1)))
    plan = run_step(subject, [1])
    assert not plan.cancelled
    assert not plan.dropped


class Ledger:
    """The token and its position that each KV entry holds; checks what is stored and read."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.entries: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, plan: StepPlan) -> None:
        for sequence, part in plan.prefills:
            assert part.start % ENGINE.prefill_chunk == 0
            assert part.stop <= sequence.num_prefill
        for sequence, part in (*plan.prefills, *plan.replays):
            assert part.start < part.stop < len(sequence.tokens) + plan.is_joined
            self.store(sequence, part.start, part.stop)
        for place, sequence in enumerate(plan.completing):
            completed, part = plan.prefills[place]
            assert completed is sequence
            assert part.stop == len(sequence.tokens)
        for sequence in plan.decoding:
            last = len(sequence.tokens) - 1
            self.store(sequence, last, last)
            # The longest proposal fits.
            assert len(sequence.blocks) * 4 >= min(last + 1 + K, sequence.max_len - 1)

    def store(self, sequence: Sequence, first: int, last: int) -> None:
        for position in range(last):
            entry = sequence.blocks[position // 4], position % 4
            text = tuple(sequence.tokens[: position + 1])
            if position >= first:
                assert self.pool._num_owners[entry[0]] == 1, "a shared entry is stored again"
                self.entries[entry] = text
            assert self.entries[entry] == text, "an entry of another text, or none"


@dataclass
class Ends:
    """The requests that have ended."""

    ended: set[int] = field(default_factory=set)

    def add(self, plan: StepPlan) -> None:
        for number in [each.sequence_id for each, _ in plan.refused]:
            self.end(number)
        for number in ids((*plan.dropped, *plan.cancelled)):
            self.end(number)

    def end(self, number: int) -> None:
        assert number not in self.ended, "a request ended twice"
        self.ended.add(number)


PROMPTS = st.one_of(
    st.integers(1, 50),  # They begin alike.
    st.lists(st.integers(1, 3), min_size=1, max_size=50).map(tuple),
)
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(PROMPTS, st.integers(1, 64), st.integers(-2, 2)), max_size=5),
        st.lists(st.integers(0, 40), max_size=3),
        st.integers(1, 4),
    ),
    max_size=20,
)


def commit_some(decoding: list[Sequence], emitted: int) -> list[Sequence]:
    ended = []
    for sequence in decoding:
        # Texts differ after equal prompts.
        sequence.append([100 + sequence.sequence_id] * emitted)
        if sequence.finish_reason is not None:
            ended.append(sequence)
    return ended


@settings(max_examples=80, deadline=None)
@given(
    steps=STEPS,
    blocks=st.integers(17, 40),
    step_tokens=st.sampled_from([8, 40]),
    prefix_cache=st.booleans(),
    joins_prompts=st.booleans(),
)
def test_every_request_ends_once_and_no_block_leaks(
    steps: list[tuple[list[tuple[int | tuple[int, ...], int, int]], list[int], int]],
    blocks: int,
    step_tokens: int,
    *,
    prefix_cache: bool,
    joins_prompts: bool,
) -> None:
    pool = BlockPool(blocks)
    limits = TargetSettings(max_queue=MAX_QUEUE, step_tokens=step_tokens, prefix_cache=prefix_cache)
    subject = Scheduler(ENGINE, pool, limits, joined_rows=1000 if joins_prompts else 0)
    ends, ledger = Ends(), Ledger(pool)
    arrived = num_rows = num_steps = 0
    script = deque(steps)
    while script or not subject.is_idle:
        sizes, cancels, emitted = script.popleft() if script else ([], [], 3)
        events: list[Event] = []
        for number, (prompt, limit, priority) in enumerate(sizes, arrived):
            length = prompt if isinstance(prompt, int) else len(prompt)
            fitting = min(limit, ENGINE.max_model_len - length)
            events.append(arrival(number, prompt, fitting, priority))
        arrived += len(sizes)
        events += [number for number in cancels if number < arrived]
        plan = run_step(subject, events, num_rows)
        ends.add(plan)
        ledger.run(plan)
        num_rows = len(plan.decoding) * (1 + K)
        lengths = [len(each.tokens) for each in plan.decoding]
        for sequence in commit_some(plan.decoding, emitted):
            subject.finish(sequence)
            ends.end(sequence.sequence_id)
        for sequence, length in zip(plan.decoding, lengths, strict=True):
            if sequence.finish_reason is None:
                ledger.store(sequence, length - 1, len(sequence.tokens) - 1)
        check_scheduler(subject)
        num_steps += 1
        assert num_steps < 5000, "requests do not end"
    assert ends.ended == set(range(arrived))
    assert pool.num_free == blocks - 1


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(34, 64)), min_size=2, max_size=7),
    blocks=st.integers(17, 24),
)
@example(lengths=[(1, 38), (2, 49), (17, 42)], blocks=23)
def test_sequences_of_maximum_length_end_in_order_without_a_livelock(
    lengths: list[tuple[int, int]], blocks: int
) -> None:
    subject = scheduler(blocks, max_queue=10)
    requests = [
        arrival(number, (number + 1,) * prompt, length - prompt)
        for number, (prompt, length) in enumerate(lengths)
    ]
    plan, order, num_steps = run_step(subject, requests), [], 0
    while not subject.is_idle:
        for sequence in commit_some(plan.decoding, 1):
            subject.finish(sequence)
            order.append(sequence.sequence_id)
        # The first one always makes progress.
        assert plan.decoding[:1] == plan.running[:1] or plan.num_stored
        plan = run_step(subject)
        check_scheduler(subject)
        num_steps += 1
    assert sorted(order) == list(range(len(lengths)))
    total = sum(length for _, length in lengths)
    assert num_steps < 3 * total, "preempted sequences store their texts too often"
