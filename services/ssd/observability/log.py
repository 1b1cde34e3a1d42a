"""Log lines of a process: events with fields.

In containers a line is one JSON object; on a terminal it is text. Lines contain the request id if
there is one, and never prompts or secrets.

*Decision*: formatters for the standard library's logging. *Because*: with structlog 26.1 and the
same lines, this module was only 4 lines shorter. The order of fields, the text line with its
escapes, the repeat limit and ``parse_event`` still needed code of their own. A JSON line took 24 to
34 us instead of 13 to 22 (medians of 7 runs, three processes), an event below the level 4 to 6 us
instead of .8, and the import of ``ssd.rpc.client`` 90 to 100 ms longer. *Not chosen*:
``structlog.configure``, which also sets the loggers of a host process such as vLLM. *Revisit when*
lines need a form or a destination that structlog has.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partialmethod
from types import MappingProxyType
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request of the current task, empty without one; log lines contain it."""
trace_headers: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("trace_headers", default=())
"""Headers with which calls of the current task continue the trace of its caller (W3C)."""
bound_fields: ContextVar[Mapping[str, object]] = ContextVar(
    "bound_fields", default=MappingProxyType({})
)
"""Other fields of all log lines of the current task."""

_MAX_EVENTS = 1024
"""Largest number of events with a stored frequency; libraries can log a new event each time."""
_PROGRESS_STEPS = 25


class Logger:
    """Logs events with fields: ``log.info("ready", seconds=1.9)``."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def log(
        self,
        level: int,
        event: str,
        /,
        *,
        exc_info: bool | BaseException | None = None,
        **fields: object,
    ) -> None:
        """Log an event, with the stack of an exception or of the one that is handled."""
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)

    debug = partialmethod(log, logging.DEBUG)
    info = partialmethod(log, logging.INFO)
    warning = partialmethod(log, logging.WARNING)
    error = partialmethod(log, logging.ERROR)
    exception = partialmethod(log, logging.ERROR, exc_info=True)


def get_logger(name: str) -> Logger:
    """Return the event logger of a module."""
    return Logger(logging.getLogger(name))


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

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
        if owner := request_id.get():
            line["request_id"] = owner
        line |= _fields(record)
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One readable line, followed by the stack.

    Fields and messages can contain data of a peer. Control characters are escaped and the lines of
    a stack are indented, so that no peer can forge a log line.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = " ".join(f"{k}={v}" for k, v in _fields(record).items())
        owner = f" [{request_id.get()}]" if request_id.get() else ""
        level = record.levelname.lower()
        line = f"{when} {self._process} {level}{owner} {record.getMessage()} {fields}".rstrip()
        stack = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join((printable(line), *(f"  {printable(below)}" for below in stack)))


def printable(text: str) -> str:
    """Return the text with escapes for control characters, line separators and surrogates."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a line and of the task that logs it."""
    return {**bound_fields.get(), **getattr(record, "fields", {})}


class RepeatLimit(logging.Filter):
    """Drops lines of events that are too frequent, so that no peer can fill the log.

    Each event of each module can write ``burst`` lines at once and ``per_second`` on average. The
    next written line contains the number of dropped lines as ``suppressed``.
    """

    def __init__(self, burst: int = 100, per_second: float = 1.0) -> None:
        super().__init__()
        self._burst = burst
        self._per_second = per_second
        self._states: dict[tuple[str, str], tuple[float, float, int]] = {}
        """By logger and event: allowed lines, time of the newest line, dropped lines since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written. The handler's lock allows one call at a time."""
        if len(self._states) >= _MAX_EVENTS:
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
        process: name in each line, for example "target".
        level: the lowest level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(handlers=[handler], level=level, force=True)


def log_crash(crash: threading.ExceptHookArgs) -> None:
    """Log the error that ended a thread, with its stack; for ``threading.excepthook``."""
    name = crash.thread.name if crash.thread is not None else "unknown"
    get_logger(__name__).error("thread_crashed", exc_info=crash.exc_value, thread=name)


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
