"""Loads with a known question, and the checks that answer it.

A check of a time depends on the machine: it is reported and does not fail a run. All others fail
it: errors, resources that are not freed, memory that grows, refusals that metrics do not show.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ssd.demo.corpus import held_out_prompts
from ssd.types import Mode, TokenId
from ssd_bench.serve.figures import REFUSED, LoadFigures, gaps, load_figures, percentiles
from ssd_bench.serve.load import Load, RequestRecord, send
from ssd_bench.serve.memory import MemoryFigures, MemoryLog, recorded_memory
from ssd_bench.serve.served_target import ServedTarget
from ssd_bench.serve.workload import Workload, call_with_ids

NUM_PROMPTS = 256
PROMPT_CHARS = 450
"""About 128 tokens."""
LONG_TEXT_CHARS = 30_000
LONG_PROMPT_TOKENS = 2_000
REPEATED_PROMPT_TOKENS = 1_000
WARM_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure and its bound."""

    name: str
    found: float
    bound: float
    is_minimum: bool = False
    """Whether the figure must be at least the bound, not at most."""
    is_timing: bool = False
    """Whether the figure depends on the machine; then it fails no run."""
    detail: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure is within its bound."""
        return self.found >= self.bound if self.is_minimum else self.found <= self.bound


@dataclass(slots=True)
class ScenarioResult:
    """The measurements of a scenario."""

    name: str
    loads: dict[str, LoadFigures] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    """Other figures, with their unit in the name."""
    memory: dict[str, MemoryFigures] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    series: list[tuple[Load, MemoryLog]] = field(default_factory=list)
    """Raw times of the main load, for the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a user chooses for all scenarios."""

    mode: Mode = Mode.AUTO
    temperature: float = 0.0
    max_tokens: int = 128
    duration_seconds: float | None = None
    """Duration of the main load; None: that of the scenario."""

    def seconds(self, default: float) -> float:
        """Return the duration of a load whose default is given."""
        return self.duration_seconds or default

    def workload(self) -> Workload:
        """Return requests with prompts of the demo corpus that the pair was not trained on."""
        return Workload(
            prompts=held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            mode=self.mode,
        )


Run = Callable[[ServedTarget, LoadOptions], Awaitable[ScenarioResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario and the target that it needs."""

    run: Run
    max_num_seqs: int = 16
    max_queue: int = 256


async def streams(
    served: ServedTarget, options: LoadOptions, num_streams: int = 64
) -> ScenarioResult:
    """64 concurrent streams for 3 minutes: no errors, flat memory, inter-token p99 <= 3x p50."""
    result = ScenarioResult("streams")
    async with recorded_memory(served.pids, served.clock) as log:
        load = await served.generator.closed_loop(
            options.workload(),
            streams=num_streams,
            seconds=options.seconds(180.0),
            warm_up_seconds=WARM_UP_SECONDS,
        )
    found = load_figures(load)
    result.loads[f"{num_streams} streams"] = found
    result.series.append((load, log))
    result.checks += [
        _no_errors(found),
        *_flat_memory(result, log),
        await _everything_freed(served),
        Check(name="inter-token p99 / p50", found=found.p99_over_p50, bound=3.0, is_timing=True),
    ]
    return result


async def prefill(served: ServedTarget, options: LoadOptions) -> ScenarioResult:
    """Running streams while prompts of 2,000 tokens are stored: inter-token p99 <= 2x the quiet."""
    num_streams = 8
    seconds = options.seconds(60.0)
    result = ScenarioResult("prefill")
    token_ids = await _long_text(served)
    long_requests: list[RequestRecord] = []

    async def send_long_prompts() -> None:
        # A quiet first third; afterwards long prompts with quiet pauses between them.
        await asyncio.sleep(WARM_UP_SECONDS + seconds / 3)
        for shift in range(10_000):
            prompt = _cut(token_ids, shift, LONG_PROMPT_TOKENS)
            call = call_with_ids(prompt, 2, options.mode)
            long_requests.append(await send(served.clients[-1], call, served.clock))
            await asyncio.sleep(1.0)

    workload = replace(options.workload(), max_tokens=1_800)
    sending = asyncio.create_task(send_long_prompts())
    try:
        load = await served.generator.closed_loop(
            workload, streams=num_streams, seconds=seconds, warm_up_seconds=WARM_UP_SECONDS
        )
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    long_requests = [
        each for each in long_requests if each.arrived_at and each.arrived_at[0] < load.ended_at
    ]
    first_at = long_requests[0].sent_at if long_requests else load.ended_at
    quiet = percentiles(gaps(load.records, load.begun_at, first_at)[1])
    busy = percentiles(
        np.concatenate(
            [
                np.empty(0),
                *(
                    gaps(load.records, each.sent_at, each.arrived_at[0])[1]
                    for each in long_requests
                ),
            ]
        )
    )
    found = load_figures(load)
    result.loads[f"{num_streams} streams"] = found
    result.figures = {
        "long prompts": len(long_requests),
        "quiet inter-token p50 ms": quiet.p50,
        "quiet inter-token p99 ms": quiet.p99,
        "inter-token p50 ms during a prefill": busy.p50,
        "inter-token p99 ms during a prefill": busy.p99,
        "TTFT ms of a long prompt": 1000
        * statistics.median([each.arrived_at[0] - each.sent_at for each in long_requests] or [0.0]),
    }
    result.checks += [
        _no_errors(found),
        await _everything_freed(served),
        Check(name="long prompts that ended", found=len(long_requests), bound=1, is_minimum=True),
        Check(
            name="inter-token p99 during a prefill / quiet",
            found=_ratio(busy.p99, quiet.p99),
            bound=2.0,
            is_timing=True,
        ),
    ]
    return result


