"""``auto``: mode AUTO against AUTOREGRESSIVE and SPECULATIVE, from the first request on.

Each cell is a pair of models, a number of CPUs, a batch size and a temperature. A repetition starts
three deployments, one for each mode, and sends them the same requests in turns: the first, second
and third turn of each in another order, so other work on the machine slows all modes alike. A turn
has one request at batch 1. At other sizes it keeps so many requests in flight, as the clients of a
server do: a batch that ended with its slowest text would measure that text. The cell contains
ratios of the tokens per second of whole turns, over all and over the first ones, at whose start
the controller knows nothing.
A cell that ``auto.json`` contains is not measured again, so a run can be continued.
"""

import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from ssd import demo
from ssd.demo.corpus import held_out_prompts
from ssd.ports import Clock, SystemClock
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.runtime.cpu_plan import one_cpu_a_core, plan_cpus
from ssd.runtime.launch import Deployment, deployed
from ssd.types import Mode, SamplingParams
from ssd_bench.command import Output, err
from ssd_bench.report import markdown_table
from ssd_bench.runs import continuation

NUM_PROMPTS = 32
PROMPT_CHARS = 250
SLOW_STEP_MS = 7.0
"""Time that the slowed draft adds to each step. A step of the embedded draft takes about 1 ms on
one core with AVX-512, so this is 8 times as long."""
BUSY_PROCESSES = 3
"""Processes that compute without end on each CPU of the overloaded draft."""
TEXTS_A_PLACE = 3
"""Requests of a turn for each one in flight, above batch 1: 24 at batch 8."""
FIRST_REQUESTS = 5
"""The first turns are those with this number of requests: five at batch 1, one at larger sizes."""
MODES = (Mode.AUTOREGRESSIVE, Mode.SPECULATIVE, Mode.AUTO)


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
class Size:
    """What a cell measures beside its situation."""

    cpus: int
    batch: int
    temperature: float

    @property
    def turn_requests(self) -> int:
        """Requests of a turn."""
        return self.batch if self.batch == 1 else self.batch * TEXTS_A_PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much each cell measures."""

    turns: int
    max_tokens: int
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured cell: medians over its repetitions."""

    situation: str
    size: Size
    tokens_per_second: dict[str, float]
    """Medians by mode."""
    over_ar: float
    """Tokens/s of mode AUTO over those of AUTOREGRESSIVE."""
    over_better: float
    """Tokens/s of mode AUTO over those of the faster one of the other modes."""
    first_over_better: float
    """``over_better`` in the first turns."""
    lowest_over_ar: float
    """``over_ar`` of the slowest repetition."""
    num_different: int
    """Texts that differ between the modes; 0 in deterministic mode, ties in the fast mode."""


@dataclass(slots=True)
class Repetition:
    """Seconds of each turn, and the texts, by mode."""

    seconds: dict[Mode, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    texts: dict[Mode, list[tuple[int, ...]]] = field(
        default_factory=lambda: {mode: [] for mode in MODES}
    )

    def ratio(self, *others: Mode, num_turns: int | None = None) -> float:
        """Return the speed of mode AUTO over the fastest of others, in the first turns."""
        sums = {mode: sum(seconds[:num_turns]) for mode, seconds in self.seconds.items()}
        return min(sums[mode] for mode in others) / sums[Mode.AUTO]

    @property
    def num_different(self) -> int:
        """Texts that differ from those of plain decoding."""
        plain, *others = (self.texts[mode] for mode in MODES)
        return sum(a != b for texts in others for a, b in zip(plain, texts, strict=True))


def cell(situation: str, size: Size, repetitions: Sequence[Repetition]) -> Cell:
    """Return the figures of a cell."""
    over_ar = [repetition.ratio(Mode.AUTOREGRESSIVE) for repetition in repetitions]
    others = (Mode.AUTOREGRESSIVE, Mode.SPECULATIVE)
    num_first = math.ceil(FIRST_REQUESTS / size.turn_requests)
    first = [repetition.ratio(*others, num_turns=num_first) for repetition in repetitions]
    num_tokens = sum(map(len, repetitions[0].texts[Mode.AUTO]))
    return Cell(
        situation=situation,
        size=size,
        tokens_per_second={
            mode.value: num_tokens
            / statistics.median(sum(repetition.seconds[mode]) for repetition in repetitions)
            for mode in MODES
        },
        over_ar=statistics.median(over_ar),
        over_better=statistics.median(repetition.ratio(*others) for repetition in repetitions),
        first_over_better=statistics.median(first),
        lowest_over_ar=min(over_ar),
        num_different=sum(repetition.num_different for repetition in repetitions),
    )


def random_draft(folder: Path) -> Path:
    """Write the embedded draft's shape with random weights to a folder."""
    # Only this function needs torch.
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


async def measure(name: str, cpus: Sequence[int], size: Size, amount: Amount) -> Cell:
    """Measure one cell on some CPUs."""
    situation = SITUATIONS[name]
    num_busy = BUSY_PROCESSES if situation.is_overloaded else 0
    draft_cpus = [int(cpu) for cpu in plan_cpus(cpus, 1).drafts[0].split(",")]
    repetitions: list[Repetition] = []
    with tempfile.TemporaryDirectory() as scratch:
        deployment = Deployment(
            target=situation.target,
            draft=situation.draft or str(random_draft(Path(scratch) / "random")),
            common_flags=("--max-model-len", "512"),
            draft_flags=situation.draft_flags,
            allowed_cpus=tuple(cpus),
        )
        for _ in range(amount.repetitions):
            async with AsyncExitStack() as stack:
                clients = {}
                for mode in MODES:
                    running = await stack.enter_async_context(deployed(deployment))
                    client = TargetClient(running.target.grpc_address, ready_seconds=0)
                    clients[mode] = await stack.enter_async_context(client)
                await stack.enter_async_context(busy(draft_cpus, num_busy))
                repetitions.append(await _repeat(clients, size, amount, SystemClock()))
    return cell(name, size, repetitions)


async def _repeat(
    clients: dict[Mode, TargetClient], size: Size, amount: Amount, clock: Clock
) -> Repetition:
    prompts = held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS)
    repetition = Repetition()
    num_requests = size.turn_requests
    for index in range(amount.turns):
        first = index % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            calls = [
                GenerateCall(
                    prompt=prompts[number % NUM_PROMPTS],
                    sampling=SamplingParams(
                        temperature=size.temperature,
                        ignore_eos=True,
                        seed=number,
                        max_tokens=amount.max_tokens,
                    ),
                    mode=mode,
                )
                for number in range(index * num_requests, (index + 1) * num_requests)
            ]
            began_at = clock.now()
            texts = await _texts(clients[mode], calls, size.batch)
            repetition.seconds[mode].append(clock.now() - began_at)
            repetition.texts[mode] += texts
    return repetition


