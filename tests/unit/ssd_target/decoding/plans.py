"""Steps of a scheduler, for its tests."""

from collections.abc import Iterable

from tests.sequences import make_sequence

from ssd.engine.config import EngineConfig
from ssd_target.decoding.scheduler import Event, Scheduler, StepPlan
from ssd_target.decoding.sequence import Sequence

K = 3
ENGINE = EngineConfig(
    max_model_len=64, max_num_seqs=3, num_columns=1 + K, block_size=4, prefill_chunk=8
)


def arrival(
    sequence_id: int, prompt: int | tuple[int, ...] = 5, limit: int = 4, priority: int = 0
) -> Sequence:
    return make_sequence(
        tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt,
        sequence_id=sequence_id,
        max_tokens=limit,
        priority=priority,
        eos_token_ids=frozenset({0}),
    )


def ids(sequences: Iterable[Sequence]) -> list[int]:
    return [each.sequence_id for each in sequences]


def run_step(subject: Scheduler, events: Iterable[Event] = (), num_rows: int = 0) -> StepPlan:
    """Plan a step whose prefills store finite entries."""
    plan = subject.plan(events, num_rows)
    for sequence, positions in plan.prefills:
        subject.keep(sequence, positions)
    return plan
