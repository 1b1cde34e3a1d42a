"""Drafts of different speeds: the delay of a step, the figures of a point, the plot."""

from dataclasses import asdict
from pathlib import Path

import pytest
from tools.experiments.slow_draft import added_step_ms, draw, point

from ssd_bench.metrics import BatchFigures
from ssd_bench.runs import Cell

PNG = b"\x89PNG"


def figures(tokens_per_second: float, late_rate: float | None) -> BatchFigures:
    return BatchFigures(
        tokens_per_second=tokens_per_second,
        tokens_per_second_each=tokens_per_second,
        tokens_per_second_per_cpu=tokens_per_second,
        hit_rate=None if late_rate is None else 1 - late_rate,
        late_rate=late_rate,
        tokens_per_round=2.0,
        verify_ms=10.0,
        round_ms=11.0,
        efficiency=10 / 11,
        time_to_first_token_ms=5.0,
    )


def a_cell(late_rate: float | None) -> Cell:
    cell = Cell(1, 0.0, figures={"ar": [], "ssd": []})
    for speed in (1.0, 2.0, 3.0):
        cell.figures["ar"].append(figures(10.0 * speed, None))
        cell.figures["ssd"].append(figures(25.0 * speed, late_rate))
    return cell


def test_steps_are_longer_until_the_table_takes_the_ratio_of_a_verify() -> None:
    added = added_step_ms(ratio=4.0, verify_ms=20.0, table_ms=50.0, lookahead=6)
    assert 50.0 + 6 * added == pytest.approx(4.0 * 20.0)


def test_a_draft_that_is_slower_than_the_ratio_gets_no_delay() -> None:
    assert added_step_ms(ratio=0.5, verify_ms=20.0, table_ms=50.0, lookahead=6) == 0.0


@pytest.mark.parametrize(("late_rate", "late", "hits"), [(0.25, 0.25, 0.75), (None, 0.0, 0.0)])
def test_a_point_has_the_ratios_of_interleaved_repetitions(
    late_rate: float | None, late: float, hits: float
) -> None:
    found = point(a_cell(late_rate), table_ms=20.0, added=1.5)
    assert found.ratio == 2.0
    assert found.speed_up.median == found.speed_up.q1 == 2.5
    assert (found.late_rate, found.hit_rate) == (late, hits)


def test_the_plot_is_a_png_of_all_lines(tmp_path: Path) -> None:
    points = [asdict(point(a_cell(0.0), table_ms, 0.0)) for table_ms in (5.0, 20.0, 80.0)]
    path = tmp_path / "slow_draft.png"
    draw({"before": points, "after": points}, path)
    assert path.read_bytes().startswith(PNG)
