"""Start values from passes of vLLM: which passes run, and what follows from their times."""

import pytest

from ssd_vllm.calibration import CALIBRATION_SECONDS, MOST_ROWS, calibrate

LOOKAHEAD = 6


class Passes:
    """A target whose pass of ``rows`` takes ``fixed + each * rows`` seconds."""

    def __init__(self, fixed: float, each: float, slowed: dict[int, float] | None = None) -> None:
        self.rows: list[int] = []
        self._fixed, self._each, self._slowed = fixed, each, slowed or {}

    def __call__(self, rows: int) -> float:
        self.rows.append(rows)
        return (self._fixed + self._each * rows) * self._slowed.get(rows, 1.0)


def test_passes_of_doubled_rows_up_to_a_whole_batch_give_the_times_of_all_verifies() -> None:
    passes = Passes(0.004, 0.001)
    found = calibrate(LOOKAHEAD, 6, 1024, passes)
    assert passes.rows == [1, 2, 4, 8, 16, 32, 42] * 3
    assert set(found.seconds) == {
        (columns, size) for columns in range(1, 8) for size in (1, 2, 4, 6)
    }
    for (columns, size), seconds in found.seconds.items():
        assert seconds == pytest.approx(0.004 + 0.001 * columns * size)


def test_passes_need_little_memory_also_where_many_sequences_may_run() -> None:
    passes = Passes(0.004, 0.0001)
    found = calibrate(LOOKAHEAD, 1024, 8192, passes)
    assert max(passes.rows) == MOST_ROWS
    assert found.verify_seconds(7, 1024) == pytest.approx(0.004 + 0.0001 * 7 * 1024)


def test_the_passes_of_a_slow_target_end_in_time() -> None:
    passes = Passes(0.4, 0.05)
    found = calibrate(LOOKAHEAD, 8, 1024, passes)
    assert passes.rows == [1, 2, 4, 8]
    assert sum(0.4 + 0.05 * rows for rows in passes.rows[:-1]) < CALIBRATION_SECONDS
    assert found.verify_seconds(1, 8) == pytest.approx(0.8)
    assert found.verify_seconds(7, 8) == pytest.approx(0.4 + 0.05 * 56), "each row adds as much"


def test_without_the_pass_of_a_full_proposal_nothing_is_known() -> None:
    assert not calibrate(LOOKAHEAD, 8, 1024, Passes(3.0, 0.0)).seconds
    assert not calibrate(LOOKAHEAD, 8, 4, Passes(0.001, 0.0)).seconds


@pytest.mark.parametrize("slowed", [{1: 1.8}, {2: 1.4, 4: 1.4, 8: 1.4}])
def test_passes_that_were_the_first_or_beside_other_work_do_not_count(
    slowed: dict[int, float],
) -> None:
    found = calibrate(LOOKAHEAD, 4, 1024, Passes(0.07, 0.005, slowed))
    for (columns, size), seconds in found.seconds.items():
        undisturbed = 0.07 + 0.005 * max(2 if slowed.get(1) else 1, columns * size)
        assert seconds == pytest.approx(undisturbed)


def test_without_a_cost_of_rows_all_verifies_take_as_long() -> None:
    found = calibrate(LOOKAHEAD, 64, 128, Passes(0.01, 0.0, {128: 0.9}))
    assert [*found.seconds.values()] == pytest.approx([0.009] * len(found.seconds))
