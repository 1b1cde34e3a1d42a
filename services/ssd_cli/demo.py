"""``ssd demo``: one prompt with and without speculation, compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from rich.text import Text

from ssd.errors import SSDError
from ssd.ports import SystemClock
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.pool_codec import LinkStatus
from ssd.runtime.launch import Deployment
from ssd.types import Mode, SamplingParams, TokenId
from ssd_cli.display import err, out, print_table, status, summary, write
from ssd_cli.figures import Collector, Generation, why_not_speculative
from ssd_cli.generate import GenerateOptions, connected, stream

DEMO_PROMPT = '''def merge_sort(items):
    """Return a sorted copy of a list."""
    if len(items) <= 1:
'''
"""The text after it repeats itself less than after most prompts, so tables are used."""
TITLES = {
    Mode.AUTOREGRESSIVE: "AR: the target alone",
    Mode.AUTO: "SSD: a draft prepares proposals on its own core",
}
"""Mode AUTO is the default. It also chooses the length of proposals."""
WARM_UP_SECONDS = 10.0
"""Maximum time until the first hit; a draft on a busy machine can need seconds."""
WARM_UP_TOKENS = 16
"""Length of the first short text; each next one is twice as long, up to the limit below."""
LONGEST_WARM_UP_TOKENS = 128
NUM_RATIOS = 4
"""Comparisons after the one that is shown, which alone can fall into other work."""


class DifferentTextError(SSDError):
    """The two modes generated different tokens, which is a bug."""


class NotSpeculativeError(SSDError):
    """No proposal was accepted, although the target had not turned speculation off."""


async def demo(deployment: Deployment, sampling: SamplingParams) -> None:
    """Start a pair of processes, run plain decoding and mode AUTO, and compare.

    Raises:
        SetupError: the processes cannot start.
        DifferentTextError: the texts differ.
        NotSpeculativeError: no proposal was accepted, although the target used its draft.
    """
    async with connected(GenerateOptions(deployment=deployment)) as client:
        info = await client.model_info()
        err.print(
            f"target {info.num_parameters / 1e6:.1f}M parameters, {info.device}, "
            f"{info.dtype} ({info.dtype_reason}); "
            f"{info.active_drafts} draft(s); K={info.lookahead}, N={info.branches}; "
            f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        )
        results = {mode: await _show(client, mode, sampling) for mode in TITLES}
        links = (await client.pool_status()).links
        with status(f"comparing {NUM_RATIOS} more times"):
            ratios = [await _ratio(client, sampling) for _ in range(NUM_RATIOS)]
    _compare(results[Mode.AUTOREGRESSIVE], results[Mode.AUTO], links, ratios)


async def _show(client: TargetClient, mode: Mode, sampling: SamplingParams) -> Generation:
    await _warm_up(client, mode, sampling)
    out.rule(TITLES[mode], align="left")
    out.print(DEMO_PROMPT, end="", style="dim")
    generation = await _generate(client, mode, sampling, write)
    out.print("\n")
    return generation


async def _generate(
    client: TargetClient,
    mode: Mode,
    sampling: SamplingParams,
    on_text: Callable[[str], None] = lambda _text: None,
) -> Generation:
    collector = Collector()
    call = GenerateCall(prompt=DEMO_PROMPT, sampling=sampling, mode=mode)
    await stream(client, call, collector, on_text)
    return collector.finish()


async def _ratio(client: TargetClient, sampling: SamplingParams) -> float | None:
    """Return the speed of a speculative text over that of the same text without; None: unknown."""
    alone, ahead = [
        (await _generate(client, mode, sampling)).figures.tokens_per_second for mode in TITLES
    ]
    return ahead / alone if alone and ahead else None


async def _warm_up(client: TargetClient, mode: Mode, sampling: SamplingParams) -> None:
    """Generate short texts: one in plain mode, else until a round is a hit or the time has passed.

    So the measured texts contain no one-time work, and a slow start of the draft is not reported as
    a failure.
    """
    clock = SystemClock()
    until, max_tokens = clock.now() + WARM_UP_SECONDS, WARM_UP_TOKENS
    while True:
        generation = await _generate(client, mode, replace(sampling, max_tokens=max_tokens))
        if mode is Mode.AUTOREGRESSIVE or generation.figures.hits or clock.now() >= until:
            return
        max_tokens = min(2 * max_tokens, LONGEST_WARM_UP_TOKENS)


def _compare(
    alone: Generation,
    ahead: Generation,
    links: Sequence[LinkStatus],
    repeated: Sequence[float | None] = (),
) -> None:
    print_table(out, summary([("AR", alone.figures), ("SSD", ahead.figures)]))
    index = first_difference(alone.token_ids, ahead.token_ids)
    if index is not None:
        raise DifferentTextError(f"the texts differ from token {index} on; please report this")
    out.print()
    out.print(Text("identical", style="green"), f": all {len(alone.token_ids)} tokens", sep="")
    # Without a hit, proposals of n-grams may still be accepted.
    if not ahead.figures.hits and (ahead.figures.tokens_per_round or 1.0) <= 1.0:
        figures = ahead.figures
        has_proposals = figures.misses or figures.late or figures.backup_rounds
        if figures.paused_rounds and not has_proposals:
            out.print("SSD decoded as AR: the target had turned speculation off, without a gain")
            return
        reason = why_not_speculative(ahead.figures, links)
        raise NotSpeculativeError(f"no round of the SSD text was speculative: {reason}")
    if alone.figures.tokens_per_second and ahead.figures.tokens_per_second:
        shown = ahead.figures.tokens_per_second / alone.figures.tokens_per_second
        ratios = sorted(filter(None, (shown, *repeated)))
        spread = f" (median of {len(ratios)} runs, {ratios[0]:.2f} to {ratios[-1]:.2f})"
        out.print(
            *("SSD is ", Text(f"{median(ratios):.2f}x", style="bold")),
            f" as fast as AR on this machine{spread if repeated else ''}",
            sep="",
        )


def first_difference(one: Sequence[TokenId], other: Sequence[TokenId]) -> int | None:
    """Return the index of the first token that differs or is missing; None for equal texts."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
