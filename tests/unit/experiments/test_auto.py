"""The cells of the table of ratios, and a whole cell with small models."""

import os
from pathlib import Path

import pytest
import typer
from tests.pairs import quickly_deployed
from tools.experiments import auto
from tools.experiments.auto import Amount, Repetition, Situation, Size, cell, markdown, measure

from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import Mode

SIZE = Size(cpus=2, batch=1, temperature=1.0)


def a_repetition(ar: float, ssd: float, *, first: float, later: float) -> Repetition:
    """Seven turns, of which AUTO takes other times for the first five."""
    texts: dict[Mode, list[tuple[int, ...]]] = {mode: [(1, 2, 3)] * 7 for mode in auto.MODES}
    seconds = {
        Mode.AUTOREGRESSIVE: [ar] * 7,
        Mode.SPECULATIVE: [ssd] * 7,
        Mode.AUTO: [first] * 5 + [later] * 2,
    }
    return Repetition(seconds, texts)


@pytest.mark.parametrize("content", ["[]", '{"amount": {"turns": 2}, "cells": []}'])
def test_a_folder_with_cells_of_other_amounts_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "auto.json").write_text(content)
    with pytest.raises(typer.BadParameter, match="choose another folder"):
        auto.auto(output=tmp_path)


def test_a_cell_has_the_median_ratios_of_all_and_of_the_first_turns() -> None:
    found = [
        a_repetition(2.0, 1.0, first=2.0, later=1.0),
        a_repetition(2.0, 4.0, first=4.0, later=2.0),
        a_repetition(2.0, 1.0, first=1.0, later=1.0),
    ]
    found[0].texts[Mode.AUTO][3] = (1, 2, 4)
    result = cell("slow", SIZE, found)
    assert result.over_ar == pytest.approx(14 / 12)
    assert result.lowest_over_ar == pytest.approx(14 / 24)
    assert result.over_better == pytest.approx(7 / 12)
    assert result.first_over_better == 0.5
    assert result.tokens_per_second == {"autoregressive": 1.5, "speculative": 3.0, "auto": 1.75}
    assert result.num_different == 1


def test_the_first_turns_have_five_requests_or_more() -> None:
    assert (
        cell("slow", SIZE, [a_repetition(2.0, 1.0, first=2.0, later=1.0)]).first_over_better == 0.5
    )
    size = Size(cpus=2, batch=8, temperature=1.0)
    repetition = a_repetition(2.0, 1.0, first=2.0, later=1.0)
    repetition.seconds[Mode.AUTO][0] = 1.25
    assert cell("slow", size, [repetition]).first_over_better == pytest.approx(0.8)


def test_the_table_has_a_row_for_each_cell() -> None:
    result = cell("slow", SIZE, [a_repetition(2.0, 1.0, first=1.0, later=1.0)])
    assert markdown([result]).splitlines()[2:] == [
        "| slow | 2 | 1 | 1 | 1.5 | 3 | 3 | 2.00 | 1.00 | 1.00 |"
    ]


@pytest.mark.timeout(120)
async def test_a_cell_is_measured_with_real_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = str(write_tiny_folder(tmp_path / "model", max_len=512))
    monkeypatch.setitem(auto.SITUATIONS, "tiny", Situation(target=model, draft=model))
    monkeypatch.setattr(auto, "deployed", quickly_deployed)
    cpu = min(os.sched_getaffinity(0))
    size = Size(cpus=1, batch=2, temperature=0.0)
    result = await measure("tiny", [cpu], size, Amount(turns=2, max_tokens=8, repetitions=1))
    assert (result.situation, result.size) == ("tiny", size)
    assert result.over_better > 0
    assert result.num_different == 0


def test_a_random_draft_has_the_files_of_the_embedded_one(tmp_path: Path) -> None:
    folder = auto.random_draft(tmp_path / "random")
    assert {each.name for each in folder.iterdir()} >= {"config.json", "model.safetensors"}
