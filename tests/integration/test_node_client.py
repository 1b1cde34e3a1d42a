"""The protos outside Python: the client in Node, against a real target."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.model_folders import model_folder
from tests.pairs import QUICK, target_of
from tests.processes import ROOT
from tests.texts import read

from ssd.types import SamplingParams

NODE = ROOT / "tests" / "clients" / "node"
SHAPE = ("--dtype", "float32", "--lookahead", "3", *QUICK)
UNREACHABLE = (
    *("EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT"),
    *("ERR_SOCKET_TIMEOUT", "ECONNABORTED", "EHOSTUNREACH"),
)
"""Errors of npm if it cannot reach its registry."""
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def node() -> str:
    """The program node, with the packages of the client."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("node and npm are not on PATH: the client in Node is not tested")
    installed = NODE / "node_modules" / ".package-lock.json"
    lock = NODE / "package-lock.json"
    if installed.is_file() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return program
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0")
    done = subprocess.run(
        [npm, "ci", *quiet], cwd=NODE, capture_output=True, text=True, check=False, timeout=240
    )
    if done.returncode and any(code in done.stderr for code in UNREACHABLE):
        pytest.skip("npm cannot reach its registry: the client in Node is not tested")
    assert done.returncode == 0, done.stderr
    return program


folder = model_folder(seed=1, max_len=4096)


async def run(node: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the streamed text and the report of the client."""
    process = await asyncio.create_subprocess_exec(
        *(node, "generate.mjs", *arguments),
        cwd=NODE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_SECONDS):
        out, err = await process.communicate()
    assert process.returncode is not None
    assert err.count(b"\n") == 1, err.decode()
    return process.returncode, out.decode(), json.loads(err)


async def test_the_client_in_node_streams_shows_errors_and_cancels(node: str, folder: Path) -> None:
    async with target_of(folder, *SHAPE) as (process, client):
        address = process.grpc_address
        # A seed that a number of JavaScript cannot hold.
        params = SamplingParams(temperature=0.7, seed=2**64 - 3, max_tokens=30, ignore_eos=True)
        expected = await read(client, "Grüße", params)
        sampling = {"temperature": 0.7, "seed": str(2**64 - 3), "maxTokens": 30, "ignoreEos": True}
        code, text, report = await run(node, address, "Grüße", json.dumps(sampling))
        assert code == 0, report
        assert report["tokenIds"] == list(expected.token_ids)
        assert text == expected.text
        assert report["seed"] == str(2**64 - 3)
        assert report["finishReason"] == "FINISH_REASON_LENGTH"
        assert report["usage"]["completionTokens"] == 30
        assert report["statistics"]["rounds"] == 30
        assert report["model"] == folder.name

        code, text, report = await run(node, address, "x", '{"temperature": -1}')
        assert (code, text, report["code"]) == (1, "", "INVALID_ARGUMENT")
        (violation,) = report["details"]["google.rpc.BadRequest"]["fieldViolations"]
        assert violation["field"] == "sampling.temperature"
        assert violation["description"] in report["message"]
        info = report["details"]["google.rpc.ErrorInfo"]
        assert info["domain"] == "ssd"
        assert violation.items() <= info["metadata"].items()

        endless = json.dumps({"maxTokens": 4000, "ignoreEos": True})
        code, text, report = await run(node, address, "x", endless, "2")
        assert code == 0, report
        assert report["finishReason"] == "FINISH_REASON_UNSPECIFIED"
        async with asyncio.timeout(WAIT_SECONDS):
            while (await client.pool_status()).running_sequences:
                pass
        assert 'ssd_requests_total{outcome="cancelled"} 1.0' in (await process.probe("/metrics"))[1]


async def test_the_client_in_node_reports_a_target_that_does_not_run(node: str) -> None:
    code, text, report = await run(node, "127.0.0.1:1", "x")
    assert (code, text, report["code"]) == (1, "", "UNAVAILABLE")
