"""The plot of ``ssd bench peers``, as PNG. Needs matplotlib (extra ``bench``)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from ssd_bench.peers.measure import Row
from ssd_bench.sampling.rounds import Cell


def draw_peers(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens a second of each contender as horizontal bars with quartiles.

    Args:
        rows: rows without a measurement are left out; busy ones are pale.
        path: the file to write.
    """
    found = [(each, each.spread) for each in reversed(rows)]
    bars = [(row, spread) for row, spread in found if spread is not None]
    peers = dict.fromkeys(row.contender.peer for row in rows)
    colors = dict(zip(peers, TABLEAU_COLORS, strict=False))
    figure = Figure(figsize=(8, 1 + 0.28 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        [row.name for row, _ in bars],
        [spread.median for _, spread in bars],
        xerr=[
            [spread.median - spread.q1 for _, spread in bars],
            [spread.q3 - spread.median for _, spread in bars],
        ],
        color=[(colors[row.contender.peer], 1.0 if row.is_usable else 0.4) for row, _ in bars],
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("tokens/s of whole requests (quartiles)")
    figure.savefig(path, dpi=120)


def draw_sampling(cells: Sequence[Cell], path: Path, proposal_share: float) -> None:
    """Draw hit rate against tokens a round, and the predicted speed-up, of laws of sampling.

    Args:
        cells: of ``ssd bench sampling``; Saguaro sampling is a line over its C.
        path: the file to write.
        proposal_share: see ``Cell.speed_up``.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    hits, speeds = figure.subplots(1, 2)
    temperatures = sorted({each.temperature for each in cells})
    for temperature, color in zip(temperatures, TABLEAU_COLORS, strict=False):
        here = [each for each in cells if each.temperature == temperature]
        coupled = [each for each in here if each.cache_weight is None]
        line = sorted(
            (each for each in here if each.cache_weight is not None),
            key=lambda each: each.cache_weight or 0.0,
        )
        for name, marker, group in (("coupled", "*", coupled), ("Saguaro", "o-", line)):
            if not group:
                continue
            tokens = [each.tokens_per_round for each in group]
            rates = [each.hit_rate("adaptive") for each in group]
            size = 12 if marker == "*" else 5
            hits.plot(
                tokens, rates, marker, color=color, ms=size, label=f"{name}, T = {temperature:g}"
            )
        ups = [each.speed_up("adaptive", proposal_share, waits_after_miss=False) for each in line]
        speeds.plot([each.cache_weight for each in line], ups, "o-", color=color)
        for each in coupled:
            up = each.speed_up("adaptive", proposal_share, waits_after_miss=False)
            speeds.axhline(up, color=color, linestyle="--")
    hits.set_xlabel("tokens a round after a proposal of the draft")
    hits.set_ylabel("hit rate (adaptive fan-out)")
    hits.legend(fontsize=7)
    speeds.set_xlabel("C of Saguaro sampling; 1 is rejection sampling")
    speeds.set_ylabel("predicted speed-up (dashed: coupled)")
    speeds.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
