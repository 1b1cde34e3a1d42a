"""``ssd bench never-slower``: mode AUTO against plain decoding, in many situations.

Each cell is a pair of models, a number of CPUs, a batch size and a temperature. Batches in both
modes alternate in one run (AUTO, AR, AR, AUTO, and so on), and the cell contains the ratio of their
tokens per second: the median over neighbouring batches, which other work on the machine disturbs
least. The start, in which the controller measures both ways, is not counted.
A cell that ``never_slower.json`` contains is not measured again, so a run can be continued.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ssd import demo
from ssd.cpu_plan import one_cpu_a_core, plan_cpus
from ssd.demo.corpus import held_out_prompts
from ssd.launch import Deployment, deployed
from ssd.ports import Clock
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.telemetry import SystemClock
from ssd.types import GenerationChunk, Mode, SamplingParams, SpeculationStatistics

NUM_PROMPTS = 32
PROMPT_CHARS = 250
SLOW_STEP_MS = 25.0
"""Time that the slowed draft adds to each step: a step of the embedded draft on one AVX2 core takes
3.5 ms in eager torch, so this is 8 times as long."""
BUSY_PROCESSES = 3
"""Processes that compute without end on each CPU of the overloaded draft."""
SEGMENT_SECONDS = 0.3
"""Aim for the duration of one batch in one mode."""
MIN_TOKENS, MAX_TOKENS = 24, 128
MIN_PAIRS = 5
MIN_START_BATCHES = 2
console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Models, and what is wrong with the draft."""

    target: str = "demo://target"
    draft: str = "demo://draft"
    """Empty: the embedded draft's shape with random weights."""
    draft_flags: tuple[str, ...] = ()
    is_overloaded: bool = False


