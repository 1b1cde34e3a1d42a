"""Which prompts the verify of a step stores, where the engine can do that."""

import pytest
from tests.unit.ssd_target.decoding.plans import ENGINE, arrival, ids, run_step

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.settings import TargetSettings


def joining(step_tokens: int = 8, joined_rows: int = 1000) -> Scheduler:
    """A scheduler for verifies that can store prompts too."""
    limits = TargetSettings(step_tokens=step_tokens)
    return Scheduler(ENGINE, BlockPool(100), limits, joined_rows=joined_rows)


@pytest.mark.parametrize(
    ("step_tokens", "joined_rows", "stored"),
    [(8, 1000, 8), (48, 1000, 48), (96, 1000, 90), (256, 1000, 100), (96, 13, 24)],
)
def test_a_verify_stores_many_tokens_of_prompts_within_the_budget(
    step_tokens: int, joined_rows: int, stored: int
) -> None:
    subject = joining(step_tokens, joined_rows)
    run_step(subject, [arrival(1, prompt=1, limit=60)])
    # The last of the seven chunks of a prompt has two positions.
    plan = run_step(subject, [arrival(2, prompt=50), arrival(3, (9,) * 50)], 1)
    assert plan.is_joined
    assert plan.num_stored == stored


def test_the_step_that_completes_a_prompt_by_its_verify_chooses_the_first_token() -> None:
    subject = joining(step_tokens=16)
    plan = run_step(subject, [arrival(1, prompt=9)])
    assert plan.is_joined
    assert [part for _, part in plan.prefills] == [range(9)]
    (first,) = plan.completing
    assert plan.decoding == [first]
    first.append([7])
    plan = run_step(subject, [arrival(2, (9,) * 20), arrival(3, (8,) * 4)])
    assert ids(plan.decoding) == [1]
    plan = run_step(subject)
    # The parts that complete a prompt come first.
    assert [(each.sequence_id, part) for each, part in plan.prefills] == [
        (2, range(16, 20)),
        (3, range(4)),
    ]
    assert ids(plan.completing) == [2, 3]
    assert ids(plan.decoding) == [1, 2, 3]


def test_a_sequence_that_runs_again_does_not_choose_its_first_token_again() -> None:
    subject = Scheduler(ENGINE, BlockPool(17), TargetSettings(prefix_cache=False), joined_rows=1000)
    first, second = run_step(subject, [arrival(1, 9, 55), arrival(2, (9,) * 24, 40)]).running
    for _ in range(3):
        run_step(subject)
    first.append([7])
    second.append([7])
    while not run_step(subject).preempted:
        first.append([7] * 4)
    first.append([7] * first.num_remaining)
    subject.finish(first)
    plan = run_step(subject)
    assert [part for _, part in plan.prefills] == [range(24)]
    assert plan.decoding == plan.completing == []
    assert run_step(subject).decoding == [second]