async def _texts(
    client: TargetClient, calls: Sequence[GenerateCall], num_in_flight: int
) -> list[tuple[int, ...]]:
    places = asyncio.Semaphore(num_in_flight)

    async def text(call: GenerateCall) -> tuple[int, ...]:
        async with places:
            return (await continuation(client, call)).token_ids

    return await asyncio.gather(*map(text, calls))


def markdown(cells: Sequence[Cell]) -> str:
    """Return a table with a row for each cell."""
    titles = ["situation", "CPUs", "batch", "T", "AR", "SPECULATIVE", "AUTO", "AUTO / AR"]
    titles += ["AUTO / better", "first turns"]
    rows = []
    for measured in cells:
        size, speeds = measured.size, (measured.tokens_per_second[mode.value] for mode in MODES)
        row = [measured.situation, f"{size.cpus}", f"{size.batch}", f"{size.temperature:g}"]
        row += [f"{speed:.3g}" for speed in speeds]
        ratios = (measured.over_ar, measured.over_better, measured.first_over_better)
        row += [f"{ratio:.2f}" for ratio in ratios]
        rows.append(row)
    return "\n".join(markdown_table(titles, rows)) + "\n"


def auto(
    *,
    situations: Annotated[str, typer.Option(help="Names, by commas.")] = ",".join(SITUATIONS),
    cpus: Annotated[str, typer.Option(help="Numbers of CPUs.")] = "2",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
    turns: Annotated[int, typer.Option(help="Turns of each mode.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 160,
    repetitions: Annotated[int, typer.Option(help="Fresh deployments of each mode.")] = 5,
    output: Output = Path("results"),
) -> None:
    """Measure tokens/s of mode AUTO in fresh deployments; write auto.json and auto.md."""
    unknown = set(situations.split(",")) - set(SITUATIONS)
    if unknown:
        raise typer.BadParameter(f"--situations: choose from {', '.join(SITUATIONS)}")
    output.mkdir(parents=True, exist_ok=True)
    file = output / "auto.json"
    amount = Amount(turns=turns, max_tokens=max_tokens, repetitions=repetitions)
    run = json.loads(file.read_text()) if file.exists() else {"amount": asdict(amount), "cells": []}
    if not isinstance(run, dict) or run["amount"] != asdict(amount):
        raise typer.BadParameter(
            f"--output {output}: its cells have other --turns, --max-tokens or --repetitions; "
            "choose another folder"
        )
    cells = [Cell(**{**record, "size": Size(**record["size"])}) for record in run["cells"]]
    finished = {(measured.situation, measured.size) for measured in cells}
    allowed = one_cpu_a_core(os.sched_getaffinity(0))
    for name in situations.split(","):
        for size in _sizes(cpus, batch, temperature):
            if (name, size) in finished:
                continue
            if size.cpus > len(allowed):
                err.print(f"{size.cpus} CPUs: this process may use {len(allowed)}")
                continue
            cells.append(asyncio.run(measure(name, allowed[: size.cpus], size, amount)))
            run["cells"] = list(map(asdict, cells))
            part = file.with_suffix(".part")
            part.write_text(json.dumps(run, indent=1))
            part.replace(file)
            (output / "auto.md").write_text(markdown(cells), encoding="utf-8")
            err.print(markdown(cells[-1:]).splitlines()[-1])


def _sizes(cpus: str, batch: str, temperature: str) -> list[Size]:
    return [
        Size(cpus=int(count), batch=int(number), temperature=float(level))
        for count in cpus.split(",")
        for number in batch.split(",")
        for level in temperature.split(",")
    ]
