"""Which channel the two ends of a link agree on, over real gRPC and real gloo."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.served import serving
from tests.unit.ssd.transport.gloo_pair import held, until_released

from ssd.errors import LinkError
from ssd.observability.metrics import CHANNEL_FALLBACKS_TOTAL
from ssd.rpc.client import DraftClient
from ssd.rpc.link import ChannelStatus, LinkCall, LinkServerCall
from ssd.speculation.table import frame_bytes
from ssd.transport import communicator, gloo, setup
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.gloo import GlooCommunicator
from ssd.transport.probe import ChannelQuality
from ssd.transport.rendezvous import LinkStore
from ssd.transport.setup import set_up_channel
from ssd.types import ChannelState, OpenSession, Rendezvous, Welcome
from ssd.v1 import speculation_pb2_grpc

WELCOME = Welcome(epoch=3, max_sessions=3, lookahead=2, branches=4, backend="gloo")
COMMIT = bytes(frame_bytes(1, 2))
MAX_SECONDS = 30.0
CONNECT = gloo.connect
Connect = Callable[[LinkStore, Place], GlooCommunicator]


class AcceptingDraft(speculation_pb2_grpc.SpeculationServiceServicer):
    """Sets up the channel of a link and holds it until the link ends."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[ChannelStatus] = asyncio.get_running_loop().create_future()
        self.received: asyncio.Queue[object] = asyncio.Queue()

    async def Speculate(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        async with LinkServerCall(context) as call:
            self.accepted.set_result(await set_up_channel(call, WELCOME, call.name, "cpu"))
            while (message := await call.receive()) is not None:
                # The other end may still send entries of an attempt that has failed.
                if not isinstance(message, Rendezvous | ChannelState):
                    self.received.put_nowait(message)


@dataclass
class Ends:
    """A link, and the draft that accepts its channel."""

    call: LinkCall
    address: str
    draft: AcceptingDraft
    client: DraftClient

    async def set_up(self) -> ChannelStatus:
        async with asyncio.timeout(MAX_SECONDS):
            return await set_up_channel(self.call, WELCOME, self.address, device="cpu")

    async def check_order(self) -> None:
        """No frame arrives at the draft before an opening that the target sent earlier."""
        openings = [
            OpenSession(session=number, token_ids=(1,), seed=1, temperature=0.0, max_len=9)
            for number in (1, 2)
        ]
        sent: list[OpenSession | bytes] = [COMMIT, openings[0], COMMIT, openings[1], COMMIT]
        for message in sent:
            self.call.send(message)
        async with asyncio.timeout(MAX_SECONDS):
            received = [await self.draft.received.get() for _ in sent]
        is_frame = [isinstance(each, bytes) for each in received]
        assert [each for each in received if not isinstance(each, bytes)] == openings
        for num_before, place in ((1, 1), (2, 2)):
            frame = [index for index, each in enumerate(is_frame) if each][place]
            assert is_frame[:frame].count(False) >= num_before, "a frame overtook an opening"


@contextlib.asynccontextmanager
async def link() -> AsyncIterator[Ends]:
    draft = AcceptingDraft()
    async with serving(draft) as server:
        address = f"127.0.0.1:{server.port}"
        async with DraftClient(address) as client:
            call = await client.open_link()
            yield Ends(call, address, draft, client)
            await call.close()


def failing(rank: int, error: Exception) -> Connect:
    """Return a ``connect`` that fails at one end."""

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        if place.rank == rank:
            raise error
        return CONNECT(store, place)

    return connect


async def test_both_ends_use_the_collective_channel_and_measure_it() -> None:
    async with link() as ends:
        found = await ends.set_up()
        assert (found.name, found.reason, found.transport) == ("collective", "", "tcp")
        assert found.round_trip_seconds > 0.0
        assert (await ends.draft.accepted).name == "collective"
        await ends.check_order()


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(TARGET_RANK, "no such interface"), (DRAFT_RANK, "the draft: no such interface")],
)
async def test_an_end_that_cannot_connect_makes_both_use_grpc(
    monkeypatch: pytest.MonkeyPatch, rank: int, reason: str
) -> None:
    monkeypatch.setattr(gloo, "connect", failing(rank, LinkError("no such interface")))
    before = CHANNEL_FALLBACKS_TOTAL.labels(backend="gloo")._value.get()
    async with link() as ends:
        found = await ends.set_up()
        assert (found.name, found.reason) == ("grpc", reason)
        assert (await ends.draft.accepted).name == "grpc"
        await ends.check_order()
    # Both ends are in this process.
    assert CHANNEL_FALLBACKS_TOTAL.labels(backend="gloo")._value.get() == before + 2


async def test_a_backend_that_must_be_faster_than_grpc_and_is_not_makes_both_use_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = ChannelQuality(round_trip_seconds=3e-4, grpc_seconds=2e-4, bytes_per_second=1e9)
    monkeypatch.setattr(setup, "MUST_BE_FASTER", ("gloo",))
    monkeypatch.setattr(setup, "probe", lambda *_args: slow)
    async with link() as ends:
        found = await ends.set_up()
        assert (found.name, found.reason) == (
            "grpc",
            "gloo: a round trip takes 300 us, over gRPC 200 us",
        )
        assert (await ends.draft.accepted).reason == f"the target: {found.reason}"
        await ends.check_order()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, OSError, ValueError])
async def test_an_error_in_a_set_up_is_a_reason_and_not_the_end_of_the_link(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "connect", failing(TARGET_RANK, kind("CUDA out of memory")))
    async with link() as ends:
        found = await ends.set_up()
        assert (found.name, found.reason) == ("grpc", "gloo: CUDA out of memory")
        await ends.check_order()


async def test_a_set_up_that_takes_too_long_makes_both_use_grpc_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        if place.rank == DRAFT_RANK:
            released.wait(MAX_SECONDS)
            store.set("0/late", b"of an attempt that has ended")
        return CONNECT(store, place)

    monkeypatch.setattr(gloo, "connect", connect)
    monkeypatch.setitem(communicator.SETUP_SECONDS, "gloo", 0.3)
    before = held()
    async with link() as ends:
        found = await ends.set_up()
        assert found.name == "grpc"
        assert "within 0.3 s" in found.reason
        released.set()
        await ends.check_order()
    await until_released(before)


async def test_a_link_that_is_lost_during_the_set_up_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with link() as ends:
        await ends.set_up()
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def connect(store: LinkStore, place: Place) -> GlooCommunicator:
        loop.call_soon_threadsafe(has_begun.set)
        store.get("never")
        raise AssertionError

    monkeypatch.setattr(gloo, "connect", connect)
    before = held()
    async with link() as ends:
        setting_up = asyncio.create_task(ends.set_up())
        await has_begun.wait()
        await ends.call.close()
        with pytest.raises(LinkError):
            await setting_up
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
        setting_up = asyncio.create_task(ends.set_up())
        await has_begun.wait()
        await ends.client.close()
        with pytest.raises(LinkError):
            await setting_up
        await has_ended.wait()
    # A task with an exception that was not read reports it when it is collected.
    gc.collect()
    assert reports == []


async def test_a_set_up_that_is_cancelled_leaves_nothing() -> None:
    async with link() as ends:
        await ends.set_up()
    before = held()
    async with link() as ends:
        setting_up = asyncio.create_task(ends.set_up())
        await asyncio.sleep(0)
        setting_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await setting_up
    await until_released(before)