async def prefix(served: ServedTarget, options: LoadOptions) -> ScenarioResult:
    """A prompt of 1,000 tokens again: TTFT <= 0.3x that of the first time, the same tokens."""
    result = ScenarioResult("prefix")
    token_ids = await _long_text(served)
    client, num_repeats = served.clients[0], 3
    firsts: list[float] = []
    repeats: list[float] = []
    num_errors = num_different = 0
    # The first prompt warms up the shapes of a prefill and does not count.
    for shift in range(7):
        call = call_with_ids(_cut(token_ids, shift, REPEATED_PROMPT_TOKENS), 8, options.mode)
        records = [await send(client, call, served.clock) for _ in range(1 + num_repeats)]
        num_errors += sum(not each.is_complete for each in records)
        num_different += sum(each.token_ids != records[0].token_ids for each in records)
        if num_errors:
            break
        first, *others = [each.arrived_at[0] - each.sent_at for each in records]
        if shift:
            firsts.append(first)
            repeats += others
    first_ms = 1000 * statistics.median(firsts or [0.0])
    repeat_ms = 1000 * statistics.median(repeats or [0.0])
    result.figures = {"first TTFT ms": first_ms, "repeated TTFT ms": repeat_ms}
    result.checks += [
        Check(name="errors", found=num_errors, bound=0),
        Check(name="texts that differ from the first", found=num_different, bound=0),
        await _everything_freed(served),
        Check(
            name="TTFT of a repeated prompt / first",
            found=_ratio(repeat_ms, first_ms),
            bound=0.3,
            is_timing=True,
        ),
    ]
    return result


async def overload(served: ServedTarget, options: LoadOptions) -> ScenarioResult:
    """10 and 50 times the capacity: quick refusals with a hint, goodput >= 90 % of the peak.

    If nothing ends at the peak, there is no capacity to exceed, and the check of it fails.
    """
    result = ScenarioResult("overload")
    workload = replace(options.workload(), max_tokens=min(options.max_tokens, 64))
    generator, first = served.generator, 0
    # Twice as many streams as slots, so that a free slot has a request at once.
    peak = load_figures(
        await generator.closed_loop(
            workload, streams=32, seconds=options.seconds(60.0) / 2, warm_up_seconds=15.0
        )
    )
    result.loads["peak, 32 streams"] = peak
    completed = peak.goodput_requests_per_second * peak.seconds
    result.checks += [
        _no_errors(peak),
        Check(name="requests that ended at the peak", found=completed, bound=1, is_minimum=True),
    ]
    if not completed:
        return result
    # The first load brings batch sizes that are new to the processes, whose buffers then stay.
    memory = MemoryLog()
    for times in (10, 50):
        first += 1_000_000
        before = await served.metrics()
        async with recorded_memory(served.pids, served.clock) as log:
            load = await generator.open_loop(
                workload,
                rate=times * peak.goodput_requests_per_second,
                seconds=options.seconds(60.0),
                # Until the queue is full, nothing is refused.
                warm_up_seconds=WARM_UP_SECONDS,
                first=first,
            )
        found = load_figures(load)
        label = f"{times}x the capacity"
        result.loads[label] = found
        result.series.append((load, log))
        memory.extend(log)
        refused = found.outcomes.get(REFUSED, 0)
        others = found.num_errors - refused
        result.checks += [
            Check(name=f"{label}: other errors", found=others, bound=0, detail=_errors(found)),
            Check(name=f"{label}: refusals", found=refused, bound=1, is_minimum=True),
            Check(
                name=f"{label}: refusals without a retry hint",
                found=found.refusals_without_hint,
                bound=0,
            ),
            await _everything_freed(served, label),
            Check(
                name=f"{label}: goodput / peak",
                found=_ratio(found.goodput_tokens_per_second, peak.goodput_tokens_per_second),
                bound=0.9,
                is_minimum=True,
                is_timing=True,
            ),
            Check(
                name=f"{label}: refusal p99 ms",
                found=found.refusal_ms.p99,
                bound=1_000.0,
                is_timing=True,
            ),
        ]
        if before:
            name = 'ssd_requests_total{outcome="overloaded"}'
            counted = (await served.metrics())[name] - before[name]
            result.checks.append(
                Check(
                    name=f"{label}: refusals that the metric does not count",
                    found=abs(refused - counted),
                    bound=0,
                )
            )
    result.checks += _flat_memory(result, memory)
    return result


