"""Sequences without a request handler."""

from typing import Any

from ssd.testing.sink import ListSink
from ssd.types import SamplingParams, TokenId
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.decoding.sequence import Sequence


def make_sequence(
    prompt_ids: tuple[TokenId, ...] = (5, 6, 7),
    sampling: SamplingParams | None = None,
    max_tokens: int | None = None,
    **others: Any,
) -> Sequence:
    """A sequence with the seed and the limit of its parameters; ``others`` are other fields."""
    sampling = sampling or SamplingParams()
    others.setdefault("seed", sampling.seed or 0)
    limit = max_tokens or sampling.max_tokens or 256
    others.setdefault("max_len", len(prompt_ids) + limit)
    others.setdefault("sink", ListSink())
    others.setdefault("sequence_id", 1)
    return Sequence(prompt_ids=prompt_ids, sampling=sampling, **others)


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that slots, blocks, queues and counts are consistent."""
    running, waiting = scheduler._running, scheduler._waiting
    slots = sorted([*scheduler._free_slots, *(each.slot for each in running)])
    assert slots == list(range(scheduler._engine.max_num_seqs)), "slots are lost or used twice"
    for queue in (running, waiting):
        assert queue == sorted(queue, key=lambda each: each.precedence), "the order is lost"
    assert {*running, *waiting} == set(scheduler.sequences())
    assert not any(each.blocks for each in waiting), "a waiting sequence owns blocks"
    for auto_speculates in (True, False):
        eligible = [each for each in running if each.may_speculate]
        expected = sum(auto_speculates or not each.is_auto for each in eligible)
        assert scheduler.counts(auto_speculates=auto_speculates).eligible == expected
    new = [each for each in waiting if not each.num_preemptions]
    prompts = [each.num_prompt for each in new if not each.choice]
    assert scheduler.num_new == len(new)
    assert (scheduler._num_new_prompts, scheduler._num_new_tokens) == (len(prompts), sum(prompts))
    owned = {block for each in running for block in each.blocks}
    assert len(owned) == scheduler.blocks.num_taken, "a KV block has no owner"
    for each in running:
        assert len(each.blocks) == len(set(each.blocks)), "a sequence owns a KV block twice"
    scheduler.blocks.check()
