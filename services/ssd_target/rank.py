"""``python -m ssd_target.rank``: a rank of a target's model, started by the target.

It runs its part of each pass that rank 0, the target, sends. It has no ports and no state that
outlives a pass, and ends with the target at once.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import load_execution
from ssd.engine.parallel.group import STEP_DEADLINES, RankGroup, join
from ssd.engine.parallel.shard import Shard, ids_of
from ssd.engine.rank_loop import follow
from ssd.engine.runner import require_device
from ssd.errors import RankError
from ssd.observability.log import get_logger, progress_log
from ssd.ports import SystemClock
from ssd.runtime.child import end_with_parent
from ssd.runtime.process import run_process
from ssd.runtime.step_thread import Watchdog
from ssd.settings import parse_cpus

_log = get_logger("ssd_target.rank")
STUCK = "rank_stuck"
"""Event of a rank whose step takes too long."""
POLL_SECONDS = 0.5
LOST = os.EX_TEMPFAIL
"""Exit code of a rank that has lost another one: it is not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of ``python -m ssd_target.rank``, all from the target."""

    folder: str = ""
    """Model folder."""
    engine: str = "{}"
    """``EngineConfig`` of this rank, as JSON."""
    rank: int = field(default=1, metadata={"min": 1})
    """Number of this rank; the target is rank 0."""
    port: int = field(default=0, metadata={"min": 0, "max": 65535})
    """Port on localhost where the ranks meet."""
    cpus: str = ""
    """CPUs of the rank, as ``0,2``."""
    log_format: Literal["json", "text"] = "json"
    """Format of log lines on standard error."""
    termination_log: str = ""
    """Not written: the target reports the cause."""


def rank_flags(folder: Path, engine: EngineConfig, rank: int, port: int, cpus: str) -> list[str]:
    """Return the command line of a rank."""
    return [
        *("--folder", str(folder), "--engine", json.dumps(asdict(engine))),
        *("--rank", str(rank), "--port", str(port), "--cpus", cpus),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    # A rank has nothing to finish, and a stopped process would not receive SIGTERM.
    end_with_parent(signal.SIGKILL)
    return run_process("rank", RankSettings, serve, _check, argv)


def _check(settings: RankSettings) -> None:
    """Check nothing: the target has checked all values."""


async def serve(settings: RankSettings) -> int:
    """Load this rank's part of the model, and run it until another rank ends.

    Raises:
        SetupError: the part cannot be loaded.
    """
    engine = EngineConfig(**json.loads(settings.engine))
    os.sched_setaffinity(0, parse_cpus("cpus", settings.cpus))
    torch.set_num_threads(engine.threads)
    try:
        _run(
            Path(settings.folder),
            engine,
            Shard(settings.rank, engine.tensor_parallel_size),
            settings.port,
        )
    except RankError as error:
        _log.warning("rank_lost", reason=str(error))
    # At once: the target takes a rank that still runs for the one that does not answer.
    os._exit(LOST)


def _run(folder: Path, engine: EngineConfig, shard: Shard, port: int) -> None:
    require_device(engine.device)
    model = ModelConfig.from_folder(folder)
    group = join(shard, port, engine.device)
    watchdog = Watchdog(SystemClock())
    threading.Thread(target=_report_stuck_step, args=(watchdog, group), daemon=True).start()
    report = progress_log()
    part = load_execution(folder, model, engine, lambda fraction: report("load", fraction), group)
    follow(part, group, engine, ids_of(model, shard), watchdog.idle)


def _report_stuck_step(watchdog: Watchdog, group: RankGroup) -> None:
    """Log when a step takes too long, once; the target then ends. A thread of its own."""
    unset = threading.Event()
    while watchdog.busy_seconds <= STEP_DEADLINES * group.deadline_seconds:
        unset.wait(POLL_SECONDS)
    _log.warning(STUCK, seconds=round(watchdog.busy_seconds))


if __name__ == "__main__":
    sys.exit(main())
