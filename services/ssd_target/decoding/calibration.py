"""Start values of the controller: the times of a verify by columns and sequences."""

import torch

from ssd.engine.batch import PagedBatch
from ssd.ports import Clock
from ssd.speculation.estimates import Calibration
from ssd_target.decoding.ports import Runner

CALIBRATION_SECONDS = 1.0
"""The calibration ends after this time, with the sizes that it has measured. Larger batches are
then assumed to take proportionally longer, until rounds have measured them."""
_REPETITIONS = 3


def calibrate(runner: Runner, columns: tuple[int, ...], clock: Clock) -> Calibration:
    """Measure a verify of 1, 2, 4... sequences with each number of columns.

    Args:
        runner: no sequence may use its KV blocks yet. All shapes are warm.
        columns: numbers of columns that a verify may have, ascending.
        clock: for its times.
    """
    # Times between these are interpolated.
    measured = tuple(sorted({columns[0], columns[len(columns) // 2], columns[-1]}))
    began_at = clock.now()
    found: dict[tuple[int, int], float] = {}
    size = 1
    while size < 2 * runner.engine.max_num_seqs:
        size = min(size, runner.engine.max_num_seqs)
        for count in measured:
            if found and clock.now() - began_at > CALIBRATION_SECONDS:
                return _complete(found, measured)
            prepared = runner.prepare(_batch(runner, size, count))
            found[count, size] = min(_time(runner, prepared, clock) for _ in range(_REPETITIONS))
        size *= 2
    return _complete(found, measured)


def _complete(found: dict[tuple[int, int], float], columns: tuple[int, ...]) -> Calibration:
    """Keep the sizes that were measured with all columns; else nothing is known.

    More sequences never take less time: a smaller time of a later size shows that the first passes,
    which run while the drafts load their models, were disturbed.
    """
    sizes = {size for _, size in found}
    whole = [size for size in sizes if all((count, size) in found for count in columns)]
    return Calibration(
        {
            (count, size): min(found[count, other] for other in whole if other >= size)
            for size in whole
            for count in columns
        }
    )


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
