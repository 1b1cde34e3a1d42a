"""Runs of ``ssd bench`` without processes."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ssd_bench.test_metrics import cell_of_five_modes

from ssd import demo
from ssd.runtime.launch import Deployment
from ssd_bench import __main__ as command
from ssd_bench import runs
from ssd_bench.runs import BenchmarkRun, Cell, Results, run


async def test_each_cell_is_measured_in_the_order_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.asynccontextmanager
    async def deployed(_deployment: Deployment) -> AsyncIterator[Any]:
        target = SimpleNamespace(grpc_address="", http_address="", pid=50)
        yield SimpleNamespace(target=target, drafts=[SimpleNamespace(grpc_address="", pid=9)])

    @contextlib.asynccontextmanager
    async def client(_address: str, **_settings: object) -> AsyncIterator[Any]:
        async def model_info() -> Any:
            return SimpleNamespace(dtype="float32", dtype_reason="", active_drafts=1)

        async def get_status() -> Any:
            return SimpleNamespace(table_seconds=0.25)

        yield SimpleNamespace(model_info=model_info, get_status=get_status)

    async def measure(
        _contenders: object, _plan: object, _cell: Cell, on_batch: Callable[[], None]
    ) -> None:
        # Three modes twice, and the batch that warms up.
        for _ in range(7):
            on_batch()

    plan = BenchmarkRun(
        deployment=Deployment(),
        target_folder=demo.folder("target"),
        prompts={"demo": [(1, 2)]},
        batches=(1, 2),
        temperatures=(0.0, 1.0),
        max_tokens=16,
        repetitions=2,
    )
    monkeypatch.setattr(runs, "deployed", deployed)
    monkeypatch.setattr(runs, "TargetClient", client)
    monkeypatch.setattr(runs, "DraftClient", client)
    monkeypatch.setattr(runs, "_measure", measure)
    monkeypatch.setattr(runs, "peak_memory_bytes", lambda pid: pid)
    batches: list[int] = []
    found = await run(plan, lambda: batches.append(1))
    cells = [(cell.batch, cell.temperature) for cell in found.cells]
    assert cells == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert len(batches) == plan.num_batches
    assert (found.target_peak_bytes, found.draft_peak_bytes) == (50, 9)
    assert found.table_seconds == 0.25


def test_no_mode_finds_the_prompts_that_another_one_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[BenchmarkRun] = []

    def run_plan(plan: BenchmarkRun) -> Results:
        plans.append(plan)
        return Results(cells=[cell_of_five_modes()])

    monkeypatch.setattr(command, "run_plan", run_plan)
    monkeypatch.setattr(command, "read_bandwidth", lambda _cpus: 1e9)
    monkeypatch.setattr(command, "write", lambda *_: ["results.json"])
    monkeypatch.setattr(command, "markdown", lambda *_: "")
    argv = ["--batch", "8,1,1", "--temperature", "0", "--num-prompts", "1", "--json"]
    assert command.main([*argv, "--output", str(tmp_path)]) == 0
    (plan,) = plans
    assert plan.batches == (1, 8)
    for deployment in (plan.deployment, runs.on_all_cpus(plan.deployment)):
        assert "--no-prefix-cache" in deployment.common_flags
