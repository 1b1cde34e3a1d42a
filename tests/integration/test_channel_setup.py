"""Which channel the two ends of a link agree on, over real gRPC and real gloo."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.ssd.transport.gloo_pair import held, until_released

from ssd import channel_setup
from ssd.channel_setup import (
    accept_channel,
    common_backends,
    confirm_channel,
    host_of,
    offer_channel,
)
from ssd.errors import HandshakeError, LinkError
from ssd.link_channel import LinkChannel, LinkShape
from ssd.rpc.client import DraftClient
from ssd.rpc.link import LinkCall, LinkServerCall
from ssd.rpc.server import RpcServer
from ssd.speculation.table import row_width
from ssd.telemetry import CHANNEL_FALLBACKS_TOTAL
from ssd.transport import communicator, gloo, nccl
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.frame import Frame, FrameKind
from ssd.transport.gloo import GlooCommunicator
from ssd.transport.rendezvous import LinkStore
from ssd.types import WIRE_VERSION, Hello, Welcome
from ssd.v1 import speculation_pb2_grpc

HELLO = Hello(
    wire_version=WIRE_VERSION,
    vocab_size=10,
    tokenizer_fingerprint="f",
    lookahead=2,
    branches=4,
    channel="grpc",
    epoch=3,
    backends=("gloo",),
)
WELCOME = Welcome(epoch=3, max_sessions=3, lookahead=2, branches=4, backends=("gloo",))
MAX_SECONDS = 30.0
CONNECT = gloo.connect


class AcceptingDraft(speculation_pb2_grpc.SpeculationServiceServicer):
    """Sets up the channel of a link and holds it until the link ends."""

    def __init__(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.accepted: asyncio.Future[LinkChannel] = asyncio.get_running_loop().create_future()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            found = await accept_channel(call, HELLO, self.welcome, "cpu")
            found.channel.start(self.frames.put_nowait, lambda _error: None)
            confirm_channel(call, self.welcome, found)
            self.accepted.set_result(found)
            try:
                while await call.receive() is not None:
                    pass
            finally:
                found.channel.close()
                await found.channel.wait_closed()


@dataclass
class Ends:
    """A link, and the draft that accepts its channel."""

    call: LinkCall
    address: str
    draft: AcceptingDraft
    client: DraftClient

    async def offer(self, hello: Hello = HELLO, welcome: Welcome = WELCOME) -> LinkChannel:
        async with asyncio.timeout(MAX_SECONDS):
            return await offer_channel(self.call, hello, welcome, self.address, device="cpu")


@contextlib.asynccontextmanager
async def link(welcome: Welcome = WELCOME) -> AsyncIterator[Ends]:
    server = RpcServer("127.0.0.1", 0)
    draft = AcceptingDraft(welcome)
    register = partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, draft)
    server.add("ssd.v1.SpeculationService", register)
    await server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        async with DraftClient(address) as client:
            call = await client.open_link()
            yield Ends(call, address, draft, client)
            await call.close()
    finally:
        await server.stop(0)


async def check_frames(ends: Ends, found: LinkChannel) -> None:
    """Frames of the target arrive at the draft."""
    found.channel.start(lambda _frame: None, lambda _error: None)
    found.channel.send(Frame(FrameKind.COMMITS, 3, 1, np.zeros((1, 9), dtype=np.int32)))
    async with asyncio.timeout(MAX_SECONDS):
        assert (await ends.draft.frames.get()).sequence_number == 1
    found.channel.close()
    await found.channel.wait_closed()


def failing(rank: int) -> Callable[[LinkStore, Place], GlooCommunicator]:
    """Return a ``connect`` that fails at one end."""

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        if place.rank == rank:
            raise LinkError("no such interface")
        return CONNECT(store, place)

    return connect


async def test_both_ends_use_the_collective_channel_and_measure_it() -> None:
    async with link() as ends:
        found = await ends.offer()
        assert (found.name, found.reason, found.channel.transport) == ("collective", "", "tcp")
        assert found.quality is not None
        assert found.quality.round_trip_seconds > 0.0
        assert (await ends.draft.accepted).name == "collective"
        await check_frames(ends, found)


async def test_a_target_that_asks_for_grpc_uses_it_without_a_reason() -> None:
    async with link(replace(WELCOME, backends=())) as ends:
        found = await ends.offer(replace(HELLO, backends=()), replace(WELCOME, backends=()))
        assert (found.name, found.reason) == ("grpc", "")
        await check_frames(ends, found)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [("", "the draft does not have this channel"), ("the draft on cpu has gloo", "has gloo")],
)
async def test_a_draft_without_the_channel_is_served_over_grpc(refusal: str, reason: str) -> None:
    welcome = replace(WELCOME, backends=(), backend_refusal=refusal)
    async with link(welcome) as ends:
        found = await ends.offer(welcome=welcome)
        assert found.name == "grpc"
        assert reason in found.reason
        await check_frames(ends, found)


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(TARGET_RANK, "no such interface"), (DRAFT_RANK, "the draft: no such interface")],
)
async def test_an_end_that_cannot_connect_makes_both_use_grpc(
    monkeypatch: pytest.MonkeyPatch, rank: int, reason: str
) -> None:
    monkeypatch.setattr(gloo, "connect", failing(rank))
    async with link() as ends:
        found = await ends.offer()
        assert (found.name, found.reason) == ("grpc", reason)
        assert (await ends.draft.accepted).name == "grpc"
        await check_frames(ends, found)


async def test_a_set_up_that_takes_too_long_makes_both_use_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        if place.rank == DRAFT_RANK:
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return CONNECT(store, place)

    monkeypatch.setattr(gloo, "connect", connect)
    monkeypatch.setitem(communicator.SETUP_SECONDS, "gloo", 0.3)
    async with link() as ends:
        found = await ends.offer()
        assert found.name == "grpc"
        assert "within 0.3 s" in found.reason
        released.set()
        await check_frames(ends, found)


def broken_first(
    monkeypatch: pytest.MonkeyPatch,
    connect: Callable[[LinkStore, Place], GlooCommunicator],
    seconds: float = MAX_SECONDS,
) -> None:
    """Replace NCCL, which both ends try before gloo."""
    monkeypatch.setattr(nccl, "connect", connect)
    monkeypatch.setitem(communicator.SETUP_SECONDS, "nccl", seconds)


BOTH = ("nccl", "gloo")


@pytest.mark.parametrize("rank", [TARGET_RANK, DRAFT_RANK])
async def test_a_backend_that_fails_at_one_end_is_replaced_by_the_next(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    broken_first(monkeypatch, failing(rank))
    welcome = replace(WELCOME, backends=BOTH)
    before = CHANNEL_FALLBACKS_TOTAL.labels(backend="nccl")._value.get()
    async with link(welcome) as ends:
        found = await ends.offer(replace(HELLO, backends=BOTH), welcome)
        assert (found.name, found.channel.transport) == ("collective", "tcp")
        assert "no such interface" in found.reason
        assert (await ends.draft.accepted).name == "collective"
        await check_frames(ends, found)
    # Both ends are in this process.
    assert CHANNEL_FALLBACKS_TOTAL.labels(backend="nccl")._value.get() == before + 2


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, OSError, ValueError])
async def test_an_error_in_a_set_up_is_a_reason_and_not_the_end_of_the_link(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        raise kind("CUDA out of memory")

    broken_first(monkeypatch, connect)
    welcome = replace(WELCOME, backends=BOTH)
    async with link(welcome) as ends:
        found = await ends.offer(replace(HELLO, backends=BOTH), welcome)
        assert found.name == "collective"
        # Either end can be the first to report it.
        assert found.reason.removeprefix("the draft: ") == "nccl: CUDA out of memory"
        await check_frames(ends, found)


async def test_a_backend_that_hangs_at_one_end_is_replaced_and_its_late_entries_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        if place.rank == DRAFT_RANK:
            released.wait(MAX_SECONDS)
            store.set("0/late", b"of an attempt that has ended")
        return CONNECT(store, place)

    def connect_next(store: LinkStore, place: Place) -> GlooCommunicator:
        released.set()
        return CONNECT(store, place)

    broken_first(monkeypatch, connect, seconds=0.3)
    monkeypatch.setattr(gloo, "connect", connect_next)
    welcome = replace(WELCOME, backends=BOTH)
    before = held()
    async with link(welcome) as ends:
        found = await ends.offer(replace(HELLO, backends=BOTH), welcome)
        assert found.name == "collective"
        assert "within 0.3 s" in found.reason
        await check_frames(ends, found)
    await until_released(before)


async def test_a_link_whose_backends_all_fail_uses_grpc_and_names_each_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        raise LinkError("NCCL: unhandled system error")

    broken_first(monkeypatch, connect)
    monkeypatch.setattr(gloo, "connect", failing(TARGET_RANK))
    welcome = replace(WELCOME, backends=BOTH)
    async with link(welcome) as ends:
        found = await ends.offer(replace(HELLO, backends=BOTH), welcome)
        assert found.name == "grpc"
        assert found.reason.endswith("NCCL: unhandled system error; no such interface")
        await check_frames(ends, found)


async def test_ends_with_other_frame_sizes_use_grpc_and_name_them() -> None:
    async with link(replace(WELCOME, max_sessions=2)) as ends:
        found = await ends.offer()
        assert found.name == "grpc"
        assert "epoch 3, commits 3x9, tables 15x9" in found.reason
        assert "epoch 3, commits 2x9, tables 10x9" in found.reason


async def test_ends_of_different_epochs_use_grpc_and_name_them() -> None:
    async with link() as ends:
        found = await ends.offer(replace(HELLO, epoch=4))
        assert found.name == "grpc"
        assert "epoch 4" in found.reason


async def test_a_backend_that_the_target_did_not_offer_is_refused() -> None:
    async with link() as ends:
        for chosen in (("nccl",), ("gloo", "gloo")):
            with pytest.raises(HandshakeError, match=f"backends: the draft chose {chosen[0]}"):
                await ends.offer(welcome=replace(WELCOME, backends=chosen))


async def test_a_link_that_is_lost_during_the_set_up_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with link() as ends:
        found = await ends.offer()
        found.channel.close()
        await found.channel.wait_closed()
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        loop.call_soon_threadsafe(has_begun.set)
        store.get("never")
        raise AssertionError

    monkeypatch.setattr(gloo, "connect", connect)
    before = held()
    async with link() as ends:
        offering = asyncio.create_task(ends.offer())
        await has_begun.wait()
        await ends.call.close()
        with pytest.raises(LinkError):
            await offering
    await until_released(before)


async def test_a_target_that_cancels_its_link_during_the_set_up_leaves_no_failed_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: reports.append(context))

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        is_draft = place.rank == DRAFT_RANK
        if is_draft:
            loop.call_soon_threadsafe(has_begun.set)
        try:
            store.get("never")
        finally:
            if is_draft:
                loop.call_soon_threadsafe(has_ended.set)
        raise AssertionError

    monkeypatch.setattr(gloo, "connect", connect)
    async with link() as ends, asyncio.timeout(MAX_SECONDS):
        offering = asyncio.create_task(ends.offer())
        await has_begun.wait()
        await ends.client.close()
        with pytest.raises(LinkError):
            await offering
        await has_ended.wait()
    # A task with an exception that was not read reports it when it is collected.
    gc.collect()
    assert reports == []


async def test_a_set_up_that_is_cancelled_leaves_nothing() -> None:
    async with link() as ends:
        found = await ends.offer()
        found.channel.close()
        await found.channel.wait_closed()
    before = held()
    async with link() as ends:
        offering = asyncio.create_task(ends.offer())
        await asyncio.sleep(0)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
    await until_released(before)


def test_the_backends_of_the_target_that_a_draft_has_are_tried_in_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert common_backends((), "cpu") == ((), "")
    assert common_backends(("nccl", "gloo", "gloo"), "cpu") == (("gloo",), "")
    assert common_backends(("nccl",), "cpu") == (
        (),
        "the draft on cpu has gloo, the target has nccl",
    )
    monkeypatch.setattr(channel_setup, "available_backends", lambda _device: ("gloo", "nccl"))
    assert common_backends(("nccl", "gloo"), "cuda") == (("nccl", "gloo"), "")


def test_the_largest_frames_hold_one_commit_and_one_table_of_each_session() -> None:
    shape = LinkShape(max_sessions=3, branches=4, lookahead=2)
    assert (shape.commits.max_rows, shape.commits.max_width) == (3, row_width(2))
    assert (shape.tables.max_rows, shape.tables.max_width) == (3 * (4 + 1), row_width(2))


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("10.0.0.1:50052", "10.0.0.1"),
        ("[fd00::1]:50052", "fd00::1"),
        ("ipv4:10.0.0.1:1234", "10.0.0.1"),
        ("ipv6:%5Bfd00::1%5D:1234", "fd00::1"),
        ("ipv6:[::ffff:10.0.0.1]:1234", "10.0.0.1"),
        ("localhost:50052", "localhost"),
    ],
)
def test_the_host_of_a_peer_is_read_from_its_address(peer: str, host: str) -> None:
    assert host_of(peer) == host
