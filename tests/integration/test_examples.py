"""The programs of ``examples/``, with the embedded pair."""

import asyncio
import re
import subprocess
import sys

import pytest
from tests.gateway import gateway_of
from tests.pairs import QUICK, target_of
from tests.processes import ROOT

EXAMPLES = ROOT / "examples"
LIMIT = ("--max-tokens", "16")


def run(name: str, *flags: str) -> str:
    """Return what an example prints."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


async def test_the_clients_print_texts_of_a_running_target() -> None:
    async with (
        target_of("demo://target", *QUICK) as (target, _),
        gateway_of(target) as (gateway, _),
    ):
        address = ("--address", target.grpc_address)
        printed = await asyncio.to_thread(run, "grpc_client.py", "import os", *address, *LIMIT)
        assert re.search(r"\n\d+ rounds, \d+ accepted tokens\n$", printed)

        base = ("--base-url", f"http://{gateway.http_address}/v1")
        printed = await asyncio.to_thread(run, "openai_client.py", *base, *LIMIT)
        answer, _, completion = printed.partition("\n\ndef fib(n):")
        assert answer.strip(), printed
        assert completion.strip()


def test_the_comparison_of_modes_finds_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for process in ("TARGET", "DRAFT"):
        monkeypatch.setenv(f"SSD_{process}_ENGINE", "torch")
    small = ("--target", "demo://draft")
    printed = run("compare_modes.py", "--temperature", "1", *small, *LIMIT)
    assert re.findall(r"^(\w+) .* tokens/s", printed, re.M) == ["AR", "SD", "SSD"]
    assert printed.endswith("identical: all 16 tokens\n")


def test_every_program_has_its_row_and_every_sample_too() -> None:
    rows = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.py)`", rows, re.M)) == {
        path.name for path in EXAMPLES.glob("*.py")
    }
    samples = (EXAMPLES / "kubernetes/README.md").read_text()
    assert set(re.findall(r"^\| \[`([\w.-]+)`\]", samples, re.M)) == {
        path.name for path in (ROOT / "charts/ssd/samples").glob("*.yaml")
    }
