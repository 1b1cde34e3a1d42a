"""Checks, tables and the command line of ``ssd bench serve``."""

import io
import json
from array import array
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from ssd_bench.__main__ import main
from ssd_bench.plots import draw_loads
from ssd_bench.scrape import samples
from ssd_bench.serve.figures import load_figures
from ssd_bench.serve.load import Load, RequestRecord
from ssd_bench.serve.memory import MIB, MemoryLog
from ssd_bench.serve.report import records, tables
from ssd_bench.serve.scenarios import Check, LoadOptions, ScenarioResult, modes, overload


@pytest.mark.parametrize(
    ("found", "bound", "is_minimum", "is_met"),
    [(1, 1, False, True), (2, 1, False, False), (1, 1, True, True), (0.8, 0.9, True, False)],
)
def test_a_check_compares_a_figure_with_its_bound(
    found: float, bound: float, *, is_minimum: bool, is_met: bool
) -> None:
    assert Check(name="x", found=found, bound=bound, is_minimum=is_minimum).is_met is is_met


@pytest.fixture
def result() -> ScenarioResult:
    record = RequestRecord(
        sent_at=0.0, outcome="length", ended_at=3.0, arrived_at=array("d", [1, 2, 3])
    )
    record.num_tokens.extend([1, 2, 3])
    load = Load(0.0, 10.0, [record], array("d"))
    log = MemoryLog(taken_at=[*range(60)], num_bytes={"target": [500 * MIB] * 60})
    return ScenarioResult(
        name="streams",
        loads={"1 stream": load_figures(load)},
        figures={"TTFT ms": 7.0},
        memory=log.figures(),
        checks=[
            Check(name="errors", found=1, bound=0, detail="INTERNAL: a bug"),
            Check(name="inter-token p99 / p50", found=4, bound=3, is_timing=True),
        ],
        series=[(load, log)],
    )


class TargetWithoutAnEnd:
    """A target on which no request ends within a load."""

    clock = None

    @property
    def generator(self) -> "TargetWithoutAnEnd":
        return self

    async def closed_loop(self, *_arguments: object, **_options: object) -> Load:
        return Load(0.0, 10.0, [RequestRecord(sent_at=0.0)], array("d"))

    async def leftovers(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("scenario", "failed"),
    [(overload, "requests that ended at the peak"), (modes, "1 streams, auto: errors")],
)
async def test_a_target_on_which_nothing_ends_fails_a_check(scenario: Any, failed: str) -> None:
    found = await scenario(cast(Any, TargetWithoutAnEnd()), LoadOptions())
    assert failed in [each.name for each in found.checks if not each.is_met]


def test_a_result_is_shown_with_failed_checks_and_their_cause(result: ScenarioResult) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in tables(result):
        console.print(table)
    text = console.export_text()
    assert "FAILED INTERNAL: a bug" in text
    assert "missed (a time)" in text
    assert "1000" in text
    assert "1 length" in text
    assert "500.0" in text


def test_a_result_is_json(result: ScenarioResult) -> None:
    found = json.loads(json.dumps(records(result)))
    assert found["loads"]["1 stream"]["inter_token_ms"]["p99"] == 1000
    assert found["loads"]["1 stream"]["errors"] == 0
    assert [check["is_met"] for check in found["checks"]] == [False, False]
    assert found["memory"]["target"]["growth_bytes"] == 0


def test_a_plot_is_drawn(result: ScenarioResult, tmp_path: Path) -> None:
    draw_loads([result], tmp_path / "serve.png")
    assert (tmp_path / "serve.png").stat().st_size > 10_000


def test_samples_are_named_with_their_labels() -> None:
    page = '# TYPE ssd_requests counter\nssd_requests_total{outcome="stop"} 3.0\nssd_x 1\n'
    assert samples(page) == {'ssd_requests_total{outcome="stop"}': 3.0, "ssd_x": 1.0}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scenario", "x"], "--scenario: choose from streams, prefill"),
        (["--http-address", "127.0.0.1:1"], "--http-address belongs to --address"),
        (["--target", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_usage_is_refused_before_a_process_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv], "ssd bench") == 2
    assert message in capsys.readouterr().err


def test_an_address_without_a_target_is_an_error_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--address", "127.0.0.1:1", "--streams", "3"], "ssd bench") == 1
    begin, *_, error = capsys.readouterr().err.splitlines()
    assert begin == "load: 3 streams for 30 s"
    assert error.startswith("error: 127.0.0.1:1 cannot be reached")
