"""Contents of standard output and standard error."""

import errno
import io
import re
import sys
from dataclasses import replace

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tests.screens import Screen

from ssd.observability.log import Event
from ssd.types import Mode, SpeculationStatistics
from ssd_cli import display
from ssd_cli.figures import Figures, figures
from ssd_cli.up import status_line

ODD = "a[b]:smile: [red]x[/red]\t\x1b[2J\r\n"


def test_redirected_text_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    display.write(ODD)
    assert capsys.readouterr().out == ODD


def test_a_terminal_receives_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(force_terminal=True)
    monkeypatch.setattr(display, "out", screen)
    display.write(ODD)
    assert screen.text == "a[b]:smile: [red]x[/red]\t�[2J�\n"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError()]
)
def test_lines_that_cannot_be_written_are_lost_and_later_ones_are_printed(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(io.StringIO):
        def write(self, _text: str) -> int:
            raise error

    with monkeypatch.context() as full:
        full.setattr(sys, "stderr", Refusing())
        for name in ("lost", "lost too"):
            display.report_event("draft 0", Event(name, {"level": "warning"}), is_debug=False)
    display.report_event("draft 0", Event("link", {"level": "warning"}), is_debug=False)
    assert capsys.readouterr().err == "draft 0: link\n"


def test_a_long_message_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    display.report("error", "[/bold] " + "word " * 60 + "\n  end :smile:", "red")
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("error: [/bold] word")
    assert output.endswith("end :smile:\n")


def test_a_report_above_a_live_line_keeps_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(force_terminal=True, no_color=True)
    monkeypatch.setattr(display, "err", screen)
    with Live("status", console=display.err, auto_refresh=False):
        display.report("draft 0", "ready again")
    assert "draft 0: ready again\n" in screen.text


@pytest.mark.parametrize(
    ("event", "level", "is_debug", "line"),
    [
        ("link_quarantined", "warning", False, "target: link_quarantined draft=a:1 [b]\\x1b\n"),
        ("link_crashed", "error", False, "target: link_crashed draft=a:1 [b]\\x1b\n"),
        ("target_not_ready", "info", False, "target: target_not_ready draft=a:1 [b]\\x1b\n"),
        ("link", "info", False, ""),
        ("link", "info", True, "target: link draft=a:1 [b]\\x1b stack=Trace: back\n"),
        ("failed", "error", False, ""),
    ],
)
def test_an_event_that_reports_a_problem_is_one_line_and_debug_prints_all_events(
    event: str, level: str, *, is_debug: bool, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"ts": "now", "level": level, "process": "target", "draft": "a:1 [b]\x1b"}
    found = Event(event, {**fields, "stack": "Trace:\n  back"})
    display.report_event("target", found, is_debug=is_debug)
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("event", "effect"),
    [
        ("fan_out_not_read", "an earlier fit of the fan-out is not used"),
        ("fan_out_not_kept", "the fit of the fan-out is not kept"),
    ],
)
def test_a_fan_out_that_has_no_file_is_told_with_its_effect(
    event: str, effect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"level": "warning", "file": "/dev/null/x", "reason": "Not a directory"}
    display.report_event("draft 0", Event(event, fields), is_debug=False)
    wanted = f"draft 0: {effect}; nothing else changes (/dev/null/x: Not a directory)\n"
    assert capsys.readouterr().err == wanted
    display.report_event("draft 0", Event(event, fields), is_debug=True)
    assert capsys.readouterr().err.startswith(f"draft 0: {event} file=/dev/null/x")


