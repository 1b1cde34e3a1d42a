"""The cells of the table of ratios, and a whole cell with small models."""

import os
from pathlib import Path

import pytest

from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import Mode, SpeculationStatistics
from ssd_bench import never_slower
from ssd_bench.never_slower import Cell, Situation, _Batch, _Measurement, _Times, markdown, measure

CELL = Cell(
    situation="slow",
    cpus=2,
    batch=8,
    temperature=1.0,
    ratio=0.99,
    q1=0.97,
    q3=1.01,
    total_ratio=0.98,
    pairs=3,
    ar_tokens_per_second=10.0,
    auto_tokens_per_second=9.9,
    paused_share=0.9,
    hit_rate=0.5,
    reason="slower",
    speed_up=0.4,
    num_different=0,
)


def a_batch(seconds: float, paused: int = 0, text: tuple[int, ...] = (1, 2, 3)) -> _Batch:
    found = SpeculationStatistics(
        mode=Mode.SPECULATIVE,
        rounds=4,
        hits=3,
        misses=1,
        decode_seconds=seconds,
        paused_rounds=paused,
    )
    return _Batch([text], [found])


def test_a_cell_has_the_median_of_pairs_and_the_ratio_of_sums() -> None:
    ar = [a_batch(1.0), a_batch(1.0), a_batch(1.0)]
    auto = [a_batch(0.5, paused=4), a_batch(1.0), a_batch(2.0, text=(1, 2, 4))]
    cell = _Measurement(ar, auto).cell(
        situation="slow", cpus=2, batch=1, temperature=0.0, reason="slower", speed_up=0.5
    )
    assert (cell.ratio, cell.pairs, cell.hit_rate) == (1.0, 3, 0.75)
    assert cell.total_ratio == pytest.approx(3 / 3.5)
    assert cell.paused_share == pytest.approx(1 / 3)
    assert cell.num_different == 1


def test_the_table_has_a_row_for_each_situation_and_number_of_cpus() -> None:
    assert markdown([CELL]).splitlines() == [
        "| situation | CPUs | batch 8, T = 1 |",
        "|---|---|---|",
        "| slow | 2 | 0.99 (0.97–1.01, off) |",
    ]


@pytest.mark.timeout(120)
async def test_a_cell_is_measured_with_real_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = str(write_tiny_folder(tmp_path / "model", max_len=512))
    monkeypatch.setitem(never_slower.SITUATIONS, "tiny", Situation(target=model, draft=model))
    monkeypatch.setattr(never_slower, "MIN_PAIRS", 2)
    monkeypatch.setattr(never_slower, "MAX_TOKENS", never_slower.MIN_TOKENS)
    cpu = min(os.sched_getaffinity(0))
    times = _Times(start_seconds=0.0, cell_seconds=0.0)
    (cell,) = [each async for each in measure("tiny", [cpu], [(1, 0.0)], times)]
    assert (cell.situation, cell.cpus, cell.batch) == ("tiny", 1, 1)
    assert cell.ratio > 0
    assert cell.pairs == never_slower.MIN_PAIRS


def test_a_random_draft_has_the_files_of_the_embedded_one(tmp_path: Path) -> None:
    folder = never_slower.random_draft(tmp_path / "random")
    assert {each.name for each in folder.iterdir()} >= {"config.json", "model.safetensors"}
