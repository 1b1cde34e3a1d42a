"""vLLM's HTTP server with drafts: all features have the texts of vLLM without drafts."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.ports import free_port
from tests.processes import ProcessUnderTest, running
from tests.vllm.runs import PATIENT
from tests.vllm.server import MODEL, ROOT, Server, is_active, serving, until

from ssd.errors import FieldError, UnsupportedError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import SpeculationChange
from ssd.text.tokenizer import load_tokenizer
from ssd.types import Mode

pytestmark = pytest.mark.vllm
MAX_LEN = 512
DASHBOARD = ROOT / "charts/ssd/files/dashboard.json"
PROMPT = "def mean(values):\n    "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["mean", "median"]}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LONG_PROMPT = "\n".join(f"def function_{number}(value):\n    return value" for number in range(20))
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 60}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {**WARM, "temperature": 0.0},
    "choices": {**WARM, "n": 3},
    "stop": {**WARM, "temperature": 0.0, "stop": ["items."]},
    "stop across tokens": {**WARM, "temperature": 0.0, "stop": ["ist of it"]},
    "logprobs": {**WARM, "logprobs": 3},
    "schema": {**WARM, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}},
    "schema, greedy": {
        "temperature": 0.0,
        "max_tokens": 60,
        "structured_outputs": {"json": SCHEMA},
    },
    "chunks": {**WARM, "prompt": LONG_PROMPT},
    "same beginning": {**WARM, "prompt": LONG_PROMPT + "\n\n"},
    "one token": {**WARM, "max_tokens": 1},
    "two tokens": {**WARM, "max_tokens": 2},
    "adapter": {**WARM, "model": "tuned"},
    "adapter, greedy": {**WARM, "model": "tuned", "temperature": 0.0},
    "penalty": {**WARM, "repetition_penalty": 1.3},
    "frequencies": {**WARM, "frequency_penalty": 0.8},
    "allowed tokens": {**WARM, "allowed_token_ids": [*range(0, 1000, 2)]},
    "bad words": {**WARM, "bad_words": ["values", "return sum"]},
    "filters": {**WARM, "top_k": 20, "top_p": 0.9},
}
GIVEN_IDS: dict[str, Any] = {"logprobs": 1, "logprob_token_ids": [3, 300, 4000]}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    model = json.loads((MODEL / "config.json").read_text())
    random = torch.Generator().manual_seed(0)
    width = model["num_attention_heads"] * model["head_dim"]
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights[f"{name}A.weight"] = torch.randn(8, model["hidden_size"], generator=random) * 0.3
        weights[f"{name}B.weight"] = torch.randn(width, 8, generator=random) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def requests() -> list[dict[str, Any]]:
    """All features, and one text up to the maximum length of the model."""
    num_prompt = len(load_tokenizer(MODEL).encode(PROMPT))
    to_the_end = {**WARM, "max_tokens": MAX_LEN - num_prompt}
    return [{"prompt": PROMPT, **each} for each in (*FEATURES.values(), to_the_end)]


Texts = list[list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Results:
    """What all requests have got: their choices, and the log-probabilities of those that ask."""

    texts: Texts
    logprobs: list[float]

    def check(self, expected: "Results") -> None:
        """Compare; log-probabilities may differ in their last bits."""
        assert self.texts == expected.texts
        assert self.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


async def complete_all(server: Server) -> Results:
    """Send all requests of the model at once, then those of the adapter.

    In a batch of both, vLLM 0.32 on CPUs gives the adapter to rows of the model too.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    numbered = list(enumerate(requests()))
    for is_adapted in (False, True):
        some = [each for each in numbered if ("model" in each[1]) is is_adapted]
        calls = (asyncio.to_thread(server.complete, request) for _, request in some)
        choices = await asyncio.gather(*calls)
        found |= {number: each for (number, _), each in zip(some, choices, strict=True)}
    ordered = [found[number] for number, _ in numbered]
    # This one runs alone: without drafts, vLLM returns other log-probabilities to requests that run
    # at the same time.
    given = await asyncio.to_thread(server.complete, {**WARM, "prompt": PROMPT, **GIVEN_IDS})
    logprobs = [each["logprobs"] for choices in ordered for each in choices if each["logprobs"]]
    return Results(
        [[result(each) for each in choices] for choices in (*ordered, given)],
        [value for each in logprobs for value in each["token_logprobs"]]
        + [value for each in given[0]["logprobs"]["top_logprobs"] for value in each.values()],
    )


