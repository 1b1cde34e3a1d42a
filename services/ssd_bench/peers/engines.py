"""Engines under measurement: each completes a batch of prompts."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ssd.errors import SetupError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import WHOLE_TEXT_MS, GenerateCall
from ssd.runtime.launch import Deployment, deployed, draft_process, ending
from ssd.settings import HUGE_PAGES
from ssd.text.tokenizer import load_tokenizer
from ssd.types import Mode, SamplingParams
from ssd_bench.metrics import Continuation
from ssd_bench.peers.contenders import OWN, PAPER, Contender
from ssd_bench.peers.environments import check_gpu, interpreter, preload
from ssd_bench.peers.servers import Answer, ServerEngine
from ssd_bench.peers.workers.wire import Batch, Config
from ssd_bench.runs import continuation

WORKERS = Path(__file__).parent / "workers"
LOAD_SECONDS = 600.0
BATCH_SECONDS = 600.0
LINE_BYTES = 16 << 20
LINE_CHARS = 120
"""Characters of a process's last line that an error contains."""
MAX_LENGTH = 1024
MODES = {"none": Mode.AUTOREGRESSIVE, "draft": Mode.SYNCHRONOUS, "ssd": Mode.AUTO}
"""What a user gets: mode ``auto`` is the default of the target and of the plugin for vLLM."""
FORMATS = {
    "float32": ("float32", "auto", "same"),
    "bfloat16": ("bfloat16", "same", "same"),
    "int8": ("float32", "int8", "int8"),
    "int4": ("float32", "int4", "int4"),
}
"""Data type, and the formats of the weights of target and draft. In float32, ``auto`` is what a
user of the target gets: some CPUs keep bfloat16 weights, as OpenVINO GenAI keeps 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all engines of a run share."""

    target: Path
    draft: Path
    cpus: Sequence[int]
    batch: int
    environments: Path
    scratch: Path
    servers: Mapping[str, str] = field(default_factory=dict)
    """URLs of servers that run already, by the names of their contenders."""


class Engine(Protocol):
    """A loaded contender."""

    version: str

    async def complete(self, batch: Batch) -> Answer:
        """Return the new tokens of each prompt.

        Raises:
            SetupError: the engine ended, or did not answer in time.
        """


class OwnEngine:
    """A target of this product."""

    def __init__(self, client: TargetClient, mode: Mode, version: str) -> None:
        self.version = version
        self._client = client
        self._mode = mode

    async def complete(self, batch: Batch) -> Answer:
        """Return the new tokens of each prompt."""
        own = (self._one(batch, index) for index in range(len(batch["prompts"])))
        return answer_of(await asyncio.gather(*own))

    async def _one(self, batch: Batch, index: int) -> Continuation:
        call = GenerateCall(
            prompt=tuple(batch["prompts"][index]),
            sampling=SamplingParams(
                temperature=batch["temperature"],
                ignore_eos=True,
                seed=batch["seed"] + index,
                max_tokens=batch["max_tokens"],
            ),
            mode=self._mode,
            message_interval_ms=WHOLE_TEXT_MS,
        )
        return await continuation(self._client, call)


def answer_of(batch: Sequence[Continuation]) -> Answer:
    """Return what a target of this product has written, with the lookups of all rounds."""
    counts = [each.statistics for each in batch]
    return Answer.of_ids(
        [list(each.token_ids) for each in batch],
        hits=sum(each.hits for each in counts),
        looked_up=sum(each.hits + each.misses + each.late for each in counts),
    )