SITUATIONS = {
    "embedded": Situation(),
    "widened": Situation(target="demo://target?widen=4"),
    "random": Situation(draft=""),
    "slow": Situation(draft_flags=("--inject-step-ms", str(SLOW_STEP_MS))),
    "overloaded": Situation(is_overloaded=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured cell."""

    situation: str
    cpus: int
    batch: int
    temperature: float
    ratio: float
    """Tokens/s of mode AUTO over those of AUTOREGRESSIVE, median over pairs of batches."""
    q1: float
    q3: float
    total_ratio: float
    """The same of the sums over all batches. It contains every trial in full."""
    pairs: int
    ar_tokens_per_second: float
    auto_tokens_per_second: float
    paused_share: float
    """Rounds in mode AUTO for which speculation was off."""
    hit_rate: float
    reason: str
    speed_up: float
    """As the controller measured it."""
    num_different: int
    """Texts that differ between the modes; 0 in deterministic mode, ties in the fast mode."""

    @property
    def key(self) -> tuple[str, int, int, float]:
        """What the cell measures."""
        return self.situation, self.cpus, self.batch, self.temperature


@dataclass(slots=True)
class _Batch:
    """One batch in one mode."""

    texts: list[tuple[int, ...]]
    statistics: list[SpeculationStatistics]

    @property
    def speed(self) -> float:
        """Tokens/s of each sequence, summed."""
        pairs = zip(self.texts, self.statistics, strict=True)
        return sum((len(text) - 1) / found.decode_seconds for text, found in pairs)


@dataclass(slots=True)
class _Measurement:
    """The batches of one cell."""

    ar: list[_Batch] = field(default_factory=list)
    auto: list[_Batch] = field(default_factory=list)

    def cell(self, **about: Any) -> Cell:
        ar, auto = _speed(self.ar), _speed(self.auto)
        pairs = [b.speed / a.speed for a, b in zip(self.ar, self.auto, strict=True)]
        q1, median, q3 = statistics.quantiles(pairs, n=4, method="inclusive")
        found = [each for batch in self.auto for each in batch.statistics]
        looked_up = sum(each.hits + each.misses + each.late for each in found)
        texts = zip(self.ar, self.auto, strict=True)
        return Cell(
            ratio=median,
            total_ratio=auto / ar,
            q1=q1,
            q3=q3,
            pairs=len(pairs),
            ar_tokens_per_second=ar,
            auto_tokens_per_second=auto,
            paused_share=sum(each.paused_rounds for each in found)
            / sum(each.rounds for each in found),
            hit_rate=sum(each.hits for each in found) / max(1, looked_up),
            num_different=sum(
                x != y for a, b in texts for x, y in zip(a.texts, b.texts, strict=True)
            ),
            **about,
        )


def _speed(batches: Sequence[_Batch]) -> float:
    """Return the speed over all batches, each with the same number of tokens."""
    return statistics.harmonic_mean([each.speed for each in batches])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    start_seconds: float
    cell_seconds: float
    clock: Clock = field(default_factory=SystemClock)


def random_draft(folder: Path) -> Path:
    """Write the embedded draft's shape with random weights to a folder."""
    # Only this needs torch.
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    source = demo.folder("draft")
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(11)
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * 0.05
            weights[name] = noise.to(tensor.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


@asynccontextmanager
async def busy(cpus: Sequence[int], num_each: int) -> AsyncIterator[None]:
    """Run processes that compute without end on these CPUs."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile 1: pass")
        )
        for cpu in cpus
        for _ in range(num_each)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


async def measure(
    name: str,
    cpus: Sequence[int],
    wanted: Sequence[tuple[int, float]],
    times: _Times,
) -> AsyncIterator[Cell]:
    """Measure the cells of one situation on some CPUs, by (batch, temperature)."""
    situation = SITUATIONS[name]
    prompts = held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS)
    with tempfile.TemporaryDirectory() as scratch:
        deployment = Deployment(
            target=situation.target,
            draft=situation.draft or str(random_draft(Path(scratch) / "random")),
            common_flags=("--max-model-len", "512"),
            draft_flags=situation.draft_flags,
            allowed_cpus=tuple(cpus),
        )
        plan = plan_cpus(cpus, 1)
        draft_cpus = [int(cpu) for cpu in plan.drafts[0].split(",")]
        num_busy = BUSY_PROCESSES if situation.is_overloaded else 0
        async with (
            deployed(deployment) as running,
            TargetClient(running.target.grpc_address, ready_seconds=0) as client,
            busy(draft_cpus, num_busy),
        ):
            for batch, temperature in wanted:
                measurement = await _measure(client, prompts, batch, temperature, times)
                status = await client.pool_status()
                yield measurement.cell(
                    situation=name,
                    cpus=len(cpus),
                    batch=batch,
                    temperature=temperature,
                    reason=status.speculation_reason,
                    speed_up=status.speculation_speed_up,
                )


async def _measure(
    client: TargetClient, prompts: Sequence[str], batch: int, temperature: float, times: _Times
) -> _Measurement:
    async def run(mode: Mode, first: int, max_tokens: int) -> _Batch:
        calls = [
            GenerateCall(
                prompt=prompts[(first + index) % len(prompts)],
                sampling=SamplingParams(temperature=temperature, ignore_eos=True),
                seed=first + index,
                max_tokens=max_tokens,
                mode=mode,
            )
            for index in range(batch)
        ]
        found = await asyncio.gather(*(_one(client, call) for call in calls))
        return _Batch([text for text, _ in found], [last for _, last in found])

    clock = times.clock
    plain = await run(Mode.AUTOREGRESSIVE, 0, MIN_TOKENS)
    # A batch of the faster mode needs a few rounds too.
    wanted = int(plain.speed / batch * SEGMENT_SECONDS)
    max_tokens = min(max(wanted, MIN_TOKENS), MAX_TOKENS)
    until = clock.now() + times.start_seconds
    first = 0
    while clock.now() < until or first < MIN_START_BATCHES * batch:
        await run(Mode.AUTO, first, max_tokens)
        first += batch
    measurement = _Measurement()
    until = clock.now() + times.cell_seconds
    repetition = 0
    while clock.now() < until or repetition < MIN_PAIRS:
        order = (Mode.AUTO, Mode.AUTOREGRESSIVE)
        for mode in order if repetition % 2 == 0 else order[::-1]:
            found = await run(mode, repetition * batch, max_tokens)
            (measurement.auto if mode is Mode.AUTO else measurement.ar).append(found)
        repetition += 1
    return measurement


async def _one(
    client: TargetClient, call: GenerateCall
) -> tuple[tuple[int, ...], SpeculationStatistics]:
    token_ids: list[int] = []
    last: GenerationChunk | None = None
    async for chunk in client.generate(call):
        token_ids.extend(chunk.token_ids)
        last = chunk
    assert last is not None
    assert last.statistics is not None
    return tuple(token_ids), last.statistics


def markdown(cells: Sequence[Cell]) -> str:
    """Return a table of ratios: one row for each situation and number of CPUs."""
    columns = sorted({(cell.batch, cell.temperature) for cell in cells})
    header = ["situation", "CPUs", *(f"batch {b}, T = {t:g}" for b, t in columns)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    by_key = {cell.key: cell for cell in cells}
    for name, cpus in dict.fromkeys((cell.situation, cell.cpus) for cell in cells):
        row = [name, str(cpus)]
        for batch, temperature in columns:
            cell = by_key.get((name, cpus, batch, temperature))
            row.append(_shown(cell) if cell else "")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _shown(cell: Cell) -> str:
    share = "" if cell.paused_share < 0.5 else ", off"
    return f"{cell.ratio:.2f} ({cell.q1:.2f}–{cell.q3:.2f}{share})"


def never_slower(
    *,
    situations: Annotated[str, typer.Option(help="Names, by commas.")] = ",".join(SITUATIONS),
    cpus: Annotated[str, typer.Option(help="Numbers of CPUs.")] = "1,2,4",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,16",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    start_seconds: Annotated[float, typer.Option(help="AUTO before each cell, not counted.")] = 3.0,
    cell_seconds: Annotated[float, typer.Option(help="Both modes of a cell.")] = 8.0,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
) -> None:
    """Measure tokens/s of mode AUTO over AUTOREGRESSIVE; write never_slower.json and .md."""
    unknown = set(situations.split(",")) - set(SITUATIONS)
    if unknown:
        raise typer.BadParameter(f"--situations: choose from {', '.join(SITUATIONS)}")
    output.mkdir(parents=True, exist_ok=True)
    file = output / "never_slower.json"
    cells = [Cell(**each) for each in json.loads(file.read_text())] if file.exists() else []
    allowed = one_cpu_a_core(os.sched_getaffinity(0))
    sizes = [
        (int(number), float(each)) for number in batch.split(",") for each in temperature.split(",")
    ]
    times = _Times(start_seconds=start_seconds, cell_seconds=cell_seconds)

    async def run(name: str, count: int) -> None:
        known = {cell.key for cell in cells}
        wanted = [size for size in sizes if (name, count, *size) not in known]
        if not wanted:
            return
        async for cell in measure(name, allowed[:count], wanted, times):
            cells.append(cell)
            file.write_text(json.dumps([asdict(each) for each in cells], indent=1))
            (output / "never_slower.md").write_text(markdown(cells))
            console.print(f"{cell.situation} {cell.cpus} CPUs batch {cell.batch}, ", end="")
            console.print(f"T = {cell.temperature:g}: {_shown(cell)} {cell.reason}")

    for name in situations.split(","):
        for count in map(int, cpus.split(",")):
            if count > len(allowed):
                console.print(f"{count} CPUs: this process may use {len(allowed)}")
                continue
            asyncio.run(run(name, count))
