"""Real vLLM as the target of real drafts: its texts are those of vLLM without drafts, and ours."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, inf, prod, sqrt
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
NUM_SAMPLES = 2000
LEAST_EXPECTED = 5.0
"""Texts with fewer expected samples are one cell."""
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
    """Of the first tokens, where jobs request some."""

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
def test_texts_have_the_probabilities_of_the_model(draft: Draft, sampling: str) -> None:
    """Chi-square of all texts of 8 tokens, each one of the two most probable."""
    prompt = load_tokenizer(MODEL).encode(PROMPTS[0])
    # A seed of each request makes vLLM's own sampler slow.
    seeds = range(NUM_SAMPLES) if sampling == "coupled" else [None] * NUM_SAMPLES
    samples = run(
        [draft.address],
        of=[
            {"prompt_ids": prompt, "seed": seed, "max_tokens": 8, "temperature": 1.0, "top_k": 2}
            for seed in seeds
        ],
        plugin={"sampling": sampling, "mode": "speculative"},
        batch=NUM_SAMPLES,
        max_num_seqs=32,
    )
    assert samples.num_accepted > NUM_SAMPLES // 2, "proposals take part"
    counts = Counter(tuple(each) for each in samples.texts)
    prefixes = sorted({text[:length] for text in counts for length in range(8)})
    contexts = [
        {"prompt_ids": [*prompt, *prefix], "max_tokens": 1, "temperature": 0.0, "logprobs": 2}
        for prefix in prefixes
    ]
    found = run((), of=contexts, batch=len(contexts))
    likely = {
        prefix: dict(sorted(each.items(), key=lambda item: item[1])[-2:])
        for prefix, each in zip(prefixes, found.logprobs, strict=True)
    }
    expected = {
        text: NUM_SAMPLES * prod(share(likely[text[:end]], text[end]) for end in range(8))
        for text in counts
    }
    cells = [(counts[text], expected[text]) for text in counts if expected[text] >= LEAST_EXPECTED]
    rest = NUM_SAMPLES - sum(count for count, _ in cells), NUM_SAMPLES - sum(e for _, e in cells)
    distance = sum((count - mean) ** 2 / mean for count, mean in (*cells, rest))
    freedom = len(cells)
    assert freedom > 20
    # Four standard deviations: a correct sampler fails once in 10,000 runs.
    assert distance < freedom + 4 * sqrt(2 * freedom), (distance, freedom)


def share(likely: dict[int, float], token: int) -> float:
    """The probability of a token among the likely ones; 0 for another."""
    return exp(likely.get(token, -inf)) / sum(map(exp, likely.values()))
