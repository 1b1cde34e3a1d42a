"""Real vLLM as the target of real drafts: its texts are those of vLLM without drafts, and ours."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

import pytest
from tests.vllm.server import MODEL, ROOT, command

from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.text.tokenizer import load_tokenizer
from ssd.types import Mode, SamplingParams

pytestmark = pytest.mark.vllm
NUM_TOKENS = 64
NUM_SAMPLES = 96
NUM_BINS = 8
KILL_SECONDS = 0.3
"""A batch takes a second."""
PROMPTS = tuple(f"def {name}(values):\n    " for name in ("mean", "median", "merge", "split"))
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 0.5},
)
Texts = list[list[int]]


@dataclass
class Run:
    """A run of vLLM: its texts in order, and its counters at the end."""

    texts: Texts = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    """At each token of the prompts, where jobs request them."""

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that were accepted."""
        return self.counters.get("vllm:spec_decode_num_accepted_tokens", 0)


class Draft:
    """A draft process on a free port."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ssd_draft", "--port", "0", "--http-port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.address = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                self.address = event["grpc"]
            if event["event"] == "ready":
                return
        raise AssertionError("the draft did not start")

    def kill(self) -> None:
        _end(self.process)


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with process:
        """Closes its pipes."""


@pytest.fixture
def draft() -> Iterator[Draft]:
    found = Draft()
    yield found
    found.kill()


def jobs() -> list[dict[str, Any]]:
    encode = load_tokenizer(MODEL).encode
    return [
        {"prompt_ids": encode(prompt), "seed": seed, "max_tokens": NUM_TOKENS, **sampling}
        for seed, prompt in enumerate(PROMPTS)
        for sampling in SAMPLINGS
    ]


def run(
    drafts: Sequence[str],
    *,
    of: Sequence[dict[str, Any]] = (),
    plugin: dict[str, Any] | None = None,
    batch: int = 8,
    after_batch: Callable[[], None] = lambda: None,
    **engine: Any,
) -> Run:
    """Generate texts with vLLM, all by default; ``engine`` has arguments of ``LLM``."""
    task = {
        "model": str(MODEL),
        "jobs": list(of) or jobs(),
        "batch": batch,
        "drafts": list(drafts),
        "plugin": plugin or {},
        "engine": engine,
    }
    process = subprocess.Popen(
        command(ROOT / "tests/vllm/generate.py", VLLM_LOGGING_LEVEL="WARNING"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found = Run()
    try:
        with process.stdin:
            json.dump(task, process.stdin)
        for line in process.stdout:
            name, _, value = line.partition(" ")
            if name == "BATCH":
                found.texts += json.loads(value)
                after_batch()
            if name == "LOGPROBS":
                found.logprobs += [
                    {int(k): v for k, v in each.items()} for each in json.loads(value)
                ]
            if name == "COUNTERS":
                found.counters = json.loads(value)
        assert process.wait(timeout=60) == 0
    finally:
        _end(process)
    return found


@pytest.fixture(scope="module")
def without_drafts() -> Texts:
    return run(()).texts


def our_texts() -> Texts:
    """Texts of our own target, for the same seeds."""

    async def generate() -> Texts:
        found: Texts = []
        async with (
            deployed(Deployment(num_drafts=0, target_flags=("--dtype", "float32"))) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            for job in jobs():
                ids = tuple(job.pop("prompt_ids"))
                sampling = SamplingParams(ignore_eos=True, **job)
                call = GenerateCall(
                    prompt=ids,
                    sampling=sampling,
                    seed=sampling.seed,
                    max_tokens=NUM_TOKENS,
                    mode=Mode.AUTOREGRESSIVE,
                )
                text = [token async for chunk in client.generate(call) for token in chunk.token_ids]
                found.append(text)
        return found

    return asyncio.run(generate())


def test_texts_with_drafts_are_those_without_and_those_of_our_target(
    draft: Draft, without_drafts: Texts
) -> None:
    found = run([draft.address])
    assert found.texts == without_drafts
    assert found.num_accepted > len(SAMPLINGS) * len(PROMPTS) * NUM_TOKENS // 4
    assert our_texts() == without_drafts


def test_preempted_requests_keep_their_texts(draft: Draft, without_drafts: Texts) -> None:
    # Room for a text of the maximum length, and for 5 of the 8 that run.
    found = run([draft.address], block_size=32, num_gpu_blocks_override=17)
    assert found.counters["vllm:num_preemptions"] > 0
    assert found.num_accepted > 0
    assert found.texts == without_drafts


def test_a_draft_that_is_killed_costs_no_text(draft: Draft, without_drafts: Texts) -> None:
    killers: list[threading.Timer] = []

    def kill_in_the_next_batch() -> None:
        if not killers:
            killers.append(threading.Timer(KILL_SECONDS, draft.kill))
            killers[0].start()

    found = run([draft.address], batch=4, after_batch=kill_in_the_next_batch)
    killers[0].join()
    assert found.texts == without_drafts
    assert found.num_accepted > 0


def test_vllm_serves_without_any_draft(without_drafts: Texts) -> None:
    assert run(["127.0.0.1:1"]).texts == without_drafts


@pytest.mark.parametrize("sampling", ["coupled", "stock"])
def test_tokens_have_the_probabilities_of_the_model(draft: Draft, sampling: str) -> None:
    """Chi-square of the choices between the two most probable tokens, by their probability."""
    prompt = load_tokenizer(MODEL).encode(PROMPTS[0])
    samples = run(
        [draft.address],
        of=[
            {
                "prompt_ids": prompt,
                # On CPUs, vLLM 0.32 cannot rewind the generators of its own rule.
                "seed": seed if sampling == "coupled" else None,
                "max_tokens": NUM_TOKENS,
                "temperature": 1.0,
                "top_k": 2,
            }
            for seed in range(NUM_SAMPLES)
        ],
        plugin={"sampling": sampling, "mode": "speculative"},
    )
    assert samples.num_accepted > NUM_SAMPLES * NUM_TOKENS // 10, "proposals take part"
    found = run(
        (),
        of=[
            {"prompt_ids": [*prompt, *text], "max_tokens": 1, "prompt_logprobs": 2}
            for text in samples.texts
        ],
    ).logprobs
    # The sum of the choices of a bin, less its mean, has independent increments of known variance.
    chosen, mean, variance = ([0.0] * NUM_BINS for _ in range(3))
    for number, text in enumerate(samples.texts):
        first = number * (len(prompt) + NUM_TOKENS) + len(prompt)
        for token, near in zip(text, found[first : first + NUM_TOKENS], strict=True):
            first_id, second_id = sorted(near, key=lambda each: -near[each])[:2]
            assert token in (first_id, second_id)
            share = 1 / (1 + exp(near[second_id] - near[first_id]))
            which = min(int((share - 0.5) * 2 * NUM_BINS), NUM_BINS - 1)
            chosen[which] += token == first_id
            mean[which] += share
            variance[which] += share * (1 - share)
    assert min(variance) > 5.0, "each bin has enough choices"
    squares = [(c - m) ** 2 / v for c, m, v in zip(chosen, mean, variance, strict=True)]
    # A correct sampler exceeds it once in 1,000 runs: chi-square with 8 degrees of freedom.
    assert sum(squares) < 26.1, (chosen, mean, variance)
