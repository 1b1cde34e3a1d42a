"""``ssd bench peers`` with real engines: this product's and transformers."""

import json
from pathlib import Path

import pytest
import transformers
from tests.pairs import deployed

import ssd
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.__main__ import main
from ssd_bench.peers import engines
from ssd_bench.peers import measure as measuring
from ssd_bench.peers.contenders import Contender
from ssd_bench.peers.engines import Setup
from ssd_bench.peers.measure import Case, Row, measure
from ssd_bench.peers.workers.wire import Batch


def test_engines_of_two_environments_write_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Speeds are not examined here, so no measurement waits for a quiet machine.
    monkeypatch.setattr(measuring, "SETTLE_SAMPLES", 0)
    monkeypatch.setattr(engines, "deployed", deployed)
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
    assert {row["version"] for row in found["rows"]} == {ssd.__version__, transformers.__version__}
    assert (tmp_path / "out" / "peers.png").stat().st_size > 1000
    table = (tmp_path / "out" / "peers.md").read_text()
    assert table.count("| 0/2 |") == 3
    assert table.count("| 0/4 |") == 2, "assisted generation takes one prompt at a time"


@pytest.mark.asyncio
async def test_an_engine_that_cannot_load_is_a_row_with_its_reason(tmp_path: Path) -> None:
    setup = Setup(
        target=tmp_path, draft=tmp_path, cpus=(0,), batch=1, environments=tmp_path, scratch=tmp_path
    )
    rows = [Row(Contender(peer="transformers"))]
    batch: Batch = {"prompts": [[1]], "max_tokens": 16, "temperature": 0.0, "seed": 0}
    await measure(rows, setup, {Case(): [batch] * 2}, lambda _what: None)
    assert "the process ended with exit code 1: " in rows[0].failure
