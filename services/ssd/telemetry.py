"""What a process says about itself: log lines, metrics, time.

A log line is an event with fields. In containers it is one JSON object; on a terminal it is text.
Lines carry the request id where one is bound, never a prompt and never a secret.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that the current task serves; log lines carry it."""
bound_fields: ContextVar[Mapping[str, object]] = ContextVar(
    "bound_fields", default=MappingProxyType({})
)
"""Other fields that all log lines of the current task carry."""

_MOST_EVENTS = 1024
"""Events whose frequency is remembered; libraries may make a new one of each message."""
_PROGRESS_STEPS = 25
_FAST_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_SLOW_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)

OUTCOMES = (
    *("stop", "length", "cancelled", "deadline"),
    *("invalid", "overloaded", "unavailable", "error"),
)
"""Of a call of Generate; each call has one."""
REQUESTS_TOTAL = Counter(
    "ssd_requests",
    "Requests ended, by outcome. Complete: stop, length. Ended before: cancelled (by the caller or "
    "a drain), deadline (of the caller or the target, or a reader that stalled). Refused: invalid "
    "(what it asks for), overloaded (a bound is reached), unavailable (loading or draining). "
    "Failed: error. Error rate: sum(rate(ssd_requests_total{outcome='error'}[5m])) / "
    "sum(rate(ssd_requests_total[5m])).",
    ["outcome"],
)
QUEUE_SECONDS = Histogram(
    "ssd_queue_seconds",
    "Seconds from a request's arrival to its place in the batch; tokenising is a part of it.",
    buckets=_SLOW_SECONDS,
)
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "ssd_time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token; requests without a token do not count.",
    buckets=_SLOW_SECONDS,
)
INTER_TOKEN_SECONDS = Histogram(
    "ssd_inter_token_seconds",
    "Seconds between messages of a stream, divided by the tokens in the later one.",
    buckets=_FAST_SECONDS,
)
E2E_SECONDS = Histogram(
    "ssd_e2e_seconds",
    "Seconds from a complete request's arrival to its last token.",
    buckets=_SLOW_SECONDS,
)
TOKENS_TOTAL = Counter("ssd_tokens", "Tokens, by kind: prompt, output.", ["kind"])
RUNNING_SEQUENCES = Gauge("ssd_running_sequences", "Sequences in the batch.")
WAITING_SEQUENCES = Gauge("ssd_waiting_sequences", "Sequences in the queue.")
KV_BLOCKS = Gauge(
    "ssd_kv_blocks", "Blocks of a target's KV cache, by state: free, used.", ["state"]
)
ROUND_SECONDS = Histogram(
    "ssd_round_seconds",
    "Seconds of a round, by part: verify (the forward pass), wait (for tables), host (the rest). "
    "Efficiency: rate(ssd_round_seconds_sum{part='verify'}[5m]) / "
    "ignoring(part) sum without(part) (rate(ssd_round_seconds_sum[5m])).",
    ["part"],
    buckets=_FAST_SECONDS,
)
ROUNDS_TOTAL = Counter(
    "ssd_rounds",
    "Rounds of a sequence, by what its table gave: hit, miss, late, no_draft (no draft had a table "
    "of this sequence, speculation was off), none (no table was needed). "
    "Hit rate: rate(ssd_rounds_total{result='hit'}[5m]) / ignoring(result) "
    "sum without(result) (rate(ssd_rounds_total{result=~'hit|miss|late'}[5m])). Without a draft: "
    "rate(ssd_rounds_total{result='no_draft'}[5m]) / ignoring(result) "
    "sum without(result) (rate(ssd_rounds_total{result!='none'}[5m])).",
    ["result"],
)
ACCEPTED_TOKENS_TOTAL = Counter(
    "ssd_accepted_tokens",
    "Proposed tokens that were accepted, by position in the proposal (1 is the first). "
    "Acceptance: rate(ssd_accepted_tokens_total[5m]) over rate(ssd_proposed_tokens_total[5m]).",
    ["position"],
)
PROPOSED_TOKENS_TOTAL = Counter("ssd_proposed_tokens", "Tokens proposed to the target.")
OPEN_SESSIONS = Gauge("ssd_open_sessions", "Sessions that a target has open on its drafts.")
COMMIT_TO_TABLE_SECONDS = Histogram(
    "ssd_commit_to_table_seconds",
    "Seconds from sending a commit to the arrival of its table, as a target sees it.",
    buckets=_FAST_SECONDS,
)
DRAFT_TABLE_SECONDS = Histogram(
    "ssd_draft_table_seconds",
    "Seconds in which a draft grows a batch of tables.",
    buckets=_FAST_SECONDS,
)
DRAFT_SESSIONS = Gauge("ssd_draft_sessions", "Sessions that a draft keeps now.")
DRAFT_CAPACITY = Gauge("ssd_draft_capacity", "Sessions that a draft keeps at most.")
DESIRED_DRAFT_REPLICAS = Gauge(
    "ssd_desired_draft_replicas",
    "Drafts that the eligible sequences of a target would fill, a fraction; mean over 30 s.",
)
LINK_STATE = Gauge("ssd_link_state", "1 while a link takes sessions, else 0.", ["draft"])
LINK_RTT_SECONDS = Gauge(
    "ssd_link_rtt_seconds", "Seconds from a beat to its echo, event loop to event loop.", ["draft"]
)
LINK_TRANSPORT_INFO = Gauge(
    "ssd_link_transport_info",
    "1 for the transport of a link that is up: tcp, rdma, nvlink.",
    ["draft", "transport"],
)
LINK_REFUSALS_TOTAL = Counter(
    "ssd_link_refusals",
    "Attempts at a link that were refused, by reason: handshake (the two ends do not fit), "
    "link_too_slow (measured worse than required).",
    ["reason"],
)
LINK_BYTES_TOTAL = Counter("ssd_link_bytes", "Bytes of frames, by direction.", ["direction"])
COMMIT_TO_WIRE_SECONDS = Histogram(
    "ssd_commit_to_wire_seconds",
    "Seconds from a decided round to its commit's hand-over to the link, waiting included.",
    buckets=_FAST_SECONDS,
)
WIRE_TO_TABLE_SECONDS = Histogram(
    "ssd_wire_to_table_seconds",
    "Seconds from a commit's arrival at a draft to its table's departure.",
    buckets=_FAST_SECONDS,
)
DRAFT_STARTUP_SECONDS = Gauge(
    "ssd_draft_startup_seconds", "Seconds of a draft's start, by part: load, warm-up.", ["part"]
)
BAD_FRAMES_TOTAL = Counter("ssd_bad_frames", "Malformed or oversize frames; each ended its link.")
STALE_FRAMES_TOTAL = Counter(
    "ssd_stale_frames",
    "Frames or rows dropped because epoch, session or base length did not match.",
)


