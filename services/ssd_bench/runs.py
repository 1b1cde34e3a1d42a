"""One run: a target and a draft, with plain and speculative decoding interleaved."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ssd.cpu_plan import plan_cpus
from ssd.errors import SSDError
from ssd.launch import Deployment, RunningDeployment, deployed
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk, Mode, SamplingParams, TokenId
from ssd_bench.machine import count_weights, peak_memory_bytes
from ssd_bench.metrics import BatchFigures, Continuation, batch_figures

BYTES_PER_WEIGHT = {"bfloat16": 2, "float32": 4}
MODES = {"ar": Mode.AUTOREGRESSIVE, "ssd": Mode.SPECULATIVE}


class NoHitsError(SSDError):
    """No round was a hit, so the measured ratio would not describe speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The models, prompts and parameters of a run."""

    deployment: Deployment
    target_folder: Path
    prompts: Sequence[str]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    repetitions: int
    needs_hits: bool = True
    """Whether a cell without a hit is an error."""


@dataclass(slots=True)
class Cell:
    """One batch size at one temperature: the figures of each repetition, by mode."""

    batch: int
    temperature: float
    figures: dict[str, list[BatchFigures]] = field(
        default_factory=lambda: {name: [] for name in MODES}
    )
    num_compared: int = 0
    num_different: int = 0
    """Texts that differ between the modes: 0 in deterministic mode; ties in the fast mode."""


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
    """Data type of the target's weights and KV cache."""
    dtype_reason: str = ""


async def run(plan: Plan, on_batch: Callable[[], None]) -> Results:
    """Measure a plan.

    Args:
        plan: what to measure.
        on_batch: called after each batch: once for the warm-up of a cell, then ``2 * repetitions``
            times.

    Raises:
        SSDError: a process cannot start, a request failed, or no round was a hit.
    """
    results = Results()
    started = time.perf_counter()
    async with (
        deployed(plan.deployment) as running,
        TargetClient(running.target.grpc_address, ready_seconds=0) as client,
    ):
        results.ready_seconds = time.perf_counter() - started
        info = await client.model_info()
        results.dtype, results.dtype_reason = info.dtype, info.dtype_reason
        num_weights = count_weights(plan.target_folder)
        results.weight_bytes = num_weights * BYTES_PER_WEIGHT[info.dtype]
        if info.active_drafts == 0:
            raise NoHitsError("no draft is linked to the target, so there is nothing to compare")
        for batch in plan.batches:
            for temperature in plan.temperatures:
                cell = Cell(batch, temperature)
                await _measure(client, plan, cell, on_batch)
                results.cells.append(cell)
        _record_memory(results, running)
        async with DraftClient(running.drafts[0].grpc_address) as draft:
            results.table_seconds = (await draft.get_status()).table_seconds
    return results


async def _measure(
    client: TargetClient, plan: Plan, cell: Cell, on_batch: Callable[[], None]
) -> None:
    for mode in MODES.values():
        await _complete(client, plan, cell, mode, repetition=0)
    on_batch()
    cpus = plan_cpus(plan.deployment.allowed_cpus, plan.deployment.num_drafts)
    num_cpus = {
        mode: cpus.num_cpus(with_drafts=mode is Mode.SPECULATIVE) for mode in MODES.values()
    }
    for repetition in range(plan.repetitions):
        texts: list[list[tuple[TokenId, ...]]] = []
        for name, mode in MODES.items():
            batch = await _complete(client, plan, cell, mode, repetition)
            cell.figures[name].append(batch_figures(batch, num_cpus[mode]))
            texts.append([sequence.token_ids for sequence in batch])
            on_batch()
        plain, ahead = texts
        cell.num_compared += len(plain)
        cell.num_different += sum(a != b for a, b in zip(plain, ahead, strict=True))
    if plan.needs_hits and not any(figures.hit_rate for figures in cell.figures["ssd"]):
        why = why_no_hits(cell.figures["ssd"])
        raise NoHitsError(
            f"batch {cell.batch}, temperature {cell.temperature:g}: no round was a hit: {why}"
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
    client: TargetClient, plan: Plan, cell: Cell, mode: Mode, repetition: int
) -> list[Continuation]:
    first = repetition * cell.batch
    calls = []
    for index in range(cell.batch):
        prompt = plan.prompts[(first + index) % len(plan.prompts)]
        call = GenerateCall(
            prompt=prompt,
            sampling=SamplingParams(temperature=cell.temperature, ignore_eos=True),
            seed=first + index,
            max_tokens=plan.max_tokens,
            mode=mode,
        )
        calls.append(_one(client, call))
    return list(await asyncio.gather(*calls))


async def _one(client: TargetClient, call: GenerateCall) -> Continuation:
    token_ids: list[TokenId] = []
    last: GenerationChunk | None = None
    async for chunk in client.generate(call):
        token_ids.extend(chunk.token_ids)
        last = chunk
    assert last is not None
    assert last.statistics is not None
    return Continuation(tuple(token_ids), last.statistics)


def _record_memory(results: Results, running: RunningDeployment) -> None:
    results.target_peak_bytes = peak_memory_bytes(running.target.pid)
    results.draft_peak_bytes = max(peak_memory_bytes(draft.pid) for draft in running.drafts)
