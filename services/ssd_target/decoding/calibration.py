"""Start values of the controller: the times of a verify by columns and sequences."""

from collections.abc import Sequence
from math import inf

import torch

from ssd.engine.batch import PagedBatch
from ssd.ports import Clock
from ssd.speculation.estimates import Calibration, doubled
from ssd_target.decoding.ports import Runner

CALIBRATION_SECONDS = 1.0
"""The calibration of batches ends after this time, with the sizes that it has measured. Larger are
then assumed to take proportionally longer, until rounds have measured them."""
STEPS_SECONDS = 0.5
"""Time for the other numbers of columns of one sequence. Kernels compute rows in blocks, so times
grow in steps: with AVX-512, seven rows take a fifth longer than six, in bfloat16 and in float32."""
_REPETITIONS = 3


def calibrate(runner: Runner, columns: tuple[int, ...], clock: Clock) -> Calibration:
    """Measure a verify of 1, 2, 4... sequences with three numbers of columns, one with all.

    No sequence may use KV blocks of the runner yet, and all its shapes are warm. ``columns`` are
    the numbers of columns that a verify may have, ascending.
    """
    # Times between these are interpolated.
    few = tuple(sorted({columns[0], columns[len(columns) // 2], columns[-1]}))
    sizes = doubled(runner.engine.max_num_seqs)
    shapes = [(count, size) for size in sizes for count in few]
    times = _complete(_measure(runner, shapes, CALIBRATION_SECONDS, clock), few)
    if times:
        # The longest proposals come first, because the best proposals are long.
        steps = [(count, 1) for count in reversed(columns) if count not in few]
        times |= _measure(runner, steps, STEPS_SECONDS, clock)
        least = inf
        for count in reversed(columns):
            if (count, 1) in times:
                # As in ``_complete``: more columns never take less time.
                times[count, 1] = least = min(least, times[count, 1])
    return Calibration(times)


def _measure(
    runner: Runner, shapes: Sequence[tuple[int, int]], seconds: float, clock: Clock
) -> dict[tuple[int, int], float]:
    """Measure verifies by (columns, sequences), the first one at least, until the time is over."""
    began_at = clock.now()
    times: dict[tuple[int, int], float] = {}
    for count, size in shapes:
        if times and clock.now() - began_at > seconds:
            break
        prepared = runner.prepare(_batch(runner, size, count))
        times[count, size] = min(_time(runner, prepared, clock) for _ in range(_REPETITIONS))
    return times


def _complete(
    times: dict[tuple[int, int], float], columns: tuple[int, ...]
) -> dict[tuple[int, int], float]:
    """Keep the sizes that were measured with all columns; else nothing is known.

    More sequences never take less time: a smaller time of a later size shows that the first passes,
    which run while the drafts load their models, were disturbed.
    """
    sizes = {size for _, size in times}
    complete = [size for size in sizes if all((count, size) in times for count in columns)]
    return {
        (count, size): min(times[count, other] for other in complete if other >= size)
        for size in complete
        for count in columns
    }


def _time(runner: Runner, prepared: object, clock: Clock) -> float:
    began_at = clock.now()
    runner.verify(prepared).sum().item()
    return clock.now() - began_at


def _batch(runner: Runner, num_sequences: int, columns: int) -> PagedBatch:
    """Return sequences of one text, which share the first blocks."""
    engine = runner.engine
    zero_B = torch.zeros(num_sequences, dtype=torch.int64)
    num_blocks = -(-columns // engine.block_size)
    blocks_J = torch.arange(1, num_blocks + 1)
    return PagedBatch(
        torch.zeros((num_sequences, columns), dtype=torch.int64),
        zero_B,
        zero_B + columns,
        blocks_J.expand(num_sequences, -1),
    )
