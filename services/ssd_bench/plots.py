"""The plot of ``ssd bench peers``, as PNG. Needs matplotlib (extra ``bench``)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from ssd_bench.peers.measure import Row


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