_OF_DRAFT = (
    *(DRAFT_TABLE_SECONDS, DRAFT_SESSIONS, DRAFT_CAPACITY),
    *(DRAFT_STARTUP_SECONDS, WIRE_TO_TABLE_SECONDS),
)
_OF_TARGET = (
    *(REQUESTS_TOTAL, QUEUE_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS, E2E_SECONDS),
    *(TOKENS_TOTAL, RUNNING_SEQUENCES, WAITING_SEQUENCES, KV_BLOCKS, ROUND_SECONDS, ROUNDS_TOTAL),
    *(ACCEPTED_TOKENS_TOTAL, PROPOSED_TOKENS_TOTAL, OPEN_SESSIONS, COMMIT_TO_TABLE_SECONDS),
    *(DESIRED_DRAFT_REPLICAS, COMMIT_TO_WIRE_SECONDS, LINK_STATE, LINK_RTT_SECONDS),
    *(LINK_TRANSPORT_INFO, LINK_REFUSALS_TOTAL),
)
_OF_OTHERS = {"target": _OF_DRAFT, "draft": _OF_TARGET}


class _MetricsOf:
    """All metrics but those of the other process, for a registry."""

    def __init__(self, process: str) -> None:
        self._left_out = {
            family.name for metric in _OF_OTHERS[process] for family in metric.describe()
        }

    def collect(self) -> Iterator[Metric]:
        """Families with their samples as they are now."""
        return (each for each in REGISTRY.collect() if each.name not in self._left_out)


