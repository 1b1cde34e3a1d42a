"""What ``ssd pool`` shows, from a real AdminService."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

import pytest
from tests.screens import Screen
from tests.served import serving

from ssd.errors import NotReadyError
from ssd.rpc.admin_servicer import AdminServicer
from ssd.rpc.client import TargetClient
from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_cli import pool_view
from ssd_cli.app import run
from ssd_cli.pool_view import links_table, pool_lines, show_pool

GOOD = LinkStatus(
    address="10.0.0.1:50052",
    state="active",
    sessions=3,
    sustainable_sessions=8,
    hits=9,
    misses=2,
    late=1,
    round_trip_seconds=0.00042,
    draft_pod="demo-draft-0",
    transport="tcp",
)
LOST = LinkStatus(address="10.0.0.2:50052", state="lost", reason="no message for 2 s")
POOL = PoolStatus(
    links=(GOOD, LOST),
    running_sequences=4,
    waiting_sequences=1,
    hit_rate=0.75,
    tokens_per_round=3.2,
    efficiency=0.9,
    speculating=True,
    speculation_reason="faster",
    speculation_speed_up=2.15,
    max_proposed_tokens=6,
    desired_draft_replicas=0.5,
)


class Target:
    """An AdminService whose pool a test sets."""

    def __init__(self) -> None:
        self.pool = POOL
        self.port = 0
        self.admin = AdminServicer(
            lambda: self.pool,
            set_speculation=lambda _change: None,
            drain=lambda _seconds: 0,
            watch_seconds=0.001,
        )

    def client(self) -> TargetClient:
        return TargetClient(f"127.0.0.1:{self.port}", ready_seconds=0)


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    async with serving(target.admin) as server:
        target.port = server.port
        yield target
        target.admin.close()


async def test_one_shot_prints_the_state_as_a_table(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    await show_pool(target.client(), is_json=False, is_once=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sequences  4 running, 1 waiting; drafts needed 0.5"
    assert lines[1:3] == [
        "rounds     3.20 tokens, efficiency 0.90; hits 75% of all tables since the start",
        "mode auto  speculation on (faster than plain decoding, 2.15x), proposals of at most 6",
    ]
    titles, good, lost = (" ".join(line.split()) for line in lines[3:])
    assert titles.startswith("draft state sessions sustainable hits late ")
    assert good == "demo-draft-0 active 3 8 75% 8% 0.42 ms grpc tcp"
    assert lost.startswith("10.0.0.2:50052 lost ")
    assert "no message for 2 s" in lost


def test_a_draft_that_is_no_pod_has_its_address_in_its_row() -> None:
    cells = links_table([replace(GOOD, draft_pod="vm:30523")]).columns[0].cells
    assert list(map(str, cells)) == ["10.0.0.1:50052 (vm:30523)"]


@pytest.mark.parametrize(
    ("states", "is_named"),
    [
        ((), False),
        (("lost",), True),
        (("connecting", "refused"), True),
        (("lost", "quarantined"), False),
    ],
)
def test_a_speculation_without_any_linked_draft_is_named(
    states: tuple[str, ...], *, is_named: bool
) -> None:
    links = tuple(replace(LOST, state=state) for state in states)
    line = str(pool_lines(replace(POOL, links=links))[-1])
    assert ("2.15x), but no draft is linked, proposals" in line) == is_named


@pytest.mark.parametrize("width", [60, 80, 120])
async def test_headings_are_whole_on_a_narrow_terminal(
    width: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(force_terminal=True, width=width, color_system=None, soft_wrap=True)
    monkeypatch.setattr(pool_view, "out", screen)
    await show_pool(target.client(), is_json=False, is_once=True)
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert max(map(len, lines)) <= width
    words = re.findall(r"[^\s,]+", screen.text)
    assert {"sessions", "sustainable", "channel", "reason", "demo-draft-0"} <= set(words)


async def test_without_a_cursor_the_state_is_shown_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(force_terminal=True, no_color=True, color_system=None)
    monkeypatch.setattr(pool_view, "out", screen)
    await show_pool(target.client(), is_json=False, is_once=False)
    assert "demo-draft-0" in screen.text
    assert "\x1b" not in screen.text


async def test_json_has_every_field(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    await show_pool(target.client(), is_json=True, is_once=False)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(POOL)))


async def test_redirected_output_is_one_shot(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    target.pool = replace(POOL, links=(), speculating=False, speculation_reason="slower")
    await show_pool(target.client(), is_json=False, is_once=False)
    output = capsys.readouterr().out
    assert "speculation off (plain decoding is faster" in output
    assert output.splitlines()[-1].strip() == "none"


async def test_a_live_view_follows_the_pool_until_the_target_stops(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(force_terminal=True, width=120, height=40, color_system=None)
    monkeypatch.setattr(pool_view, "out", screen)
    view = asyncio.create_task(show_pool(target.client(), is_json=False, is_once=False))

    async def until(text: str) -> None:
        while text not in screen.text:  # noqa: ASYNC110 - the view runs in this loop
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await until("4 running")
        target.pool = replace(POOL, running_sequences=5, links=(replace(GOOD, state="draining"),))
        await until("5 running")
        await until("draining")
        target.admin.close()
        with pytest.raises(NotReadyError, match="has stopped"):
            await view


def test_a_target_that_does_not_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pool", "--address", "127.0.0.1:1", "--once"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "ssd up" in output.err
