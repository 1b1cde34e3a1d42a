"""The checks of ``ssd bench serve``, with a guidellm that is a script."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ssd.errors import OverloadedError, SetupError
from ssd.observability.scrape import samples
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk
from ssd_bench import serve
from ssd_bench.plots import draw_latency
from ssd_bench.serve import LOADS, Client, TextCheck, leftovers, measure

REPORTS = """
import json, sys
spec = json.load(open(sys.argv[-1]))["spec"]
totals = {"successful": 5, "errored": %d, "incomplete": 1, "total": None}
metrics = {"request_totals": totals, "requests_per_second": {"successful": {"mean": 2.5}}}
times = {"successful": {"percentiles": {"p50": 1.0, "p95": 2.0, "p99": 3.0}}}
metrics |= {"time_to_first_token_ms": times, "inter_token_latency_ms": times}
found = {"start_time": 0.0, "end_time": 1.0, "metrics": metrics}
json.dump({"benchmarks": [found]}, open(spec["outputs"][0]["path"], "w"))
"""


def guidellm(tmp_path: Path, code: str) -> Client:
    program = tmp_path / "guidellm"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return Client(program, tmp_path / "model", tmp_path, 2.0, 0.5, "speculative")


async def test_guidellm_gets_the_load_the_address_and_the_fields_of_requests(
    tmp_path: Path,
) -> None:
    client = guidellm(tmp_path, REPORTS % 0)
    await client.send("overload", LOADS["overload"], "http://127.0.0.1:1", 3.0)
    spec = json.loads((tmp_path / "guidellm-overload.config.json").read_text())["spec"]
    assert spec["backend"]["target"] == "http://127.0.0.1:1"
    assert spec["backend"]["extras"]["body"] == {"temperature": 0.5, "mode": "speculative"}
    assert spec["profile"] == {"kind": "poisson", "rate": [3.0]}
    assert spec["constraints"] == [{"kind": "max_duration", "seconds": 2.0}]
    streams = client.spec(LOADS["streams"], "", 0.0)
    assert streams["profile"] == {"kind": "concurrent", "streams": [64]}


async def test_a_guidellm_that_fails_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    client = guidellm(tmp_path, "raise SystemExit('no tokenizer')")
    with pytest.raises(SetupError, match="guidellm ended with 1: no tokenizer"):
        await client.send("streams", LOADS["streams"], "http://127.0.0.1:1", 0.0)


async def test_a_guidellm_that_does_not_end_is_killed_with_the_processes_that_it_started(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The child has the standard output too, whose end a reader waits for.
    code = f"import subprocess; subprocess.run(['sh', '-c', 'echo > {pipe}; exec sleep 200'])"
    sending = guidellm(tmp_path, code).send("streams", LOADS["streams"], "http://127.0.0.1:1", 0.0)
    task = asyncio.create_task(sending)
    await asyncio.to_thread(pipe.read_text)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=100)
    assert done


class FakeClient:
    """Returns the texts that it has in turn."""

    def __init__(self, *texts: tuple[int, ...]) -> None:
        self.texts = list(texts)

    async def generate(self, _call: GenerateCall) -> AsyncIterator[GenerationChunk]:
        # As a call does, so that other tasks run.
        await asyncio.sleep(0)
        if not (text := self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]):
            raise OverloadedError("full", retry_after_seconds=0.001)
        yield GenerationChunk(token_ids=text)


def text_check(*texts: tuple[int, ...]) -> TextCheck:
    client = cast(TargetClient, FakeClient(*texts))
    return TextCheck(client, [cast(GenerateCall, None)], [(1, 2)])


async def test_texts_are_compared_and_refused_ones_are_not() -> None:
    check = text_check((1, 2), (1, 3), (), (1, 2))
    for _ in range(4):
        await check.compare()
    assert (check.compared, check.changed, check.refused) == (3, 1, 1)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Metrics pages by address; each is read once, the last one always."""
    found: dict[str, list[str]] = {}

    async def scrape(address: str) -> dict[str, float]:
        return samples(found[address].pop(0) if len(found[address]) > 1 else found[address][0])

    monkeypatch.setattr(serve, "scrape", scrape)
    monkeypatch.setattr(serve, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(serve, "_POLL_SECONDS", 0.001)
    return found


def running() -> Any:
    def process(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, http_address=name, pid=os.getpid())

    return SimpleNamespace(
        target=process("target"), drafts=(process("draft 0"),), gateway=process("gateway")
    )


async def test_what_is_freed_later_is_no_leak_and_what_stays_is_named(
    pages: dict[str, list[str]],
) -> None:
    pages |= {"target": ["ssd_open_sessions 2\n", "ssd_open_sessions 0\n"], "draft 0": [""]}
    assert await leftovers(running()) == []
    pages["draft 0"] = ["ssd_draft_sessions 1\n"]
    assert await leftovers(running()) == ["ssd_draft_sessions of draft 0: 1"]


def refusals(count: int) -> str:
    return f'# TYPE ssd_requests counter\nssd_requests_total{{outcome="overloaded"}} {count}\n'


@pytest.mark.parametrize(
    ("load", "errors", "refused", "problems"),
    [
        ("streams", 0, 0, []),
        ("streams", 2, 0, ["2 requests failed"]),
        ("streams", 2, 2, ["2 requests were refused"]),
        ("overload", 7, 7, []),
        ("overload", 9, 7, ["2 requests failed"]),
        ("overload", 0, 0, ["no request was refused"]),
    ],
)
async def test_failed_requests_are_a_problem_and_refusals_only_without_overload(
    load: str,
    errors: int,
    refused: int,
    problems: list[str],
    pages: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    pages |= {"target": [refusals(1), refusals(1 + refused)], "draft 0": [""]}
    client = guidellm(tmp_path, REPORTS % errors)
    found = await measure(load, LOADS[load], running(), text_check((1, 2)), client, 3.0)
    assert list(found.problems) == problems
    assert found.refusals == refused
    assert found.requests["successful"] == 5
    assert found.texts > 1


async def test_a_load_during_which_all_texts_are_refused_proves_nothing(
    pages: dict[str, list[str]], tmp_path: Path
) -> None:
    pages |= {"target": [refusals(1), refusals(1_000_001)], "draft 0": [""]}
    client = guidellm(tmp_path, REPORTS % 0)
    found = await measure("overload", LOADS["overload"], running(), text_check(()), client, 3.0)
    assert found.problems == ["no text was compared"]


async def test_rates_are_loads_of_their_own_whose_latencies_are_drawn(
    pages: dict[str, list[str]], tmp_path: Path
) -> None:
    pages |= {"target": [refusals(0), refusals(1)], "draft 0": [""]}
    client = guidellm(tmp_path, REPORTS % 1)
    load = replace(LOADS["poisson"], rate=2.0)
    found = await measure("poisson-2", load, running(), text_check((1, 2)), client, 2.0)
    assert not found.problems, "a refusal is a result"
    assert found.latency_ms["TTFT"] == {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    draw_latency([found, replace(found, rate=4.0)], tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


async def test_a_changed_text_is_a_problem(pages: dict[str, list[str]], tmp_path: Path) -> None:
    pages |= {"target": [""], "draft 0": [""]}
    client = guidellm(tmp_path, REPORTS % 0)
    found = await measure("x", LOADS["prompts"], running(), text_check((1, 3)), client, 3.0)
    (problem,) = found.problems
    assert problem.endswith(f"of {found.texts} texts changed")


def test_samples_are_named_with_their_labels() -> None:
    page = '# TYPE ssd_requests counter\nssd_requests_total{outcome="stop"} 3.0\nssd_x 1\n'
    assert samples(page) == {'ssd_requests_total{outcome="stop"}': 3.0, "ssd_x": 1.0}