def metrics_of(process: Literal["target", "draft"]) -> CollectorRegistry:
    """Return what a process exports: what only the other process measures is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsOf(process))
    return registry


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.perf_counter()


class Logger:
    """Logs events with fields: ``log.info("ready", seconds=1.9)``."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        """Log what only a developer asks for."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log what happened."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log what costs speed."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log what failed."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log what failed, with the stack of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def crash(self, event: str, error: BaseException | None, /, **fields: object) -> None:
        """Log what failed, with the stack of an exception that was not handled."""
        self._log(logging.ERROR, event, fields, exc_info=error)

    def _log(
        self,
        level: int,
        event: str,
        fields: dict[str, object],
        *,
        exc_info: bool | BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)


def get_logger(name: str) -> Logger:
    """Return the event logger of a module."""
    return Logger(logging.getLogger(name))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
        }
        if (bound := request_id.get()) is not None:
            line["request_id"] = bound
        line |= _fields(record)
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One readable line, stack below it.

    Fields and messages may hold what a peer sent: what cannot be printed is escaped, and the lines
    of a stack are indented, so that no peer can write a log line of its own.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{k}={v}" for k, v in _fields(record).items())
        bound = request_id.get()
        owner = "" if bound is None else f" [{bound}]"
        level = record.levelname.lower()
        line = f"{when} {self._process} {level}{owner} {record.getMessage()} {fields}".rstrip()
        stack = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join((printable(line), *(f"  {printable(below)}" for below in stack)))


def printable(text: str) -> str:
    """Return the text with escapes for control characters, line separators and surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Of the line and of the task that logs it."""
    return {**bound_fields.get(), **getattr(record, "fields", {})}


class RepeatLimit(logging.Filter):
    """Drops the lines of an event that comes too often, so that no peer can fill the log.

    Each event of each module may write ``burst`` lines at once and ``per_second`` in the long run.
    The next line that passes has the number of those dropped before it as ``suppressed``.
    """

    def __init__(self, burst: int = 100, per_second: float = 1.0) -> None:
        super().__init__()
        self._burst = burst
        self._per_second = per_second
        self._states: dict[tuple[str, str], tuple[float, float, int]] = {}
        """By logger and event: lines allowed, time of the newest line, lines dropped since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written. Called under the handler's lock, so for one line at once."""
        if len(self._states) >= _MOST_EVENTS:
            self._states.clear()
        key = (record.name, str(record.msg))
        allowed, last, dropped = self._states.get(key, (float(self._burst), record.created, 0))
        earned = self._per_second * max(0.0, record.created - last)
        allowed = min(float(self._burst), allowed + earned)
        if allowed < 1.0:
            self._states[key] = (allowed, record.created, dropped + 1)
            return False
        if dropped:
            record.fields = {**getattr(record, "fields", {}), "suppressed": dropped}
        self._states[key] = (allowed - 1.0, record.created, 0)
        return True


def configure_logging(form: str, process: str, level: str = "INFO") -> None:
    """Send all log lines of the process to standard error; see ``RepeatLimit``.

    Args:
        form: "json" or "text".
        process: name that each line carries, "target".
        level: the least severe level that is kept.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(handlers=[handler], level=level, force=True)


def log_crash(crash: threading.ExceptHookArgs) -> None:
    """Log what ended a thread, with its stack; for ``threading.excepthook``."""
    name = crash.thread.name if crash.thread is not None else "unknown"
    get_logger(__name__).crash("thread_crashed", crash.exc_value, thread=name)


def log_progress(stage: str, fraction: float) -> None:
    """Log how much of a stage of the start is done, 0..1. Any thread."""
    get_logger("ssd").info("progress", stage=stage, fraction=round(fraction, 3))


def progress_log() -> Callable[[str, float], None]:
    """Return a callback that logs each stage in steps of 4 %.

    A model has thousands of tensors, and ``RepeatLimit`` drops events that repeat too often.
    """
    logged: dict[str, int] = {}

    def report(stage: str, fraction: float) -> None:
        step = int(fraction * _PROGRESS_STEPS)
        if logged.get(stage) != step:
            logged[stage] = step
            log_progress(stage, fraction)

    return report


@dataclass(frozen=True, slots=True)
class Event:
    """A parsed log line of a process."""

    name: str
    """``progress``, ``listening``, ``ready``, ``draining``, ``stopped``, ``failed``, or another."""
    fields: dict[str, Any] = field(default_factory=dict)


def parse_event(line: str) -> Event | None:
    """Return the event of a JSON log line, or None for any other text."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("event"), str):
        return None
    return Event(document.pop("event"), document)
