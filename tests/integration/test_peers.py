"""``ssd bench peers`` with real engines: this product's and transformers."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from tests.gateway import gateway_of
from tests.pairs import QUICK, quickly_deployed, target_of
from tests.processes import start_fork_server

import ssd
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench import machine
from ssd_bench.__main__ import main
from ssd_bench.peers import engines
from ssd_bench.peers import measure as measuring
from ssd_bench.peers.contenders import Contender
from ssd_bench.peers.engines import Setup
from ssd_bench.peers.measure import Case, Row, measure
from ssd_bench.peers.workers.wire import Batch

WORKER = """
def load(config):
    {begin}
    tokens = lambda batch: [[5] * batch["max_tokens"] for _ in batch["prompts"]]
    return "1.0", lambda batch: {{"tokens": tokens(batch), "hits": 3, "looked_up": 4}}
"""


def put_worker(folder: Path, begin: str = "pass") -> Path:
    """Write the worker of transformers without its imports, which take three seconds."""
    shutil.copy(engines.WORKERS / "wire.py", folder)
    (folder / "transformers_worker.py").write_text(WORKER.format(begin=begin))
    return folder


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are not examined here, so no measurement waits for a quiet machine."""
    monkeypatch.setattr(machine, "SETTLE_SAMPLES", 0)
    monkeypatch.setattr(machine, "SAMPLE_SECONDS", 0.01)


def test_engines_of_two_environments_write_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "deployed", quickly_deployed)
    model = str(write_tiny_folder(tmp_path / "model", seed=1, max_len=1024))
    small = (
        *("--target", model, "--draft", model, "--batches", "1,2", "--repetitions", "2"),
        *("--prompt-tokens", "16", "--max-tokens", "24"),
    )
    which = ("--peers", "ssd,transformers", "--threads", "1", "--lookaheads", "3")
    arguments = ["peers", *which, *small, "--environments", str(tmp_path), "--output"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    texts = {row["contender"]["peer"]: row["texts"] for row in found["rows"]}
    assert not [row["failure"] for row in found["rows"] if row["failure"]]
    assert texts["ssd"] == texts["transformers"]
    others = [row for row in found["rows"] if row["contender"]["drafting"] != "ssd"]
    assert [any(row["looked_up"]) for row in others] == [False] * len(others) != []
    assert {row["version"] for row in found["rows"]} == {ssd.__version__, transformers.__version__}
    assert (tmp_path / "out" / "peers.png").stat().st_size > 1000
    table = (tmp_path / "out" / "peers.md").read_text()
    assert table.count("| 0/2 |") == 3
    assert table.count("| 0/4 |") == 2, "assisted generation takes one prompt at a time"


def test_after_ctrl_c_no_process_is_left_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BUSY_CPUS", float("inf"))
    monkeypatch.setattr(engines, "deployed", quickly_deployed)
    monkeypatch.setattr(engines, "WORKERS", put_worker(tmp_path))
    model = str(write_tiny_folder(tmp_path / "model", seed=1, max_len=1024))
    arguments = [
        *("peers", "--target", model, "--draft", model, "--peers", "ssd,transformers"),
        *("--methods", "none", "--threads", "1", "--repetitions", "2", "--prompt-tokens", "16"),
        *("--max-tokens", "24", "--environments", str(tmp_path), "--output", str(tmp_path)),
    ]
    start_fork_server()
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    one = measuring._one

    async def interrupted(*given: Any) -> None:
        await one(*given)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as during:
        during.setattr(measuring, "_one", interrupted)
        assert main(arguments) == 130
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before

    def speeds() -> list[list[float]]:
        rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
        return [row["tokens_per_second"] for row in rows]

    first = speeds()
    assert [len(each) for each in first] == [1, 0]
    assert main(arguments) == 0
    assert [len(each) for each in speeds()] == [2, 2]
    assert speeds()[0][0] == first[0][0]
    own, other = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert (own["hits"], own["looked_up"], own["hit_rate"]) == ([0, 0], [0, 0], None)
    assert (other["hits"], other["looked_up"], other["hit_rate"]) == ([3, 3], [4, 4], 0.75)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_load_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = put_worker(tmp_path, "raise OSError('no config.json')")
    monkeypatch.setattr(engines, "WORKERS", worker)
    setup = Setup(
        target=tmp_path, draft=tmp_path, cpus=(0,), batch=1, environments=tmp_path, scratch=tmp_path
    )
    rows = [Row(Contender(peer="transformers"))]
    batch: Batch = {"prompts": [[1]], "max_tokens": 16, "temperature": 0.0, "seed": 0}
    await measure(rows, setup, {Case(): [batch] * 2}, lambda _what: None)
    assert rows[0].failure == "the process ended with exit code 1: OSError: no config.json"


async def test_a_gateway_is_a_peer_whose_texts_are_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "deployed", quickly_deployed)
    model = str(write_tiny_folder(tmp_path / "model", seed=1, max_len=1024))
    flags = ("--max-model-len", "1024", "--dtype", "float32", *QUICK)
    async with target_of(model, *flags) as (target, _), gateway_of(target) as (gateway, _):
        arguments = (
            *("peers", "--target", model, "--draft", model, "--methods", "none"),
            *("--peers", f"ssd,http=http://{gateway.http_address}/v1", "--threads", "1"),
            *("--batches", "1,2", "--repetitions", "2", "--prompt-tokens", "16"),
            *("--max-tokens", "24", "--environments", str(tmp_path)),
            *("--output", str(tmp_path / "out")),
        )
        assert await asyncio.to_thread(main, arguments) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert not [row["failure"] for row in found["rows"] if row["failure"]]
    versions = {row["version"] for row in found["rows"]}
    assert versions == {ssd.__version__, "OpenAI, prompts are ids"}
    table = (tmp_path / "out" / "peers.md").read_text()
    assert all(each in table for each in ("| 0/2 |", "| 0/4 |"))