class WorkerEngine:
    """A process of another environment."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        """Construct; ``log`` has what the process writes to standard error."""
        self.version = ""
        self._process = process
        self._log = log

    async def load(self, config: Config) -> None:
        """Load the models.

        Raises:
            SetupError: the process ended, or did not answer in time.
        """
        self.version = str((await self._ask(config, LOAD_SECONDS))["version"])

    async def complete(self, batch: Batch) -> Answer:
        """Return the new tokens of each prompt."""
        answer = await self._ask(batch, BATCH_SECONDS)
        hits, looked_up = answer.get("hits", 0), answer.get("looked_up", 0)
        return Answer.of_ids(answer["tokens"], hits, looked_up)

    async def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise SetupError(f"no answer within {seconds:g} s") from None
        except ConnectionError:
            line = b""
        except ValueError as error:
            raise SetupError(f"the answer is too long: {error}") from None
        if not line:
            code = await self._process.wait()
            lines = self._log.read_text(errors="replace").split("\n")
            last = next((text for text in reversed(lines) if text.strip()), "no output")
            raise SetupError(f"the process {ending(code)}: {last.strip()[:LINE_CHARS]}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise SetupError(f"the answer is not JSON: {line[:LINE_CHARS]!r}") from None
        return answer


@asynccontextmanager
async def engine(contender: Contender, setup: Setup) -> AsyncIterator[Engine]:
    """Run a contender. Inside, it is loaded; afterwards, its processes have ended.

    Raises:
        SetupError: it cannot start.
    """
    if contender.needs_cuda:
        check_gpu(contender.peer)
    if contender.peer in setup.servers:
        server = ServerEngine(setup.servers[contender.peer], load_tokenizer(setup.target).decode)
        await server.load()
        yield server
        return
    async with AsyncExitStack() as stack:
        if contender.peer in OWN:
            yield await stack.enter_async_context(_own(contender, setup))
            return
        drafts: list[str] = []
        if contender.drafting == "ssd" and contender.peer != PAPER:
            drafts = [await stack.enter_async_context(_draft(contender, setup))]
        yield await stack.enter_async_context(_worker(contender, setup, drafts))


def own_deployment(contender: Contender, setup: Setup) -> Deployment:
    """Return the processes of this product. Beside another engine, only the draft starts."""
    has_draft = contender.drafting == "ssd"
    num_cpus = len(setup.cpus) if contender.needs_cuda else contender.threads + has_draft
    cpus = setup.cpus[:num_cpus]
    listed = ",".join(map(str, cpus))
    lookahead = ("--lookahead", str(contender.lookahead)) if contender.lookahead else ()
    dtype, of_target, of_draft = FORMATS[contender.dtype]
    return Deployment(
        target=str(setup.target),
        draft=str(setup.draft),
        num_drafts=int(has_draft),
        is_synchronous=contender.drafting == "draft",
        common_flags=(
            *("--max-model-len", str(MAX_LENGTH)),
            *("--dtype", dtype),
            *lookahead,
        ),
        target_flags=(
            *("--threads", str(contender.threads), "--weights", of_target),
            *("--max-num-seqs", str(setup.batch)),
            # Without a draft, the plan of three CPUs and more keeps one of them without a model.
            *(() if contender.needs_cuda or has_draft else ("--cpus", listed, "--io-cpus", listed)),
            *(("--device", "cuda:0") if contender.needs_cuda else ()),
        ),
        draft_flags=(
            *("--weights", of_draft),
            *("--max-sessions", str(setup.batch)),
            *(("--device", "cuda:1") if contender.needs_cuda else ()),
        ),
        allowed_cpus=tuple(cpus),
    )


@asynccontextmanager
async def _own(contender: Contender, setup: Setup) -> AsyncIterator[OwnEngine]:
    async with (
        deployed(own_deployment(contender, setup)) as running,
        TargetClient(running.target.grpc_address, ready_seconds=0) as client,
    ):
        info = await client.model_info()
        yield OwnEngine(client, MODES[contender.drafting], info.version)


@asynccontextmanager
async def _draft(contender: Contender, setup: Setup) -> AsyncIterator[str]:
    deployment = own_deployment(contender, setup)
    draft = draft_process(deployment, deployment.plan(), 0, lambda _name, _event: None)
    try:
        await draft.start()
        await draft.ready()
        yield draft.grpc_address
    finally:
        await draft.stop()


@asynccontextmanager
async def _worker(
    contender: Contender, setup: Setup, drafts: Sequence[str]
) -> AsyncIterator[WorkerEngine]:
    config: Config = {
        "target": str(setup.target),
        "threads": contender.threads,
        "dtype": contender.dtype,
        "batch": setup.batch,
        "length": MAX_LENGTH,
        "scratch": str(setup.scratch),
        "ngrams": contender.drafting == "ngram",
    }
    if contender.lookahead:
        config["lookahead"] = contender.lookahead
    if drafts:
        config["drafts"] = list(drafts)
    elif contender.drafting in ("draft", "ssd"):
        config["draft"] = str(setup.draft)
        config["has_own_device"] = contender.drafting == "ssd"
    python = await asyncio.to_thread(interpreter, contender.peer, setup.environments)
    cpus = setup.cpus if contender.needs_cuda else setup.cpus[: contender.threads]
    variables = _variables(contender, cpus, setup.scratch) | preload(python)
    log = setup.scratch / f"{contender.name}.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(python, WORKERS / "wire.py", f"{contender.peer.replace('-', '_')}_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=LINE_BYTES,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            start_new_session=True,
        )
    try:
        worker = WorkerEngine(process, log)
        await worker.load(config)
        yield worker
    finally:
        await kill_session(process)


async def kill_session(process: asyncio.subprocess.Process) -> None:
    """Kill a process that leads a session of its own, and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _variables(contender: Contender, cpus: Collection[int], scratch: Path) -> dict[str, str]:
    # The authors' package has the name of this product's, and requires two folders at its import.
    folders = dict.fromkeys(("SSD_HF_CACHE", "SSD_DATASET_DIR"), str(scratch))
    own = {"PYTHONPATH": "", **folders} if contender.peer == PAPER else {}
    # Processes of this product request huge pages too.
    return {
        **own,
        **dict([HUGE_PAGES]),
        "OMP_NUM_THREADS": str(contender.threads),
        "HF_HUB_OFFLINE": "1",
        # vLLM reports its use to the internet otherwise.
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cpus))),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
