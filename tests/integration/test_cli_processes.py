"""The ``ssd`` command with real processes: its output and its child processes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tests.gateway import ScriptedTarget
from tests.pairs import QUICK, deployed, target_of
from tests.pki import Authority, put
from tests.processes import PYTHON
from tests.served import serving

from ssd.observability.scrape import scrape
from ssd.rpc.codec import GenerateCall
from ssd.rpc.server import RpcServer
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import GenerationChunk
from ssd_cli import generate
from ssd_cli.app import run

SHAPE = ("--dtype", "float32", "--lookahead", "3", "--branches", "8", *QUICK)
COMMAND = (*PYTHON, "-m", "ssd_cli")
OUTPUT_SECONDS = 240.0


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of these tests, in place of that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = str(write_tiny_folder(tmp_path_factory.mktemp("pair"), seed=1))
    return ("--target", folder, "--draft", folder, *SHAPE)


@pytest.fixture(scope="module")
def shared(pair: tuple[str, ...]) -> Iterator[str]:
    """Address of the target of an ``ssd up``, for tests that do not change it."""
    with subprocess.Popen(
        [*COMMAND, "up", "--json", "--port", "0", "--http-port", "0", *pair],
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            addresses = json.loads(process.stdout.readline())
            children = [child.pid for child in psutil.Process(process.pid).children()]
            assert len(addresses["drafts"]) == 1
            assert len(children) == 2
            yield addresses["target"]["grpc"]
            # Ctrl-C; SIGTERM is sent during the start in another test.
            process.send_signal(signal.SIGINT)
            assert process.wait(OUTPUT_SECONDS) == 0
            assert not any(map(is_running, children))
        finally:
            process.kill()


@asynccontextmanager
async def command(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(OUTPUT_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Reads the rest, so that the pipes are closed.
        await process.communicate()


async def completed(*argv: str, prompt: str = "") -> tuple[int, str, str]:
    async with command(*argv) as process:
        out, err = await process.communicate(prompt.encode())
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def up(
    *argv: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any], list[int]]]:
    async with command("up", "--json", "--port", "0", "--http-port", "0", *argv) as process:
        assert process.stdout is not None
        addresses = json.loads(await process.stdout.readline())
        children = [child.pid for child in psutil.Process(process.pid).children()]
        yield process, addresses, children


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(pair: tuple[str, ...]) -> AsyncIterator[str]:
    """Address of a target without drafts."""
    async with target_of(pair[1], *SHAPE) as (target, _):
        yield target.grpc_address


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; returns its exit code and both outputs."""

    def command(*argv: str) -> tuple[int, str, str]:
        return (run(argv), *capfd.readouterr())

    return command


def test_generate_prints_one_json_object_with_identical_tokens_in_all_modes(
    shared: str, pair: tuple[str, ...], call: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "deployed", deployed)
    found = {}
    # Two from the running target, one from models that the command starts and stops.
    wheres = {
        "autoregressive": ("--endpoint", shared),
        "synchronous": pair,
        "speculative": ("--endpoint", shared),
    }
    for mode, where in wheres.items():
        code, out, err = call(
            *("generate", "def fib(n):", "--json", "--mode", mode, "--seed", "5"),
            *("--max-tokens", "40", *where),
        )
        assert (code, err) == (0, "")
        found[mode] = json.loads(out)
    plain, ahead = found["autoregressive"], found["speculative"]
    assert plain["token_ids"] == ahead["token_ids"]
    assert plain["text"] == ahead["text"]
    assert plain["finish_reason"] in ("length", "stop")
    assert plain["statistics"]["seed"] == ahead["statistics"]["seed"] == 5
    assert plain["statistics"]["tokens"] == len(plain["token_ids"])
    assert plain["statistics"]["hit_rate"] is None
    alone = found["synchronous"]
    assert alone["token_ids"] == plain["token_ids"]
    assert alone["statistics"]["mode"] == "synchronous"
    assert alone["statistics"]["hit_rate"] is None
    assert alone["statistics"]["tokens_per_round"] > 1
    # On a busy machine a short text may end before the draft has opened its session.
    was_speculative = ahead["statistics"]["hit_rate"] is not None
    assert ahead["statistics"]["mode"] == ("speculative" if was_speculative else "autoregressive")


async def test_a_prompt_from_standard_input_is_continued_and_the_summary_is_on_standard_error(
    alone: str,
) -> None:
    code, out, err = await completed(
        *("generate", "-", "--endpoint", alone, "--max-tokens", "8", "--temperature", "0"),
        prompt="import os\n",
    )
    assert code == 0
    assert out.endswith("\n")
    assert "tokens per round" not in out
    assert "tokens per round" in err


def test_a_text_without_a_draft_shows_its_seed_and_a_hint(alone: str, call: Command) -> None:
    arguments = ("generate", "a = 1", "--endpoint", alone)
    _, _, plain = call(*arguments, "--max-tokens", "30", "--temperature", "0")
    assert "hint" not in plain
    assert "seed" not in plain
    greedy = ("--max-tokens", "30", "--temperature", "0", "--mode", "speculative")
    _, _, ahead = call(*arguments, *greedy)
    assert ahead.endswith("\nhint: no round was speculative: no draft is linked\n")
    code, text, sampled = call(*arguments, "--max-tokens", "9")
    seed = re.search(r"^seed +(\d+)$", sampled, re.MULTILINE)
    assert code == 0
    assert seed is not None
    _, again, _ = call(*arguments, "--max-tokens", "9", "--seed", seed[1])
    assert again == text