def test_each_process_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(force_terminal=True, width=80)
    monkeypatch.setattr(display, "err", screen)
    with display.startup_progress(is_quiet=False) as on_event:
        on_event("draft 0", Event("listening", {"grpc": "a:1", "http": "a:2"}))
        on_event("target", Event("progress", {"stage": "pack", "fraction": 0.5}))
        on_event("draft 0", Event("ready", {"seconds": 1.0}))
    shown = screen.text
    assert "target: packing weights" in shown
    assert "draft 0: ready" in shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_without_a_cursor_each_stage_of_a_process_is_one_line(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    screen = Screen(force_terminal=is_terminal, no_color=True, color_system=None)
    monkeypatch.setattr(display, "err", screen)
    with display.startup_progress(is_quiet=False) as on_event, display.status("checking"):
        on_event("target", Event("listening", {"grpc": "a:1", "http": "a:2"}))
        for fraction in (0.1, 0.5):
            on_event("target", Event("progress", {"stage": "load", "fraction": fraction}))
        on_event("target", Event("ready", {"seconds": 1.0}))
    assert screen.text == "starting\nchecking\ntarget: reading weights\ntarget: ready\n"


def table_of_one_draft() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("draft", "sessions", "late", "reason"):
        table.add_column(title, no_wrap=title != "reason")
    table.add_row("pod-0", Text("3"), "", "no message for 2 s")
    return table


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_table_fits_a_terminal_without_a_break_in_a_word(width: int) -> None:
    screen = Screen(force_terminal=True, width=width, color_system=None)
    display.print_table(screen, table_of_one_draft())
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert max(map(len, lines)) <= width
    words = "draft sessions late reason pod-0 3 no message for 2 s"
    assert sorted(" ".join(lines).split()) == sorted(words.split())


def test_the_rows_of_a_table_are_text_on_a_narrow_terminal() -> None:
    screen = Screen(force_terminal=True, width=24, color_system=None)
    display.print_table(screen, table_of_one_draft())
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert lines == ["pod-0", "  sessions 3, reason no", "  message for 2 s"]


def test_quiet_progress_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display.startup_progress(is_quiet=True) as on_event:
        on_event("target", Event("progress", {"stage": "load", "fraction": 1.0}))
    assert capsys.readouterr() == ("", "")


def test_the_summary_shows_unknown_figures_as_dashes() -> None:
    nothing = figures(1, 0, SpeculationStatistics(mode=Mode.AUTOREGRESSIVE))
    found = shown(("AR", nothing), ("SSD", nothing))
    assert "AR" in found
    assert "hit rate                          –               –" in found


def test_the_summary_of_a_partial_generation_shows_its_known_figures() -> None:
    known = Figures(
        seed=1, tokens=7, tokens_per_second=6.0, time_to_first_token_seconds=0.5, wall_seconds=1.5
    )
    rows = {line[:20].strip(): line[20:].strip() for line in shown(("", known)).splitlines()}
    assert rows == {"tokens": "7", "tokens/s": "6.0", "time to first token": "500 ms"}


def test_the_status_line_shows_the_changes_between_two_readings() -> None:
    before = {'ssd_tokens_total{kind="output"}': 100.0, 'ssd_rounds_total{result="hit"}': 5.0}
    now = {
        'ssd_tokens_total{kind="output"}': 300.0,
        'ssd_rounds_total{result="hit"}': 8.0,
        'ssd_rounds_total{result="late"}': 1.0,
        'ssd_requests_total{outcome="stop"}': 2.0,
        "ssd_running_sequences": 1.0,
    }
    assert status_line(before, now, 2.0).startswith(
        "requests 2  running 1  waiting 0  100 tokens/s  hits 75%"
    )


def test_the_first_status_line_shows_no_speed() -> None:
    assert "0 tokens/s  hits –" in status_line({}, {}, 0.0)


def shown(*columns: tuple[str, Figures], shows_seed: bool = False) -> str:
    screen = Screen(width=80)
    screen.print(display.summary(columns, shows_seed=shows_seed))
    return screen.text


def test_rounds_without_speculation_have_a_row_if_the_target_turned_it_off() -> None:
    statistics = SpeculationStatistics(mode=Mode.AUTOREGRESSIVE, rounds=9)
    assert "speculation off" not in shown(("", figures(9, 1, statistics)))
    found = shown(("", figures(9, 1, replace(statistics, paused_rounds=6))))
    assert re.search(r"^speculation off +67% of rounds: slower here *$", found, re.MULTILINE)


def test_late_tables_and_the_seed_have_a_row_if_they_matter() -> None:
    statistics = SpeculationStatistics(mode=Mode.SPECULATIVE, rounds=9, misses=1)
    calm = figures(9, 2**64 - 1, statistics)
    assert "late" not in shown(("", calm))
    assert "seed" not in shown(("", calm))
    found = shown(("", replace(calm, late=8)), shows_seed=True)
    assert re.search(r"^late tables +8 *$", found, re.MULTILINE)
    assert re.search(rf"^seed +{2**64 - 1} *$", found, re.MULTILINE)


def test_rounds_of_n_grams_have_a_row_if_there_were_any() -> None:
    statistics = SpeculationStatistics(mode=Mode.SPECULATIVE, rounds=9, hits=4)
    assert "n-grams" not in shown(("", figures(9, 1, statistics)))
    found = shown(("", figures(9, 1, replace(statistics, backup_rounds=3))))
    assert re.search(r"^n-grams +33% of rounds: text repeats *$", found, re.MULTILINE)


def test_the_line_of_an_answer_shows_late_tables_and_rounds_without_speculation() -> None:
    rounds = SpeculationStatistics(
        mode=Mode.SPECULATIVE,
        rounds=20,
        hits=1,
        misses=2,
        late=1,
        paused_rounds=12,
        backup_rounds=3,
    )
    line = display.metrics_line(figures(20, 0, rounds))
    assert "hits 25% of 4 tables, 1 late, n-grams in 15% of rounds, speculative" in line
    assert line.endswith("speculative, off in 60% of rounds: slower here")
