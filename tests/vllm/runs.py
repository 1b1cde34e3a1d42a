"""Runs of vLLM and of our own target over the same jobs, and drafts that can fail."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from tests.vllm.server import MODEL, ROOT, command

from ssd.rpc.client import TargetClient
from ssd.runtime.launch import Deployment, deployed
from ssd.types import Mode, SamplingParams

Job = dict[str, Any]
"""``prompt_ids``, ``seed``, ``max_tokens`` and sampling parameters."""
Texts = list[list[int]]
PATIENT: dict[str, Any] = {
    "mode": "speculative",
    "draft_deadline_ms": 2000.0,
    "adaptive_deadline": False,
    "circuit_breaker": False,
}
"""Settings with which proposals are from tables on a busy machine too."""
NUM_CALLS = 8
"""Texts that our target generates at a time."""
WORK_SECONDS, STALL_SECONDS = 3.0, 1.5


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
    """A draft process."""

    def __init__(self, *flags: object, port: int = 0) -> None:
        """Start it and wait until it is ready; port 0 is a free one."""
        ports = ("--port", str(port), "--http-port", "0")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ssd_draft", *ports, *map(str, flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.address = ""
        assert self._process.stdout is not None
        line = ""
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                self.address = event["grpc"]
            if event["event"] == "ready":
                return
        self.kill()
        raise AssertionError(f"the draft did not start: {line}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once; idempotent."""
        _end(self._process)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def most_links(self) -> int:
        """End the process, and return the largest number of links that it had at a time."""
        self._process.terminate()
        assert self._process.stdout is not None
        counts = [0]
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "link":
                counts.append(counts[-1] + (1 if event["state"] == "active" else -1))
        return max(counts)


@contextmanager
def failing_draft(port: int) -> Iterator[list[str]]:
    """Inside, a draft works, stalls, works, is killed and starts again; yields what was done."""
    done: list[str] = []
    is_over = threading.Event()

    def fail() -> None:
        while not is_over.is_set():
            with Draft(port=port) as draft:
                is_over.wait(WORK_SECONDS)
                draft.signal(signal.SIGSTOP)
                is_over.wait(STALL_SECONDS)
                draft.signal(signal.SIGCONT)
                done.append("stall")
                is_over.wait(WORK_SECONDS)
            done.append("kill")

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


def run(
    jobs: Sequence[Job],
    drafts: Sequence[str] = (),
    *,
    plugin: dict[str, Any] | None = None,
    batch: int = 8,
    after_batch: Callable[[], None] = lambda: None,
    calls_to_bug: int = 0,
    **engine: Any,
) -> Run:
    """Generate texts with vLLM; the arguments are those of ``generate.py``."""
    task = {
        "model": str(MODEL),
        "jobs": list(jobs),
        "batch": batch,
        "drafts": list(drafts),
        "plugin": plugin or {},
        "calls_to_bug": calls_to_bug,
        "engine": engine,
    }
    # In one process, which imports vLLM once; test_server has vLLM's own processes.
    variables: dict[str, object] = {"VLLM_ENABLE_V1_MULTIPROCESSING": 0}
    if num_ranks := engine.get("tensor_parallel_size"):
        variables = {
            # By itself, vLLM binds each rank to a NUMA node of its own.
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks))),
            # A request without a seed has that of its id, which then is its number.
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": 1,
        }
    process = subprocess.Popen(
        command(ROOT / "tests/vllm/generate.py", VLLM_LOGGING_LEVEL="WARNING", **variables),
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


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with process:
        """Closes its pipes."""


def our_texts(jobs: Sequence[Job]) -> Texts:
    """Texts of our own target, for the same seeds."""
    return asyncio.run(_our_texts(jobs))


async def _our_texts(jobs: Sequence[Job]) -> Texts:
    calls = asyncio.Semaphore(NUM_CALLS)

    async def generate(client: TargetClient, job: Job) -> list[int]:
        given = dict(job)
        ids = tuple(given.pop("prompt_ids"))
        chunks = client.generate(ids, SamplingParams(ignore_eos=True, **given), Mode.AUTOREGRESSIVE)
        async with calls:
            return [token async for chunk in chunks for token in chunk.token_ids]

    async with (
        deployed(Deployment(num_drafts=0, target_flags=("--dtype", "float32"))) as running,
        TargetClient(running.target.grpc_address) as client,
    ):
        return await asyncio.gather(*(generate(client, job) for job in jobs))
