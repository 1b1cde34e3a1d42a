"""Start values of the controller: the times of a verify by vLLM. Imports neither vLLM nor torch.

Without attention, which needs texts, the time of a pass depends on its rows alone.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ssd.speculation.estimates import Calibration, doubled

CALIBRATION_SECONDS = 2.0
"""No pass begins after this time. More rows are then expected to take as much more as the last."""
MOST_ROWS = 256
"""Most rows of a pass: the logits of more need memory that vLLM has perhaps not left."""
_REPETITIONS = 3


def calibrate(
    lookahead: int, max_num_seqs: int, max_rows: int, seconds_of: Callable[[int], float]
) -> Calibration:
    """Measure passes of 1, 2, 4... rows, up to a verify of all sequences.

    Args:
        lookahead: tokens of a full proposal (K).
        max_num_seqs: most sequences of a step.
        max_rows: most rows of a pass.
        seconds_of: runs a pass of so many rows and returns its time, the same on all ranks.

    Returns:
        the times of 1 to K+1 columns at 1, 2, 4... sequences; unknown if not even the verify of one
        sequence was measured.
    """
    most = min((lookahead + 1) * max_num_seqs, max_rows, MOST_ROWS)
    seconds_by_rows: dict[int, float] = {}
    spent = 0.0
    # All sizes once before any is repeated: first passes are slow, but those of a batch decide.
    for rows in doubled(most) * _REPETITIONS:
        if spent >= CALIBRATION_SECONDS:
            break
        seconds = seconds_of(rows)
        spent += seconds
        seconds_by_rows[rows] = min(seconds, seconds_by_rows.get(rows, seconds))
    if max(seconds_by_rows) <= lookahead:
        return Calibration()
    points = _undisturbed(seconds_by_rows)
    counts, times = [count for count, _ in points], [seconds for _, seconds in points]
    slope = _slope(*points[-2:]) if len(points) > 1 else 0.0

    def time_of(rows: int) -> float:
        return float(np.interp(rows, counts, times)) + slope * max(0, rows - counts[-1])

    return Calibration(
        {
            (columns, size): time_of(columns * size)
            for columns in range(1, lookahead + 2)
            for size in doubled(max_num_seqs)
        }
    )


def _undisturbed(seconds_by_rows: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the rows and times on the largest function below them that never falls and is convex.

    Rows first fill the time in which a pass reads the weights, and then add to it. So a time above
    this function is that of a first pass, or of one beside other work.
    """
    points: list[tuple[int, float]] = []
    for point in sorted(seconds_by_rows.items()):
        while points and (
            points[-1][1] > point[1]
            or (len(points) > 1 and _slope(points[-2], points[-1]) > _slope(points[-2], point))
        ):
            points.pop()
        points.append(point)
    return points


def _slope(first: tuple[int, float], last: tuple[int, float]) -> float:
    return (last[1] - first[1]) / (last[0] - first[0])
