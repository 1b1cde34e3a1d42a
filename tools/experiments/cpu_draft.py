"""``cpu-draft``: steps of drafts on CPUs, with random weights in public shapes.

The times of two numbers of rows give the parts of a step: what it takes for its weights, and what
each row adds. ``cpu_pass_time`` extends them to more cores and to the bandwidth of a server.
Passes of proposals are not measured, since they also gather the stored entries of the trunk.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from tests.gpu.checkpoints import write_checkpoint
from torch import Tensor

from ssd.engine.batch import BranchBatch
from ssd.engine.config import ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.pass_time import (
    WEIGHTS,
    Cpu,
    PassShape,
    WeightFormat,
    cpu_kv_bytes,
    cpu_pass_time,
    flops_of_pass,
)
from ssd.engine.runner import load_runner
from ssd.model_files.local_model import find_model
from ssd.settings import load
from ssd_bench.command import Debug, Output, out
from ssd_bench.machine import read_bandwidth
from ssd_bench.report import markdown_table
from ssd_draft.settings import DraftSettings

CONTEXT_TOKENS = 512
ROWS = (6, 12, 24)
"""Steps of a tree of one session, with each number of branches that a table of 24 may have."""
WARM_UPS = 2
SERVER_CORES = (32, 56)
"""Cores of a draft on a socket, for predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The measured steps of one model in one format."""

    model: str
    weights: str
    engine: str
    step_seconds: dict[int, float]
    """Medians, by number of rows."""
    core_bytes: float
    core_flops: float
    """As in ``WeightFormat``."""
    predicted_seconds: dict[int, float]
    """Seconds of a step of 24 rows, by number of cores of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All steps on this machine."""

    threads: int
    read_bytes_per_second: float
    """Bandwidth of a plain read by as many threads."""
    server_bytes_per_second: float
    """Assumed bandwidth of the server of the predictions."""
    steps: tuple[Steps, ...]


def cpu_draft(
    *,
    models: Annotated[
        str, typer.Option(help="Known shapes, separated by commas.")
    ] = "qwen3-0.6b,llama-3.2-1b",
    weights: Annotated[
        str, typer.Option(help="bfloat16, int8, int4, separated by commas.")
    ] = "bfloat16,int8,int4",
    repetitions: Annotated[int, typer.Option(min=1)] = 15,
    bandwidth: Annotated[
        float, typer.Option(min=1.0, help="GB/s of the server of the predictions.")
    ] = 220.0,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder that keeps the random weights for the next run.")
    ] = None,
    output: Output = Path("results"),
    debug: Debug = False,  # noqa: ARG001 - read by run_app
) -> None:
    """Measure steps of drafts on CPUs, with random weights; write cpu_draft.json and .md."""
    names, formats = (tuple(text.split(",")) for text in (models, weights))
    for flag, chosen, allowed in (
        ("--models", names, KNOWN_SHAPES),
        ("--weights", formats, WEIGHTS),
    ):
        if not set(chosen) <= set(allowed):
            raise typer.BadParameter(f"{flag} {','.join(chosen)!r}: choose of {', '.join(allowed)}")
    with tempfile.TemporaryDirectory() as temporary:
        measurement = measure(
            names,
            formats,
            scratch or Path(temporary),
            repetitions=repetitions,
            server_bytes_per_second=bandwidth * 1e9,
        )
    table = markdown(measurement)
    output.mkdir(parents=True, exist_ok=True)
    (output / "cpu_draft.json").write_text(json.dumps(asdict(measurement), indent=1))
    (output / "cpu_draft.md").write_text(table + "\n", encoding="utf-8")
    out.print(table, soft_wrap=True)


def measure(
    models: Sequence[str],
    formats: Sequence[str],
    scratch: Path,
    *,
    repetitions: int,
    server_bytes_per_second: float,
) -> Measurement:
    """Measure each model in each format on all allowed CPUs.

    Raises:
        SetupError: a model cannot be loaded in a format.
    """
    cpus = sorted(os.sched_getaffinity(0))
    cores = Cpu(num_cores=len(cpus), bandwidth=read_bandwidth(cpus))
    steps = []
    for name in models:
        folder = scratch / name
        if not folder.is_dir():
            write_checkpoint(folder, KNOWN_SHAPES[name], 0, "cpu")
        for weights in formats:
            times, engine = step_times(folder, weights, len(cpus), repetitions)
            gc.collect()
            model = KNOWN_SHAPES[name]
            weight_format = rates(model, weights, times, cores)
            steps.append(
                Steps(
                    model=name,
                    weights=weights,
                    engine=engine,
                    step_seconds=times,
                    core_bytes=weight_format.core_bytes,
                    core_flops=weight_format.core_flops,
                    predicted_seconds={
                        num_cores: cpu_pass_time(
                            model,
                            Cpu(num_cores=num_cores, bandwidth=server_bytes_per_second),
                            shape_of_step(max(ROWS)),
                            weight_format,
                        )
                        for num_cores in SERVER_CORES
                    },
                )
            )
    return Measurement(
        threads=len(cpus),
        read_bytes_per_second=cores.bandwidth,
        server_bytes_per_second=server_bytes_per_second,
        steps=tuple(steps),
    )


def step_times(
    folder: Path, weights: str, threads: int, repetitions: int
) -> tuple[dict[int, float], str]:
    """Return the median seconds of a step by its number of rows, and the engine that ran it."""
    flags = {
        "--model": folder,
        "--dtype": "bfloat16" if weights == "bfloat16" else "float32",
        "--weights": "same" if weights == "bfloat16" else weights,
        "--threads": threads,
        "--max-sessions": 1,
        "--max-model-len": 2 * CONTEXT_TOKENS,
        "--branches": max(ROWS),
    }
    argv = [str(part) for flag in flags.items() for part in flag]
    settings = load(DraftSettings, argv, prefix="SSD_DRAFT", environ={}).settings
    torch.set_num_threads(threads)
    model = find_model(settings, max_num_seqs=1, branches=settings.branches)
    runner = load_runner(DraftRunner, model.folder, model.engine, lambda _part, _share: None)
    return {rows: _median(_step(runner, rows), repetitions) for rows in ROWS}, model.engine.engine


def _step(runner: DraftRunner, rows: int) -> Callable[[], Tensor]:
    """Return a step of one session, whose trunk may contain any values."""
    slot_B, length_B = torch.zeros(1, dtype=torch.int64), torch.tensor([CONTEXT_TOKENS])
    num_blocks = -(-CONTEXT_TOKENS // runner.engine.block_size) + 1
    tables_BJ = torch.arange(1, 1 + num_blocks)[None]
    tokens_BN = torch.arange(rows)[None]
    first = BranchBatch(slot_B, tokens_BN, torch.zeros_like(tokens_BN), 0, length_B, tables_BJ)
    # The first step of a table also gathers its stored entries.
    runner.run_branches(first)
    return lambda: runner.run_branches(replace(first, step=1))


def _median(run: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(WARM_UPS + repetitions):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UPS:])


def shape_of_step(rows: int) -> PassShape:
    """Return the shape of a measured step."""
    return PassShape(rows=rows, sequences=1, context_tokens=CONTEXT_TOKENS)


def rates(model: ModelConfig, weights: str, times: dict[int, float], cores: Cpu) -> WeightFormat:
    """Return the rates of a core with which ``cpu_pass_time`` gives the measured times.

    Args:
        model: its shape.
        weights: its format.
        times: seconds of a step, by its number of rows.
        cores: that ran the steps.
    """
    weight_format = WEIGHTS[weights]
    few, many = min(times), max(times)
    row_seconds = (times[many] - times[few]) / (many - few)
    kv_seconds = cpu_kv_bytes(model, shape_of_step(few)) / cores.bandwidth
    read_seconds = times[few] - few * row_seconds - kv_seconds
    return replace(
        weight_format,
        core_bytes=weight_format.bytes_of_pass(model) / read_seconds / cores.num_cores,
        core_flops=flops_of_pass(model, shape_of_step(1)) / row_seconds / cores.num_cores,
    )


def markdown(measurement: Measurement) -> str:
    """Return a table of the measurement."""
    rows = " / ".join(map(str, ROWS))
    head = [
        *("model", "weights", "engine", f"ms at {rows} rows"),
        *("weights, GB/s of a core", "products, GFLOP/s of a core"),
        *(f"predicted ms at {max(ROWS)} rows, {cores} cores" for cores in SERVER_CORES),
    ]
    lines = [
        f"{measurement.threads} threads, context {CONTEXT_TOKENS}, a plain read "
        f"{measurement.read_bytes_per_second / 1e9:.1f} GB/s. Predictions: "
        f"{measurement.server_bytes_per_second / 1e9:.0f} GB/s, the rates of these cores.",
        "",
    ]
    table = []
    for steps in measurement.steps:
        cells = [
            *(steps.model, steps.weights, steps.engine),
            " / ".join(f"{steps.step_seconds[count] * 1000:.1f}" for count in ROWS),
            *(f"{steps.core_bytes / 1e9:.1f}", f"{steps.core_flops / 1e9:.0f}"),
            *(f"{steps.predicted_seconds[cores] * 1000:.1f}" for cores in SERVER_CORES),
        ]
        table.append(cells)
    return "\n".join([*lines, *markdown_table(head, table)])
