"""Figures, spreads and tables, computed from known counters."""

import json
from dataclasses import replace

import pytest
import typer
from tests.screens import Screen

from ssd.observability.scrape import samples
from ssd.runtime.launch import Deployment
from ssd.types import Mode, SpeculationStatistics
from ssd_bench.command import numbers
from ssd_bench.metrics import (
    PARTS,
    BatchFigures,
    Continuation,
    batch_figures,
    mean_ms,
    spread,
    spreads,
)
from ssd_bench.report import (
    bound_over_sd,
    markdown,
    records,
    round_records,
    rounds_markdown,
    speed_ups,
    terminal_tables,
    verify_bandwidth,
)
from ssd_bench.runs import Cell, Results, is_speculative, on_all_cpus, why_no_hits

Times = tuple[float, float]
"""Median seconds of a verify and of a round."""


def sequence(
    tokens: int, seconds: float, hits: int = 0, misses: int = 0, times: Times = (0.02, 0.025)
) -> Continuation:
    return Continuation(
        tuple(range(tokens)),
        SpeculationStatistics(
            mode=Mode.SPECULATIVE,
            rounds=10,
            hits=hits,
            misses=misses,
            late=1 if hits else 0,
            time_to_first_token_seconds=0.1,
            decode_seconds=seconds,
            verify_seconds=times[0],
            round_seconds=times[1],
        ),
    )


def figures(
    tokens_per_second: float, verify_ms: float = 10.0, late_rate: float | None = None
) -> BatchFigures:
    return BatchFigures(
        tokens_per_second=tokens_per_second,
        tokens_per_second_each=tokens_per_second,
        tokens_per_second_per_cpu=tokens_per_second,
        hit_rate=None,
        late_rate=late_rate,
        tokens_per_round=1.0,
        verify_ms=verify_ms,
        round_ms=12.0,
        efficiency=0.8,
        time_to_first_token_ms=5.0,
    )


def cell() -> Cell:
    plain = [figures(speed) for speed in (10.0, 20.0, 10.0)]
    ahead = [figures(speed, verify_ms=20.0) for speed in (30.0, 40.0, 40.0)]
    return Cell(1, 0.0, figures={"ar": plain, "ssd": ahead}, num_compared=3, num_different=1)


def parts(draft: float, verify: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.5) | {"draft": draft, "verify": verify}


def cell_of_five_modes() -> Cell:
    """SSD is twice as fast as SD and four times as AR; two CPUs make both 1.5 times faster."""
    speeds = {"ar": 10.0, "sd": 20.0, "ssd": 40.0, "ar-all": 15.0, "sd-all": 30.0}
    return Cell(
        1,
        0.0,
        figures={mode: [figures(speed)] * 3 for mode, speed in speeds.items()},
        parts_ms={"sd": [parts(8.0, 10.0)] * 3, "ssd": [parts(0.0, 10.0)] * 3},
    )


def test_ratios_compare_each_mode_with_ar_and_ssd_with_each_mode() -> None:
    medians = {pair: ratio.median for pair, ratio in speed_ups(cell_of_five_modes()).items()}
    assert medians == {
        ("sd", "ar"): 2.0,
        ("ssd", "ar"): 4.0,
        ("ar-all", "ar"): 1.5,
        ("sd-all", "ar"): 3.0,
        ("ssd", "sd"): 2.0,
        ("ssd", "ar-all"): pytest.approx(40 / 15),
        ("ssd", "sd-all"): pytest.approx(40 / 30),
    }


def test_the_bound_over_sd_hides_the_draft_only() -> None:
    # Both have one token a round, and SD drafts for 8 ms before a verify of 10 ms.
    assert bound_over_sd(cell_of_five_modes()) == pytest.approx(1.8)


def test_equal_hardware_has_a_line_of_its_own() -> None:
    table = markdown(Results(cells=[cell_of_five_modes()], weight_bytes=10**8), 2e10)
    assert "demo, batch 1, T=0: SSD / SD 2 (2–2), bound 1.8" in table
    assert "equal hardware: SSD / ar-all 2.67 (2.67–2.67), SSD / sd-all 1.33" in table


def test_the_parts_of_a_round_are_records_and_rows_of_a_table() -> None:
    found = round_records([cell_of_five_modes()])
    assert [each["mode"] for each in found] == ["sd", "ssd"]
    assert found[0]["parts_ms"]["draft"] == 8.0
    row = rounds_markdown(found)[-2]
    assert row.startswith("| demo | 1 | 0 | sd | 21.5 | 8 | 0.5 | 10 |")


def test_parts_of_rounds_are_means_between_two_readings() -> None:
    def page(verify: float, noise: float, rounds: int) -> str:
        lines = ["# TYPE ssd_round_seconds histogram"]
        for part, seconds in (("verify", verify), ("noise", noise)):
            lines += [
                f'ssd_round_seconds_bucket{{part="{part}",le="+Inf"}} {rounds}',
                f'ssd_round_seconds_count{{part="{part}"}} {rounds}',
                f'ssd_round_seconds_sum{{part="{part}"}} {seconds}',
            ]
        return "\n".join(lines) + "\n"

    found = mean_ms(samples(page(1.0, 0.0, 10)), samples(page(3.0, 0.5, 110)))
    assert found["verify"] == pytest.approx(20.0)
    assert found["noise"] == pytest.approx(5.0)
    assert found["draft"] == 0.0


