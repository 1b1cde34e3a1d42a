import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest

from ssd.observability import log as log_module
from ssd.observability import metrics
from ssd.observability.log import (
    JsonFormatter,
    Logger,
    RepeatLimit,
    TextFormatter,
    configure_logging,
    get_logger,
    parse_event,
    request_id,
)


class Lines(logging.Handler):
    """Keeps formatted lines."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def listen(formatter: logging.Formatter) -> tuple[Logger, list[str]]:
    logger = logging.getLogger("tests.listened")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    lines = Lines(formatter)
    logger.handlers[:] = [lines]
    return Logger(logger), lines.lines


@contextmanager
def bound(number: str) -> Iterator[None]:
    token = request_id.set(number)
    try:
        yield
    finally:
        request_id.reset(token)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_contains_time_level_process_event_and_fields() -> None:
    log, lines = listen(JsonFormatter("target"))
    log.info("listening", grpc="127.0.0.1:50051", http="127.0.0.1:9090")
    document = json.loads(lines[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", document.pop("ts"))
    assert document == {
        "level": "info",
        "process": "target",
        "event": "listening",
        "grpc": "127.0.0.1:50051",
        "http": "127.0.0.1:9090",
    }


def test_a_line_contains_the_request_id_of_its_task() -> None:
    for formatter in (JsonFormatter("target"), TextFormatter("target")):
        log, lines = listen(formatter)
        with bound("r-17"):
            log.warning("link lost")
        log.warning("link lost")
        assert "r-17" in lines[0]
        assert "r-17" not in lines[1]


def test_a_json_line_with_any_fields_is_one_line() -> None:
    log, lines = listen(JsonFormatter("draft"))
    log.error("failed", message="first\nsecond", cause=ValueError("x"), text="Grüße")
    assert "\n" not in lines[0]
    assert json.loads(lines[0])["message"] == "first\nsecond"
    assert json.loads(lines[0])["text"] == "Grüße"


def test_the_stack_of_an_exception_is_inside_the_json_line() -> None:
    log, lines = listen(JsonFormatter("draft"))
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    assert "ValueError: broken" in json.loads(lines[0])["stack"]
    assert "\n" not in lines[0]


def test_the_stack_follows_its_text_line() -> None:
    log, lines = listen(TextFormatter("target"))
    log.info("ready", seconds=1.9)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} target info ready seconds=1\.9", lines[0])
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed", number=3)
    assert lines[1].splitlines()[0].endswith("target error failed number=3")
    assert lines[1].endswith("ValueError: broken")


def written(limit: RepeatLimit, event: str, at: float, **fields: object) -> dict[str, Any] | None:
    """The fields of a line that was logged at that time; None if it was dropped."""
    record: Any = logging.LogRecord("ssd.links", logging.WARNING, "", 0, event, None, None)
    record.created = at
    record.fields = fields
    return dict(record.fields) if limit.filter(record) else None


def test_a_repeated_event_is_written_at_a_limited_rate_and_the_rest_is_counted() -> None:
    limit = RepeatLimit(burst=5, per_second=1.0)
    times = [1000.0 + number / 70 for number in range(700)]
    lines = [written(limit, "bad_frame", at, reason="r") for at in times]
    passed = [line for line in lines if line is not None]
    assert lines[:5] == [{"reason": "r"}] * 5
    assert len(passed) <= 5 + 10
    assert sum(line.get("suppressed", 0) for line in passed) >= 700 - len(passed) - 70


def test_many_lines_of_one_event_suppress_no_other_event() -> None:
    limit = RepeatLimit(burst=2, per_second=1.0)
    assert [written(limit, "bad_frame", 0.0) for _ in range(4)] == [{}, {}, None, None]
    assert written(limit, "link", 0.0) == {}
    assert written(limit, "bad_frame", 1.0) == {"suppressed": 2}
    assert [written(limit, "bad_frame", 100.0) for _ in range(3)] == [{}, {}, None]


def test_a_clock_that_is_set_back_suppresses_no_line() -> None:
    limit = RepeatLimit(burst=1, per_second=1.0)
    assert written(limit, "link", 100.0) == {}
    assert written(limit, "link", 50.0) is None
    assert written(limit, "link", 51.0) == {"suppressed": 1}


def test_unlimited_kinds_of_events_take_limited_memory() -> None:
    limit = RepeatLimit()
    for number in range(5000):
        written(limit, f"message {number}", 0.0)
    assert len(limit._states) <= log_module._MAX_EVENTS


@pytest.mark.parametrize("form", ["json", "text"])
def test_logging_of_a_process_is_limited(
    form: str, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    del root_logger
    configure_logging(form, "target")
    log = get_logger("ssd.flooded")
    for _ in range(1000):
        log.warning("bad_frame")
    assert len(capsys.readouterr().err.splitlines()) <= 110


FORGED = "x\n00:00:00.000 target error failed"
UNPRINTABLE = "\r\x1b[2J\x85\u2028\u202e\x00\ud800"


@pytest.mark.parametrize("text", [FORGED, f"a{UNPRINTABLE}b"])
def test_text_of_a_peer_cannot_forge_a_text_line(text: str) -> None:
    log, lines = listen(TextFormatter("target"))
    log.warning("link", draft=text, nested=[text], number=3)
    log.warning(" ".join(("library reported", text)))
    with bound(text):
        log.info("ready")
    for line in lines:
        assert line.isprintable()
    escaped = text.encode("ascii", "backslashreplace").decode()
    for character, shown in (("\n", "\\n"), ("\r", "\\r"), ("\x1b", "\\x1b"), ("\0", "\\x00")):
        escaped = escaped.replace(character, shown)
    assert f"draft={escaped}" in lines[0]


def test_text_of_a_peer_in_an_exception_cannot_forge_a_text_line() -> None:
    log, lines = listen(TextFormatter("target"))
    try:
        raise ValueError(FORGED + UNPRINTABLE)
    except ValueError:
        log.exception("failed")
    first, *below = lines[0].split("\n")
    assert first.endswith("target error failed")
    assert below
    assert all(line.startswith("  ") and line.isprintable() for line in below)


def test_letters_of_any_script_are_not_escaped() -> None:
    log, lines = listen(TextFormatter("target"))
    log.info("ready", name="Grüße 東京 😀")
    assert lines[0].endswith("name=Grüße 東京 😀")


def test_events_below_the_level_are_not_formatted() -> None:
    log, lines = listen(JsonFormatter("target"))
    log.debug("detail")
    assert lines == []


@pytest.mark.parametrize("form", ["json", "text"])
def test_logging_goes_to_standard_error_only(
    form: str, capsys: pytest.CaptureFixture[str], root_logger: logging.Logger
) -> None:
    configure_logging(form, "target")
    get_logger("ssd.somewhere").info("draining")
    logging.getLogger("another.library").warning("theirs")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert ["draining" in lines[0], "theirs" in lines[1], len(lines)] == [True, True, 2]
    assert (parse_event(lines[0]) is not None) == (form == "json")


def test_an_event_is_restored_from_its_log_line() -> None:
    log, lines = listen(JsonFormatter("draft"))
    log.info("progress", stage="warm-up", fraction=0.4)
    event = parse_event(lines[0])
    assert event is not None
    assert event.name == "progress"
    assert (event.fields["stage"], event.fields["fraction"]) == ("warm-up", 0.4)
    assert event.fields["process"] == "draft"


@pytest.mark.parametrize("line", ["", "{", "[]", "7", "null", '{"event": 3}', '{"level": "info"}'])
def test_other_text_is_no_event(line: str) -> None:
    assert parse_event(line) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["event", "level", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_a_line_is_an_event_if_it_is_an_object_that_names_one(document: object) -> None:
    event = parse_event(json.dumps(document))
    if isinstance(document, dict) and isinstance(document.get("event"), str):
        assert event is not None
        assert {"event": event.name, **event.fields} == document
    else:
        assert event is None


def test_a_process_exports_no_metric_of_the_other_process() -> None:
    def names(process: Literal["target", "draft"]) -> set[str]:
        exposed = generate_latest(metrics.metrics_of(process)).decode()
        return set(re.findall(r"^# TYPE (ssd_\w+) \w+$", exposed, re.MULTILINE))

    in_both = {name for name in names("target") & names("draft") if not name.endswith("_created")}
    assert in_both == {
        *("ssd_link_bytes_total", "ssd_bad_frames_total"),
        *("ssd_channel_fallbacks_total", "ssd_tls_certificate_expiry_timestamp_seconds"),
    }
    assert {"ssd_draft_max_sessions", "ssd_wire_to_table_seconds"} <= names("draft")
    assert {"ssd_requests_total", "ssd_queue_seconds"} <= names("target")


def test_help_states_seconds_and_its_queries_use_existing_metrics() -> None:
    exposed = generate_latest(REGISTRY).decode()
    helps = dict(re.findall(r"^# HELP (ssd_\w+) (.+)$", exposed, re.MULTILINE))
    assert "ssd_round_seconds" in helps
    for name, text in helps.items():
        assert not name.endswith("_seconds") or "econds" in text
        for mentioned in re.findall(r"ssd_\w+", text):
            assert re.sub(r"_(sum|count|bucket)$", "", mentioned) in helps, mentioned
        assert text.count("(") == text.count(")")


def test_progress_of_a_large_model_stays_below_the_limit_of_repeated_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[str, float]] = []
    monkeypatch.setattr(log_module, "log_progress", lambda *progress: logged.append(progress))
    report = log_module.progress_log()
    for stage in ("load", "warm-up"):
        for tensor in range(723):
            report(stage, (tensor + 1) / 723)
    assert len(logged) < 100
    assert [fraction for _, fraction in logged].count(1.0) == 2


def test_a_removed_series_is_absent_and_with_files_of_several_processes_it_is_zero(
    tmp_path: Path,
) -> None:
    script = (
        "from ssd.observability import metrics\n"
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "metrics.LINK_RTT_SECONDS.labels('d:1').set(0.25)\n"
        "metrics.remove_series(metrics.LINK_RTT_SECONDS, 'd:1')\n"
        "metrics.remove_series(metrics.LINK_RTT_SECONDS, 'never set')\n"
        "files = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(files)\n"
        "assert b'ssd_link_rtt_seconds{draft=\"d:1\"} 0.0' in generate_latest(files)\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}  # noqa: TID251
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    metrics.LINK_RTT_SECONDS.labels("d:1").set(0.25)
    metrics.remove_series(metrics.LINK_RTT_SECONDS, "d:1")
    assert b'draft="d:1"' not in generate_latest(REGISTRY)
