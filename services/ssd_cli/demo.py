"""``ssd demo``: the same prompt with and without speculation, side by side."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from ssd.errors import SSDError
from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import Mode, SamplingParams, TokenId
from ssd_cli.display import err, out, startup_progress, summary, write
from ssd_cli.figures import Collector, Generation
from ssd_cli.generate import stream

DEMO_PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
'''
TITLES = {
    Mode.AUTOREGRESSIVE: "AR: the target alone",
    Mode.SPECULATIVE: "SSD: a draft on its own core, ahead of time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What is shown."""

    temperature: float
    seed: int
    max_tokens: int


class DifferentTextError(SSDError):
    """The two modes wrote different tokens: the promise is broken."""


async def demo(deployment: Deployment, options: DemoOptions) -> None:
    """Run both modes on a fresh pair of processes and compare.

    Raises:
        SetupError: the processes cannot start.
        DifferentTextError: the texts differ.
    """
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=False) as on_event:
            running = await stack.enter_async_context(deployed(deployment, on_event))
        client = await stack.enter_async_context(
            TargetClient(running.target.grpc_address, ready_seconds=0)
        )
        info = await client.model_info()
        err.print(
            f"target {info.num_parameters / 1e6:.1f}M parameters, {info.device}, "
            f"{info.dtype} ({info.dtype_reason}); "
            f"{info.active_drafts} draft(s); K={info.lookahead}, N={info.branches}; "
            f"temperature {options.temperature:g}, seed {options.seed}"
        )
        results = {mode: await _show(client, mode, options) for mode in TITLES}
    _compare(results[Mode.AUTOREGRESSIVE], results[Mode.SPECULATIVE])


async def _show(client: TargetClient, mode: Mode, options: DemoOptions) -> Generation:
    # One short run first, so that neither mode pays for what the process does only once.
    await stream(client, _call(mode, options, max_tokens=16), Collector(mode), lambda _text: None)
    out.rule(TITLES[mode], align="left")
    out.print(DEMO_PROMPT, end="", style="dim", markup=False, emoji=False)
    collector = Collector(mode)
    await stream(client, _call(mode, options, max_tokens=options.max_tokens), collector, write)
    out.print("\n")
    return collector.finish()


def _call(mode: Mode, options: DemoOptions, max_tokens: int) -> GenerateCall:
    return GenerateCall(
        prompt=DEMO_PROMPT,
        sampling=SamplingParams(temperature=options.temperature, ignore_eos=True),
        seed=options.seed,
        max_tokens=max_tokens,
        mode=mode,
    )


def _compare(alone: Generation, ahead: Generation) -> None:
    out.print(summary([("AR", alone.figures), ("SSD", ahead.figures)]))
    index = first_difference(alone.token_ids, ahead.token_ids)
    if index is not None:
        raise DifferentTextError(f"the texts differ from token {index} on; please report this")
    out.print(f"\n[green]identical[/green]: {len(alone.token_ids)} tokens, one for one")
    if alone.figures.tokens_per_second and ahead.figures.tokens_per_second:
        ratio = ahead.figures.tokens_per_second / alone.figures.tokens_per_second
        out.print(f"SSD is [bold]{ratio:.2f}x[/bold] as fast as AR here")


def first_difference(one: Sequence[TokenId], other: Sequence[TokenId]) -> int | None:
    """Return the index of the first token that differs or is missing; None for equal texts."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