def result(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal in all runs."""
    names = ("index", "token_ids", "text", "finish_reason", "stop_reason")
    return tuple(choice[name] for name in names)


@pytest.fixture(scope="module")
def expected(adapter: Path) -> Results:
    """The results of vLLM without speculation."""
    with serving(adapter) as server:
        return asyncio.run(complete_all(server))


@pytest.fixture(scope="module")
def draft_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(adapter: Path, expected: Results, draft_port: int) -> Iterator[Server]:
    """A server with drafts; no process listens at their addresses yet."""
    assert expected.texts
    drafts = [f"127.0.0.1:{draft_port}"]
    with serving(adapter, drafts=drafts, **PATIENT) as found:
        yield found


@pytest.fixture
async def client(server: Server) -> AsyncIterator[TargetClient]:
    async with TargetClient(server.admin_address) as found:
        yield found


@contextlib.asynccontextmanager
async def draft(client: TargetClient, port: int) -> AsyncIterator[ProcessUnderTest]:
    """Start a draft, and wait until vLLM has a link to it; it is killed at the end."""
    async with running("ssd_draft", "--port", str(port), "--http-port", "0") as process:
        await process.until("ready")
        await until(client, is_active)
        yield process


def test_the_features_are_used(expected: Results) -> None:
    """Otherwise equal texts would show nothing."""
    found = dict(zip(FEATURES, expected.texts, strict=False))
    assert len({tuple(choice[1]) for choice in found["choices"]}) == 3
    assert [found[name][0][3] for name in ("stop", "stop across tokens")] == ["stop", "stop"]
    for name in ("schema", "schema, greedy"):
        value = json.loads(found[name][0][2])
        assert (value["name"] in ("mean", "median"), value["size"] in (1, 20, 300)) == (True, True)
    constrained = ("penalty", "frequencies", "allowed tokens", "bad words", "filters")
    assert all(found[name][0] != found["choices"][0] for name in constrained)
    assert len(expected.logprobs) >= 60 + 60 * 3, (
        "60 tokens of one text, and 3 given ids at 60 places of another"
    )
    assert found["adapter, greedy"] != found["plain"]
    to_the_end = expected.texts[len(FEATURES)][0]
    assert len(to_the_end[1]) > 450, "a text up to the maximum length"
    assert to_the_end[3] == "length"


async def test_a_draft_that_appears_later_is_used(
    server: Server, client: TargetClient, expected: Results, draft_port: int
) -> None:
    (await complete_all(server)).check(expected)
    status = await client.pool_status()
    assert (status.links[0].state, status.hit_rate) == ("lost", 0.0)
    async with draft(client, draft_port):
        (await complete_all(server)).check(expected)
        status = await client.pool_status()
    assert status.hit_rate > 0.3
    assert status.dtype == "float32"
    assert status.weights_fingerprint.startswith("sha256:")
    counted = server.metrics()
    assert counted["vllm:prefix_cache_hits_total"] > 0
    assert sum(accepted(counted)) > 400
    assert counted['ssd_rounds_total{result="hit"}'] > 50
    assert counted['ssd_rounds_total{result="no_draft"}'] > 50, "before the draft appeared"
    assert counted['ssd_round_seconds_count{part="verify"}'] > 0
    assert counted['ssd_speculation_mode{mode="speculative"}'] == 1
    assert counted["ssd_proposer_crashes_total"] == 0
    of_vllm = re.findall(r"vllm:\w+", DASHBOARD.read_text())
    assert len(of_vllm) > 5
    assert set(of_vllm) <= counted.keys(), "the dashboard queries metrics that vLLM does not have"


def accepted(counted: Mapping[str, float]) -> tuple[float, float]:
    """Accepted tokens by vLLM's counter and by ours."""
    ours = (
        value for name, value in counted.items() if name.startswith("ssd_accepted_tokens_total")
    )
    return counted["vllm:spec_decode_num_accepted_tokens_total"], sum(ours)


async def test_vllms_counters_and_ours_are_equal(
    server: Server, client: TargetClient, draft_port: int
) -> None:
    """Without stop strings: vLLM does not count the step that runs while it finds one."""
    request = {**WARM, "prompt": PROMPT}
    async with draft(client, draft_port):
        before = server.metrics()
        calls = (asyncio.to_thread(server.complete, {**request, "seed": n}) for n in range(8))
        await asyncio.gather(*calls)
        after = server.metrics()
    gained = [now - then for now, then in zip(accepted(after), accepted(before), strict=True)]
    assert gained[0] == gained[1] > 8 * WARM["max_tokens"] // 4
    names = ("vllm:spec_decode_num_draft_tokens_total", "ssd_proposed_tokens_total")
    proposed = [after[name] - before[name] for name in names]
    assert proposed[0] == proposed[1] > gained[0]


async def test_requests_that_are_aborted_leave_no_sessions(
    server: Server, client: TargetClient, draft_port: int
) -> None:
    request = {**WARM, "prompt": PROMPT, "max_tokens": 480}
    async with draft(client, draft_port):
        calls = (asyncio.to_thread(server.abort, {**request, "seed": seed}) for seed in range(16))
        await asyncio.gather(*calls)
        await until(client, lambda pool: not pool.running_sequences and not pool.links[0].sessions)


async def test_speculation_is_changed_at_run_time(
    server: Server, client: TargetClient, expected: Results, draft_port: int
) -> None:
    async def num_proposed() -> float:
        before = server.metrics()["vllm:spec_decode_num_draft_tokens_total"]
        (await complete_all(server)).check(expected)
        return server.metrics()["vllm:spec_decode_num_draft_tokens_total"] - before

    async with draft(client, draft_port):
        await client.set_speculation(SpeculationChange(mode=Mode.AUTOREGRESSIVE))
        assert await num_proposed() == 0
        await client.set_speculation(SpeculationChange(mode=Mode.SPECULATIVE))
        assert await num_proposed() > 0
    with pytest.raises(FieldError, match="SYNCHRONOUS does not exist in vLLM"):
        await client.set_speculation(SpeculationChange(mode=Mode.SYNCHRONOUS))
    with pytest.raises(UnsupportedError, match="Drain: end vLLM by SIGTERM"):
        await client.drain(1000)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
async def test_kills_of_drafts_change_no_text(
    server: Server, client: TargetClient, expected: Results, draft_port: int, kills: int
) -> None:
    is_over = asyncio.Event()

    async def generate() -> int:
        count = 0
        while not is_over.is_set():
            (await complete_all(server)).check(expected)
            count += 1
        return count

    async def kill() -> None:
        try:
            for _ in range(kills):
                async with draft(client, draft_port):
                    await until(client, lambda pool: pool.links[0].sessions > 0)
                await until(client, lambda pool: not is_active(pool))
        finally:
            is_over.set()

    async with asyncio.TaskGroup() as group:
        generating = group.create_task(generate())
        group.create_task(kill())
    assert generating.result() > 0