def test_a_target_on_all_cpus_has_no_draft_process() -> None:
    wide = on_all_cpus(Deployment(allowed_cpus=(2, 5), target_flags=("--deterministic",)))
    assert wide.num_drafts == 0
    assert wide.is_synchronous
    assert wide.target_flags == (
        *("--deterministic", "--cpus", "2,5", "--io-cpus", "2,5", "--threads", "2"),
    )


def test_figures_of_a_batch_sum_speeds_and_divide_by_all_rounds() -> None:
    found = batch_figures([sequence(21, 2.0, hits=6, misses=3), sequence(31, 1.0, hits=10)], 2)
    assert found.tokens_per_second == 40.0
    assert found.tokens_per_second_each == 20.0
    assert found.tokens_per_second_per_cpu == 20.0
    assert found.hit_rate == pytest.approx(16 / 21)
    assert found.late_rate == pytest.approx(2 / 21)
    assert found.tokens_per_round == 2.6
    assert found.efficiency == pytest.approx(0.8)


def test_rounds_of_n_grams_are_a_share_of_all_rounds() -> None:
    own = sequence(5, 1.0)
    with_backup = replace(own, statistics=replace(own.statistics, backup_rounds=5))
    assert batch_figures([own, with_backup], 1).backup_rate == 0.25


def test_the_efficiency_of_a_batch_is_the_median_of_its_sequences() -> None:
    batch = [sequence(5, 1.0, times=times) for times in ((0.9, 1.0), (0.1, 1.0), (0.5, 5.0))]
    assert batch_figures(batch, 1).efficiency == pytest.approx(0.1)


def test_plain_decoding_has_no_hit_rate() -> None:
    assert batch_figures([sequence(5, 1.0)], 1).hit_rate is None


def test_a_text_that_arrives_at_once_has_no_speed() -> None:
    assert batch_figures([sequence(5, 0.0)], 1).tokens_per_second == 0.0


def test_a_spread_has_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.q1, found.median, found.q3) == (2.0, 3.0, 4.0)
    assert spread([7.0]).q3 == 7.0


def test_a_figure_that_is_missing_in_a_repetition_has_no_spread() -> None:
    assert "hit_rate" not in spreads([figures(1.0)])


def test_records_contain_mode_figure_spread_and_settings() -> None:
    found = records(Results(cells=[cell()]), {"lookahead": "6"})
    ratio = next(record for record in found if record["mode"] == "ssd/ar")
    assert (ratio["figure"], ratio["median"], ratio["repetitions"]) == ("speed_up", 3.0, 3)
    assert ratio["settings"] == {"lookahead": "6"}
    assert json.loads(json.dumps(found)) == found


def test_the_table_shows_both_modes_the_ratio_and_the_number_of_differing_texts() -> None:
    table = markdown(Results(cells=[cell()], weight_bytes=10**8), 2e10)
    ahead = next(line for line in table.splitlines() if "| ssd |" in line)
    assert "3 (2.5–3.5)" in ahead
    assert "1 of 3" in ahead
    assert "ar, batch 1: verify reads weights at 10.0 GB/s, 50% of one core's 20.0 GB/s" in table
    assert "ssd, batch 1: verify reads weights at 5.0 GB/s, 25%" in table


def test_without_batch_1_there_is_no_verify_bandwidth() -> None:
    assert verify_bandwidth(Results(cells=[Cell(8, 0.0)]), "ar") is None


@pytest.mark.parametrize(
    ("late_rate", "cause"),
    [
        (None, "circuit breaker"),
        (0.9, "90% of the tables were late"),
        (0.1, "contained no outcome"),
    ],
)
def test_a_run_without_hits_reports_the_cause(late_rate: float | None, cause: str) -> None:
    assert cause in why_no_hits([figures(1.0, late_rate=late_rate)])


@pytest.mark.parametrize(
    ("hit_rate", "backup_rate", "expected"),
    [(0.1, 0.0, True), (0.0, 0.9, False), (None, 0.9, True), (None, 0.0, False)],
)
def test_n_grams_replace_hits_only_where_no_table_was_needed(
    hit_rate: float | None, backup_rate: float, *, expected: bool
) -> None:
    found = replace(figures(1.0), hit_rate=hit_rate, backup_rate=backup_rate)
    assert is_speculative([found, found]) == expected


@pytest.mark.parametrize("text", ["", "1,,8", "a", "0", "17"])
def test_a_bad_list_of_numbers_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--batch"):
        numbers(text, "--batch", float, 1, 16)


def test_the_terminal_table_fits_80_columns() -> None:
    screen = Screen(width=80)
    screen.print(*terminal_tables(Results(cells=[cell()])))
    assert "…" not in screen.text
    assert "efficiency" in screen.text
    assert "tokens/s" in screen.text


def test_texts_are_compared_with_plain_decoding_by_the_same_target() -> None:
    cell = Cell(2, 0.0)
    cell.compare([[(1, 2), (3,)], [(1, 2), (3,)], [(1, 9), (3,)]])
    cell.compare([[(1, 8), (4,)], [(1, 8), (3,)]])
    cell.compare([])
    assert (cell.num_compared, cell.num_different) == (6, 2)
