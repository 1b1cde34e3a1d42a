"""``ssd pool``: the drafts of a target, their sessions, links and hit rates."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ssd.console import can_redraw
from ssd.errors import NotReadyError
from ssd.rpc.client import TargetClient
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_cli.display import UNKNOWN, fitted, out, plain_table, print_table, write

_STYLES = {"active": "green", "refused": "red", "lost": "red"}
_NOT_LINKED = frozenset({"connecting", "lost", "refused"})
"""States in which a draft receives nothing."""
_REASONS = {
    "measuring": "too few rounds to compare",
    "faster": "faster than plain decoding",
    "slower": "plain decoding is faster",
}


async def show_pool(client: TargetClient, *, is_json: bool, is_once: bool) -> None:
    """Show the pool of a target: once, or each change until the target stops.

    Redirected output, and that with ``NO_COLOR``, shows it once. The client is closed at the end.

    Raises:
        NotReadyError: the target cannot be reached, or has stopped.
        SSDError: the call failed.
    """
    async with client:
        if is_json:
            write(json.dumps(asdict(await client.pool_status())) + "\n")
            return
        if is_once or not can_redraw(out):
            pool = await client.pool_status()
            for line in pool_lines(pool):
                out.print(line, soft_wrap=not out.is_terminal)
            print_table(out, links_table(pool.links))
            return
        with Live(console=out, auto_refresh=False) as live:
            async with contextlib.aclosing(client.watch_pool()) as pools:
                async for pool in pools:
                    table = fitted(out, links_table(pool.links))
                    live.update(Group(*pool_lines(pool), table), refresh=True)
    raise NotReadyError(f"the target at {client.endpoint} has stopped")


def pool_lines(pool: PoolStatus) -> list[Text]:
    """Return what concerns the whole target: load, speed, and the choice of the controller."""
    reason = _REASONS.get(pool.speculation_reason, pool.speculation_reason)
    choice = f"{'on' if pool.speculating else 'off'} ({reason or 'no reason'}"
    if pool.speculation_speed_up:
        choice += f", {pool.speculation_speed_up:.2f}x"
    choice += ")"
    # A target without links can have a draft of its own.
    if pool.links and all(link.state in _NOT_LINKED for link in pool.links):
        choice += ", but no draft is linked" if pool.speculating else ", no draft is linked"
    return [
        Text(
            f"sequences  {pool.running_sequences} running, {pool.waiting_sequences} waiting; "
            f"drafts needed {pool.desired_draft_replicas:.1f}"
        ),
        Text(
            f"rounds     {pool.tokens_per_round:.2f} tokens, efficiency {pool.efficiency:.2f}; "
            f"hits {pool.hit_rate:.0%} of all tables since the start"
        ),
        Text(f"mode auto  speculation {choice}, proposals of at most {pool.max_proposed_tokens}"),
    ]


def _name_of(link: LinkStatus) -> str:
    """Return the pod of a draft, or its address, with the host and process id of its process."""
    if not link.draft_pod:
        return link.address
    # No name of a pod has a colon.
    return f"{link.address} ({link.draft_pod})" if ":" in link.draft_pod else link.draft_pod


def links_table(links: Sequence[LinkStatus]) -> Table:
    """Return one row for each draft."""
    numbers = ("sessions", "sustainable", "hits", "late", "round trip")
    table = plain_table("draft", "state", right=numbers, no_wrap=True)
    table.add_column("channel", no_wrap=True)
    table.add_column("reason")
    for link in links:
        looked_up = link.hits + link.misses + link.late
        is_known = link.round_trip_seconds > 0
        table.add_row(
            Text(_name_of(link)),
            Text(link.state, style=_STYLES.get(link.state, "yellow")),
            str(link.sessions),
            str(link.sustainable_sessions),
            f"{link.hits / looked_up:.0%}" if looked_up else UNKNOWN,
            f"{link.late / looked_up:.0%}" if looked_up else UNKNOWN,
            f"{link.round_trip_seconds * 1e3:.2f} ms" if is_known else UNKNOWN,
            Text(" ".join(filter(None, (link.channel, link.transport)))),
            Text(link.reason or link.channel_reason),
        )
    if not links:
        table.add_row(Text("none", style="dim"))
    return table
