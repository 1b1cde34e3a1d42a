"""Start values of the controller: the times of a verify by vLLM. Imports neither vLLM nor torch.

Without attention, which needs texts, the time of a pass depends on its rows alone.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ssd.speculation.estimates import Calibration

CALIBRATION_SECONDS = 2.0
"""No pass begins after this time. More rows are then expected to take as much more as the last."""
MOST_ROWS = 256
"""Of a pass: the logits of more need memory that vLLM has perhaps not left."""
_REPETITIONS = 3


def calibrate(
    lookahead: int, max_num_seqs: int, max_rows: int, seconds_of: Callable[[int], float]
) -> Calibration:
    """Measure passes of 1, 2, 4... rows, up to a verify of all sequences.

    Args:
        lookahead: tokens of a full proposal (K).
        max_num_seqs: of a step.
        max_rows: of a pass.
        seconds_of: runs a pass of so many rows and returns its time, the same on all ranks.

    Returns:
        the times of 1 to K+1 columns at 1, 2, 4... sequences; unknown if not even the verify of one
        sequence was measured.
    """
    most = min((lookahead + 1) * max_num_seqs, max_rows, MOST_ROWS)
    found: dict[int, float] = {}
    spent = 0.0
    # All sizes once before any is repeated: first passes are slow, but those of a batch decide.
    for rows in _doubled(most) * _REPETITIONS:
        if spent >= CALIBRATION_SECONDS:
            break
        seconds = seconds_of(rows)
        spent += seconds
        found[rows] = min(seconds, found.get(rows, seconds))
    if max(found) <= lookahead:
        return Calibration()
    kept = _undisturbed(found)
    counts, times = [count for count, _ in kept], [seconds for _, seconds in kept]
    slope = _slope(*kept[-2:]) if len(kept) > 1 else 0.0

    def time_of(rows: int) -> float:
        return float(np.interp(rows, counts, times)) + slope * max(0, rows - counts[-1])

    return Calibration(
        {
            (columns, size): time_of(columns * size)
            for columns in range(1, lookahead + 2)
            for size in _doubled(max_num_seqs)
        }
    )


def _undisturbed(found: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the rows and times on the largest function below them that never falls and is convex.

    Rows first fill the time in which a pass reads the weights, and then add to it. So a time above
    this function is that of a first pass, or of one beside other work.
    """
    kept: list[tuple[int, float]] = []
    for rows, seconds in sorted(found.items()):
        while kept and (
            kept[-1][1] > seconds
            or (len(kept) > 1 and _slope(kept[-2], kept[-1]) > _slope(kept[-2], (rows, seconds)))
        ):
            kept.pop()
        kept.append((rows, seconds))
    return kept


def _slope(first: tuple[int, float], last: tuple[int, float]) -> float:
    return (last[1] - first[1]) / (last[0] - first[0])


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4... and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
