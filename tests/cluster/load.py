"""Clients that send requests to a target and compare each text with that of plain decoding."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tests.cluster.kube import eventually

from ssd.errors import NotReadyError, SSDError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall, SpeculationChange
from ssd.runtime.launch import Deployment, deployed
from ssd.types import Mode, SamplingParams, TokenId

NUM_CLIENTS = 8
NUM_TOKENS = 96
LONGEST_SECONDS = 240.0
RETRY_SECONDS = 180.0
"""How long a request waits for a ready target, with ``retries``. A pod that starts on a busy node
can take longer than the client's default; a figure of the run reports the time."""
RECOVERY_SECONDS = 5.0
"""How long a client waits for a ready target after a failure before it sends again."""
PROMPTS = tuple(
    f"def {name}(values):\n    " for name in ("mean", "median", "merge", "split", "scan", "pad")
)
TEMPERATURES = (0.0, 1.0)
Job = tuple[str, float, int]
"""Prompt, temperature, seed."""
JOBS: tuple[Job, ...] = tuple(
    (prompt, temperature, seed)
    for seed, prompt in enumerate(PROMPTS)
    for temperature in TEMPERATURES
)
Texts = Mapping[Job, Sequence[TokenId]]


@dataclass
class Attempt:
    """One request: the tokens that arrived, and its error."""

    tokens: list[TokenId] = field(default_factory=list)
    error: SSDError | TimeoutError | None = None


async def attempt(client: TargetClient, job: Job, mode: Mode) -> Attempt:
    """Send one request."""
    prompt, temperature, seed = job
    call = GenerateCall(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=temperature, ignore_eos=True, seed=seed, max_tokens=NUM_TOKENS
        ),
        mode=mode,
    )
    found = Attempt()
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            async for chunk in client.generate(call):
                found.tokens.extend(chunk.token_ids)
    except (SSDError, TimeoutError) as error:
        found.error = error
    return found


@dataclass
class RequestCounts:
    """Results of all clients."""

    num_finished: int = 0
    different: Counter[tuple[Job, int]] = field(default_factory=Counter)
    """Texts that are not those of plain decoding, by job and first different token."""
    num_cut: int = 0
    """Failures after the first token."""
    failures: list[SSDError | TimeoutError] = field(default_factory=list)


class Load:
    """Clients, each with one request at a time. Use as a context.

    With ``retries`` the client library waits for a ready target: a request that fails before the
    first token is sent again.
    """

    def __init__(self, endpoint: str, expected: Texts, *, retries: bool = False) -> None:
        self.counts = RequestCounts()
        self._endpoint = endpoint
        self._expected = expected
        self._retries = retries
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        eventually(lambda: self.counts.num_finished > 0, "the first text is complete", 120)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=LONGEST_SECONDS + 30)
        assert not self._thread.is_alive(), "a request never ended"
        self._done.result(timeout=0)

    def go_on(self, num_texts: int) -> None:
        """Wait for this many more texts."""
        goal = self.counts.num_finished + num_texts
        eventually(lambda: self.counts.num_finished >= goal, f"{num_texts} more texts", 180)

    def assert_undisturbed(self) -> None:
        """No request failed, and no text differs."""
        errors = [f"{type(each).__name__}: {each}" for each in self.counts.failures]
        assert not errors, f"{errors}, {self.counts.num_cut} of them cut a stream"
        assert not self.counts.different, (
            f"of {self.counts.num_finished} texts: {self.counts.different}"
        )
        assert self.counts.num_finished > 0

    def _run(self) -> None:
        try:
            asyncio.run(self._run_clients())
        except BaseException as error:
            self._done.set_exception(error)
            raise
        self._done.set_result(None)

    async def _run_clients(self) -> None:
        ready_seconds = RETRY_SECONDS if self._retries else 0.0
        async with TargetClient(self._endpoint, ready_seconds=ready_seconds) as client:
            await asyncio.gather(*(self._run_client(client, first) for first in range(NUM_CLIENTS)))

    async def _run_client(self, client: TargetClient, first: int) -> None:
        number = first
        while not self._stop.is_set():
            job = JOBS[number % len(JOBS)]
            found = await attempt(client, job, Mode.SPECULATIVE)
            number += 1
            if found.error is None:
                self.counts.num_finished += 1
                expected = self._expected[job]
                if found.tokens != list(expected):
                    pairs = zip(found.tokens, expected, strict=False)
                    first = next((i for i, (one, other) in enumerate(pairs) if one != other), -1)
                    self.counts.different[job, first] += 1
                continue
            self.counts.failures.append(found.error)
            self.counts.num_cut += bool(found.tokens)
            with contextlib.suppress(NotReadyError):
                await client.wait_ready(RECOVERY_SECONDS)


def always_speculate(address: str) -> None:
    """Make a target speculate in every step, and suspend no draft that is late.

    On a busy machine mode ``auto`` may decode without drafts before the first hit.
    """

    async def change() -> None:
        async with TargetClient(address) as client:
            await client.set_speculation(
                SpeculationChange(mode=Mode.SPECULATIVE, draft_deadline_ms=5000)
            )

    asyncio.run(change())


def plain_texts(*target_flags: str) -> dict[Job, tuple[TokenId, ...]]:
    """Texts of plain decoding on this machine, without a cluster."""

    async def decode() -> dict[Job, tuple[TokenId, ...]]:
        async with (
            deployed(Deployment(num_drafts=0, target_flags=target_flags)) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            found = {job: await attempt(client, job, Mode.AUTOREGRESSIVE) for job in JOBS}
        assert all(each.error is None for each in found.values())
        return {job: tuple(each.tokens) for job, each in found.items()}

    return asyncio.run(decode())