def test_a_refused_request_prints_one_line_and_exits_with_2(alone: str, call: Command) -> None:
    code, out, err = call("generate", "x", "--endpoint", alone, "--max-tokens", "100000")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "over max_model_len" in err


def test_check_compares_the_texts_of_a_batch(
    call: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "deployed", deployed)
    # The smaller embedded model as both; a tiny one has too few positions for the prompts.
    models = ("--target", "demo://draft", "--draft", "demo://draft", *QUICK)
    code, printed, _ = call("check", *models, "--batch", "4", "--max-tokens", "128", "--json")
    found = json.loads(printed)
    assert (code, found["num_equal"], found["first_differences"]) == (0, 4, [None] * 4)


async def test_a_signal_during_the_start_sets_the_exit_code_and_ends_all_processes(
    pair: tuple[str, ...],
) -> None:
    async with command("up", "--port", "0", "--http-port", "0", *pair) as process:
        watched = psutil.Process(process.pid)
        while not (children := watched.children()):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM
        assert not any(is_running(child.pid) for child in children)


async def fitted_rounds(draft: dict[str, str]) -> float:
    """Rounds at temperature 0 to which a draft has fitted its fan-out."""
    return (await scrape(draft["http"])).get('ssd_fan_out_fitted_rounds{temperature="0"}', 0.0)


@pytest.mark.slow
async def test_a_draft_of_up_continues_with_the_fan_out_of_its_last_start(
    pair: tuple[str, ...],
) -> None:
    async with up(*pair) as (process, addresses, _):
        (draft,) = addresses["drafts"]
        target = ("--endpoint", addresses["target"]["grpc"], "--mode", "speculative")
        sampling = ("--temperature", "0", "--ignore-eos", "--max-tokens", "200")
        code, _, error = await completed("generate", "def f(n):", *target, *sampling)
        assert code == 0, error
        while not (rounds := await fitted_rounds(draft)):
            pass
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    async with up(*pair) as (_, addresses, _):
        assert await fitted_rounds(addresses["drafts"][0]) >= rounds


@pytest.mark.slow
async def test_up_starts_a_gateway_and_restarts_it_at_its_address(pair: tuple[str, ...]) -> None:
    flags = ("--num-drafts", "0", "--gateway", "--gateway-port", "0")
    async with up(*pair, *flags) as (process, addresses, children):
        url = f"http://{addresses['gateway']['http']}/readyz"

        def probe() -> int:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status)

        assert await asyncio.to_thread(probe) == 200
        victim = next(pid for pid in children if "ssd_gateway" in psutil.Process(pid).cmdline())
        os.kill(victim, signal.SIGKILL)
        assert process.stderr is not None
        assert b"restarting it in 1 s" in await process.stderr.readline()
        assert await process.stderr.readline() == b"gateway: ready again\n"
        assert await asyncio.to_thread(probe) == 200


@pytest.mark.slow
async def test_settings_in_the_environment_secure_all_processes_of_up(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority().files(tmp_path / "tls", "127.0.0.1")
    clients = put(tmp_path / "clients", "a-token-of-clients")
    links = put(tmp_path / "links", "a-token-of-links")
    for name, value in {
        "SSD_TARGET_TLS_CERTIFICATE": files.certificate,
        "SSD_TARGET_TLS_KEY": files.key,
        "SSD_TARGET_TOKEN_FILE": clients,
        "SSD_TARGET_LINK_CA": files.ca,
        "SSD_TARGET_LINK_TOKEN_FILE": links,
        "SSD_DRAFT_TLS_CERTIFICATE": files.certificate,
        "SSD_DRAFT_TLS_KEY": files.key,
        "SSD_DRAFT_TOKEN_FILE": links,
        "SSD_GATEWAY_TARGET_CA": files.ca,
        "SSD_GATEWAY_TARGET_TOKEN_FILE": clients,
    }.items():
        monkeypatch.setenv(name, value)
    async with up(*pair, "--gateway", "--gateway-port", "0") as (_, addresses, _):
        base = f"http://{addresses['gateway']['http']}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            (model,) = (await client.models.list()).data
            answer = await client.completions.create(model=model.id, prompt="a", max_tokens=4)
        assert answer.choices[0].finish_reason
        endpoint = ("--endpoint", addresses["target"]["grpc"], "--tls-ca", files.ca)
        own = (*endpoint, "--token-file", clients)
        code, out, _ = await completed("generate", "a", "--max-tokens", "4", "--json", *own)
        assert (code, bool(json.loads(out)["text"])) == (0, True)
        _, out, _ = await completed("pool", "--json", *own)
        assert [link["state"] for link in json.loads(out)["links"]] == ["active"]
        for token in ((), ("--token-file", links)):
            code, _, err = await completed("generate", "a", *endpoint, *token)
            assert (code, "token" in err) == (1, True)


async def two_tokens(_call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    """Two tokens, and then nothing until the request is cancelled."""
    for token_id in (1, 2):
        yield GenerationChunk(token_ids=(token_id,), text="a", seed=3)
    await asyncio.Event().wait()


@pytest.fixture
async def endless() -> AsyncIterator[RpcServer]:
    async with serving(ScriptedTarget(two_tokens)) as server:
        yield server


async def test_ctrl_c_in_generate_prints_the_statistics_so_far(endless: RpcServer) -> None:
    async with command("generate", "x", "--endpoint", f"127.0.0.1:{endless.port}") as process:
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"aa"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert process.returncode == 130, err
    assert re.search(rb"^tokens +2$", err, re.MULTILINE)
    assert b"Traceback" not in err