async def modes(served: ServedTarget, options: LoadOptions) -> ScenarioResult:
    """Tokens/s of the mode over plain decoding at 1, 8 and 16 streams, in alternating windows."""
    result = ScenarioResult("modes")
    seconds, repetitions = options.seconds(15.0), 3
    first = 0
    plain = replace(options, mode=Mode.AUTOREGRESSIVE)
    for num_streams in (1, 8, 16):
        found: dict[str, list[LoadFigures]] = {options.mode.value: [], plain.mode.value: []}
        for repetition in range(repetitions):
            pair = (options, plain) if repetition % 2 == 0 else (plain, options)
            for each in pair:
                first += 1_000_000
                load = await served.generator.closed_loop(
                    each.workload(),
                    streams=num_streams,
                    seconds=seconds,
                    warm_up_seconds=WARM_UP_SECONDS,
                    first=first,
                )
                found[each.mode.value].append(load_figures(load))
        speeds = {}
        for mode, figures in found.items():
            ordered = sorted(figures, key=lambda each: each.tokens_per_second)
            middle = ordered[len(ordered) // 2]
            label = f"{num_streams} streams, {mode}"
            result.loads[label] = middle
            speeds[mode] = middle.tokens_per_second
            result.checks += [_no_errors(each, label) for each in figures if each.num_errors]
        result.checks.append(
            Check(
                name=f"{num_streams} streams: tokens/s of {options.mode.value} / plain decoding",
                found=_ratio(speeds[options.mode.value], speeds[plain.mode.value]),
                bound=1.0,
                is_minimum=True,
                is_timing=True,
            )
        )
    result.checks.append(await _everything_freed(served))
    return result


SCENARIOS: dict[str, Scenario] = {
    "streams": Scenario(run=streams, max_num_seqs=64),
    "prefill": Scenario(run=prefill),
    "prefix": Scenario(run=prefix),
    "overload": Scenario(run=overload, max_queue=64),
    "modes": Scenario(run=modes),
}
"""By the name on the command line."""


def _ratio(value: float, reference: float) -> float:
    """Return their ratio; 0 if the reference is 0, because nothing was measured."""
    return value / reference if reference else 0.0


def _no_errors(found: LoadFigures, label: str = "") -> Check:
    name = f"{label}: errors" if label else "errors"
    return Check(name=name, found=found.num_errors, bound=0, detail=_errors(found))


def _errors(found: LoadFigures) -> str:
    return "; ".join(f"{code}: {message}" for code, message in found.messages.items())


def _flat_memory(result: ScenarioResult, log: MemoryLog) -> Sequence[Check]:
    """Note the memory of the processes; return a check of each of the product."""
    checks = []
    for process, found in log.figures().items():
        result.memory[process] = found
        if process != "load generator":
            checks.append(
                Check(
                    name=f"growth of the memory of {process}, MiB",
                    found=found.growth_bytes / (1 << 20),
                    bound=found.allowed_growth_bytes / (1 << 20),
                )
            )
    return checks


async def _everything_freed(served: ServedTarget, label: str = "") -> Check:
    left = await served.leftovers()
    name = f"{label}: resources that are not freed" if label else "resources that are not freed"
    detail = ", ".join(f"{each} is {count:g}" for each, count in left.items())
    return Check(name=name, found=len(left), bound=0, detail=detail)


async def _long_text(served: ServedTarget) -> tuple[TokenId, ...]:
    """Return the token ids of a long text."""
    text = "".join(held_out_prompts(NUM_PROMPTS, num_chars=PROMPT_CHARS))[:LONG_TEXT_CHARS]
    return await served.clients[0].tokenize(text)


def _cut(token_ids: tuple[TokenId, ...], shift: int, count: int) -> tuple[TokenId, ...]:
    """Return ``count`` ids of a long text; no two shifts begin alike."""
    begin = (shift * 977) % (len(token_ids) - count)
    return (1 + shift % 1000, *token_ids[begin : begin + count - 1])
