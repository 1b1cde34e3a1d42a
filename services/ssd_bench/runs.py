"""One run: a target and a draft, with plain and speculative decoding interleaved."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from ssd.engine.config import ModelConfig
from ssd.engine.sizes import num_weights
from ssd.errors import SSDError
from ssd.observability.scrape import scrape
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import WHOLE_TEXT_MS, GenerateCall, Prompt
from ssd.runtime.launch import Deployment, RunningDeployment, deployed
from ssd.types import GenerationChunk, Mode, SamplingParams, TokenId
from ssd_bench.machine import CpuTicks, other_work, peak_memory_bytes, was_quiet
from ssd_bench.metrics import BatchFigures, Continuation, batch_figures, mean_ms
from ssd_bench.prompts import DEMO

BYTES_PER_WEIGHT = {
    "bfloat16": 2,
    "float32": 4,
    "float32, bfloat16 weights": 2,
    "float32, int8 weights": 1,
    "float32, int4 weights": 0.5,
}
MODES = {"ar": Mode.AUTOREGRESSIVE, "sd": Mode.SYNCHRONOUS, "ssd": Mode.SPECULATIVE}
ON_ALL_CPUS = {"ar-all": Mode.AUTOREGRESSIVE, "sd-all": Mode.SYNCHRONOUS}
"""Modes of a second target, which uses the CPUs of the first one and of its drafts."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A mode of a running target."""

    client: TargetClient
    http_address: str
    mode: Mode
    num_cpus: int
    """CPUs that run a model in this mode, drafts included."""


class DifferentTextsError(SSDError):
    """Texts differ between the modes, so the machine or the product is faulty."""


class NoHitsError(SSDError):
    """No round was a hit, so the measured ratio would not describe speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """The models, prompts and parameters of a run."""

    deployment: Deployment
    target_folder: Path
    prompts: Mapping[str, Sequence[Prompt]]
    """Prompts by the name of their data set."""
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    repetitions: int
    needs_hits: bool = True
    """Whether a cell without a hit is an error."""
    modes: tuple[str, ...] = tuple(MODES)
    """Names of ``MODES``, and of ``ON_ALL_CPUS`` for a comparison on equal hardware."""

    @property
    def num_batches(self) -> int:
        """How many batches run: ``on_batch`` of ``run`` is called after each."""
        num_cells = len(self.prompts) * len(self.batches) * len(self.temperatures)
        # A cell has one more, which warms up.
        return num_cells * (1 + len(self.modes) * self.repetitions)


@dataclass(slots=True)
class Cell:
    """One batch size at one temperature with one data set: figures of each repetition, by mode."""

    batch: int
    temperature: float
    data: str = DEMO
    """Name of the data set."""
    figures: dict[str, list[BatchFigures]] = field(default_factory=dict)
    num_compared: int = 0
    num_different: int = 0
    """Texts that differ from plain decoding by the same target. Kernels can depend on the number of
    threads, so targets with different numbers of CPUs are not compared."""
    parts_ms: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Mean milliseconds of a round by part, of each repetition, by mode."""
    other_cpus: list[float] = field(default_factory=list)
    """CPUs that other work took before or during each repetition."""

    @property
    def is_usable(self) -> bool:
        """Whether the machine was quiet in most repetitions."""
        return was_quiet(self.other_cpus)

    def compare(self, texts_by_mode: Sequence[Sequence[tuple[TokenId, ...]]]) -> None:
        """Count the texts of one target that differ from those of its first mode."""
        for texts in texts_by_mode[1:]:
            self.num_compared += len(texts)
            self.num_different += sum(a != b for a, b in zip(texts_by_mode[0], texts, strict=True))


@dataclass(slots=True)
class Results:
    """The measurements of a run."""

    cells: list[Cell] = field(default_factory=list)
    ready_seconds: float = 0.0
    target_peak_bytes: int = 0
    draft_peak_bytes: int = 0
    weight_bytes: int = 0
    """Size of the target's weights, which one forward pass reads."""
    table_seconds: float = 0.0
    """Median time of a draft from a commit to its complete table."""
    dtype: str = ""
    """The target's data type of arithmetic and KV cache, and the format of its weights."""
    dtype_reason: str = ""


