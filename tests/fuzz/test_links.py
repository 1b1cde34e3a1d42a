"""The target's end of a link whose draft sends anything: the link ends, and nothing else does."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.messages import almost, messages, scaled
from tests.handshake import HELLO, WELCOME

from ssd.pool.dialer import LinkDialer
from ssd.pool.link import LinkState
from ssd.pool.pool import DraftPool
from ssd.pool.settings import DraftsSettings
from ssd.ports import SystemClock
from ssd.rpc.link_codec import speculate_response
from ssd.types import LinkSettings
from ssd.v1 import speculation_pb2

END_SECONDS = 20.0
LOOKAHEAD, BRANCHES, VOCAB = 3, 4, 30
OWN_HELLO = replace(HELLO, vocab_size=VOCAB, lookahead=LOOKAHEAD, branches=BRANCHES)
OWN_WELCOME = replace(WELCOME, lookahead=LOOKAHEAD, branches=BRANCHES)
EVENTS = st.lists(
    st.lists(st.integers(-1, 12) | st.integers(-(2**31), 2**31 - 1), min_size=10, max_size=10),
    max_size=6,
)


def _frame(rows: list[list[int]]) -> bytes:
    payload = np.array(rows, dtype="<i4").tobytes()
    return speculation_pb2.SpeculateResponse(tables=payload).SerializeToString()


ANYTHING = (
    messages(speculation_pb2.SpeculateResponse).map(lambda each: each.SerializeToString())
    | almost(messages(speculation_pb2.SpeculateResponse))
    | st.builds(_frame, EVENTS)
)


class World:
    """A draft that sends any bytes and ends the call, and the loop on which it runs."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.payloads: list[bytes] = []
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        # Without a serializer: the handler writes bytes.
        handler = grpc.stream_stream_rpc_method_handler(self._speculate)
        service = grpc.method_handlers_generic_handler(
            "ssd.v1.SpeculationService", {"Speculate": handler}
        )
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((service,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def _speculate(self, _requests: Any, context: Any) -> None:
        await context.read()
        for payload in self.payloads:
            await context.write(payload)

    async def state_after(self, payloads: list[bytes]) -> LinkState:
        """The state of a link whose draft has sent these bytes."""
        self.payloads = payloads
        settings = DraftsSettings(branches=BRANCHES, draft_deadline_ms=0.0)
        pool = DraftPool(settings, LOOKAHEAD, VOCAB, SystemClock())
        dialer = LinkDialer(pool, (self.address,), OWN_HELLO, LinkSettings())
        task = asyncio.create_task(dialer.run())
        try:
            async with asyncio.timeout(END_SECONDS):
                while True:
                    await asyncio.sleep(0.001)
                    for report in dialer.reports():
                        if report.status.state in (LinkState.LOST, LinkState.REFUSED):
                            return LinkState(report.status.state)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert pool.links() == ()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        found = World(runner)
        runner.run(found.start())
        yield found
        runner.run(found.stop())


@scaled(20)
@given(has_welcome=st.booleans(), payloads=st.lists(ANYTHING, max_size=8))
def test_a_link_ends_whatever_its_draft_sends(
    world: World, payloads: list[bytes], *, has_welcome: bool
) -> None:
    welcome = speculate_response(OWN_WELCOME).SerializeToString()
    given_payloads = [welcome, *payloads] if has_welcome else payloads
    with recorded_errors() as errors:
        world.runner.run(world.state_after(given_payloads))
    # A refused or lost link is no error. A crash of its task is.
    assert errors == []


@contextlib.contextmanager
def recorded_errors() -> Iterator[list[str]]:
    """Messages that are logged as errors, inside."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)