async def run(plan: BenchmarkRun, on_batch: Callable[[], None]) -> Results:
    """Measure a plan.

    Args:
        plan: what to measure.
        on_batch: called ``plan.num_batches`` times: after the warm-up of a cell, and after each
            batch.

    Raises:
        SSDError: a process cannot start, a request failed, or no round was a hit.
    """
    results = Results()
    started = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        deployment = replace(plan.deployment, is_synchronous="sd" in plan.modes)
        running = await stack.enter_async_context(deployed(deployment))
        client = await stack.enter_async_context(_client(running))
        results.ready_seconds = time.perf_counter() - started
        info = await client.model_info()
        results.dtype, results.dtype_reason = info.dtype, info.dtype_reason
        size = num_weights(ModelConfig.from_folder(plan.target_folder))
        results.weight_bytes = int(size * BYTES_PER_WEIGHT[info.dtype])
        if info.active_drafts == 0:
            raise NoHitsError("no draft is linked to the target, so there is nothing to compare")
        cpus, address = plan.deployment.plan(), running.target.http_address
        contenders = {
            name: Contender(
                client, address, mode, cpus.num_cpus(with_drafts=mode is Mode.SPECULATIVE)
            )
            for name, mode in MODES.items()
            if name in plan.modes
        }
        on_all = {name: mode for name, mode in ON_ALL_CPUS.items() if name in plan.modes}
        if on_all:
            wide = await stack.enter_async_context(deployed(on_all_cpus(plan.deployment)))
            client = await stack.enter_async_context(_client(wide))
            num_cpus, address = len(plan.deployment.allowed_cpus), wide.target.http_address
            contenders |= {
                name: Contender(client, address, mode, num_cpus) for name, mode in on_all.items()
            }
        draft = await stack.enter_async_context(DraftClient(running.drafts[0].grpc_address))
        for key in product(plan.batches, plan.temperatures, plan.prompts):
            cell = Cell(*key)
            await _measure(contenders, plan, cell, on_batch)
            results.cells.append(cell)
        results.target_peak_bytes = peak_memory_bytes(running.target.pid)
        results.draft_peak_bytes = max(peak_memory_bytes(child.pid) for child in running.drafts)
        results.table_seconds = (await draft.get_status()).table_seconds
    return results


def on_all_cpus(deployment: Deployment) -> Deployment:
    """Return a target without draft processes whose forward passes use all CPUs of a deployment."""
    cpus = ",".join(map(str, deployment.allowed_cpus))
    threads = ("--cpus", cpus, "--io-cpus", cpus, "--threads", str(len(deployment.allowed_cpus)))
    flags = (*deployment.target_flags, *threads)
    return replace(deployment, num_drafts=0, is_synchronous=True, target_flags=flags)


def _client(running: RunningDeployment) -> TargetClient:
    return TargetClient(running.target.grpc_address, ready_seconds=0)


async def _measure(
    contenders: Mapping[str, Contender],
    plan: BenchmarkRun,
    cell: Cell,
    on_batch: Callable[[], None],
) -> None:
    for contender in contenders.values():
        await _complete(contender, plan, cell, repetition=0)
    on_batch()
    cell.figures = {name: [] for name in contenders}
    cell.parts_ms = {name: [] for name in contenders}
    for repetition in range(plan.repetitions):
        texts: dict[str, list[tuple[TokenId, ...]]] = {}
        others, started = await other_work(), CpuTicks.read()
        for name, contender in contenders.items():
            before = await scrape(contender.http_address)
            batch = await _complete(contender, plan, cell, repetition)
            cell.parts_ms[name].append(mean_ms(before, await scrape(contender.http_address)))
            cell.figures[name].append(batch_figures(batch, contender.num_cpus))
            texts[name] = [sequence.token_ids for sequence in batch]
            on_batch()
        cell.other_cpus.append(max(others, started.stolen()))
        for modes in (MODES, ON_ALL_CPUS):
            cell.compare([texts[name] for name in modes if name in texts])
    speculative = cell.figures.get("ssd", [])
    if plan.needs_hits and not is_speculative(speculative):
        raise NoHitsError(
            f"{cell.data}, batch {cell.batch}, temperature {cell.temperature:g}: no round was a "
            f"hit: {why_no_hits(speculative)}"
        )


def is_speculative(repetitions: Sequence[BatchFigures]) -> bool:
    """Return whether a table had an outcome, or all texts repeat themselves: none was needed."""
    return any(each.hit_rate for each in repetitions) or all(
        each.hit_rate is None and each.backup_rate for each in repetitions
    )


def why_no_hits(repetitions: Sequence[BatchFigures]) -> str:
    """Return the likely cause if no round was a hit, from the counters."""
    lates = [figures.late_rate for figures in repetitions if figures.late_rate is not None]
    if not lates:
        return (
            "no round needed a table; the link is lost, refused or suspended by the circuit breaker"
        )
    late = sum(lates) / len(lates)
    if late > 0.5:
        return (
            f"{late:.0%} of the tables were late; the draft is too slow or shares its core: "
            "try a higher --deadline-ms or fewer --branches"
        )
    return (
        "tables arrived in time, but contained no outcome; the draft does not predict this target"
    )


async def _complete(
    contender: Contender, plan: BenchmarkRun, cell: Cell, repetition: int
) -> list[Continuation]:
    prompts, first = plan.prompts[cell.data], repetition * cell.batch
    calls = [
        GenerateCall(
            prompt=prompts[index % len(prompts)],
            sampling=SamplingParams(
                temperature=cell.temperature,
                ignore_eos=True,
                seed=index,
                max_tokens=plan.max_tokens,
            ),
            mode=contender.mode,
            message_interval_ms=WHOLE_TEXT_MS,
        )
        for index in range(first, first + cell.batch)
    ]
    return await asyncio.gather(*(continuation(contender.client, call) for call in calls))


async def continuation(client: TargetClient, call: GenerateCall) -> Continuation:
    """Return the text of a call, which wants a single one."""
    token_ids: list[TokenId] = []
    last: GenerationChunk | None = None
    async for chunk in client.generate(call):
        token_ids.extend(chunk.token_ids)
        last = chunk
    assert last is not None
    assert last.statistics is not None
    return Continuation(tuple(token_ids), last.statistics)
