"""A real target and a real draft that receive anything.

Each call ends with an answer or an error of its caller. The text of other requests stays the same.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.messages import almost, messages, scaled
from tests.handshake import hello_of
from tests.pairs import QUICK, draft_of, target_of

from ssd.rpc.client import TargetClient
from ssd.rpc.link_codec import speculate_request
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import LinkSettings, OpenSession, SamplingParams
from ssd.v1 import admin_pb2, generate_pb2, speculation_pb2

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
LOOKAHEAD, BRANCHES, MAX_LEN = 3, 8, 128
SHAPE = (
    *("--dtype", "float32", "--max-model-len", str(MAX_LEN), *QUICK),
    *("--lookahead", str(LOOKAHEAD), "--branches", str(BRANCHES)),
    *("--kv-cache-bytes", "8000000"),
)
ANSWER_SECONDS = 30.0
CODES = grpc.StatusCode
ERRORS_OF_THE_SERVER = {CODES.INTERNAL, CODES.UNKNOWN, CODES.UNAVAILABLE, CODES.DEADLINE_EXCEEDED}
HONEST = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True)
METHODS: dict[str, type[Message]] = {
    "GenerateService/Generate": generate_pb2.GenerateRequest,
    "GenerateService/Tokenize": generate_pb2.TokenizeRequest,
    "GenerateService/Detokenize": generate_pb2.DetokenizeRequest,
    "GenerateService/GetModelInfo": generate_pb2.GetModelInfoRequest,
    "AdminService/GetPoolStatus": admin_pb2.GetPoolStatusRequest,
    "AdminService/WatchPool": admin_pb2.WatchPoolRequest,
    "AdminService/SetSpeculation": admin_pb2.SetSpeculationRequest,
}
"""All calls of a target but Drain, which would end it."""


class World:
    """A target with its draft, and the loop of their callers."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.runner = runner
        self.hello = hello_of(folder, lookahead=LOOKAHEAD, branches=BRANCHES)
        self._folder = folder

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        async with (
            draft_of(self._folder, *SHAPE) as self.draft,
            target_of(self._folder, *SHAPE, drafts=[self.draft]) as (self.target, _),
            grpc.aio.insecure_channel(self.target.grpc_address) as self.to_target,
            grpc.aio.insecure_channel(self.draft.grpc_address) as self.to_draft,
        ):
            self.text = await self.honest_text()
            yield

    async def honest_text(self) -> str:
        async with TargetClient(self.target.grpc_address, ready_seconds=0) as client:
            chunks = client.generate("def fib(n):", HONEST, timeout_seconds=ANSWER_SECONDS)
            return "".join([chunk.text async for chunk in chunks])

    async def call(self, method: str, payload: bytes) -> grpc.StatusCode:
        """The status of a call that is cancelled after three messages, which counts as OK."""
        channel: Any = self.to_target
        call = channel.unary_stream(f"/ssd.v1.{method}")(payload, timeout=ANSWER_SECONDS)
        most = 1 if method.endswith("WatchPool") else 3
        try:
            for _ in range(most):
                if await call.read() is EOF:
                    break
            else:
                return CODES.OK
            code: grpc.StatusCode = await call.code()
            return code
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            call.cancel()

    async def link(self, payloads: list[bytes]) -> grpc.StatusCode:
        """The status of a link that ends after these messages."""
        channel: Any = self.to_draft
        call = channel.stream_stream("/ssd.v1.SpeculationService/Speculate")(timeout=ANSWER_SECONDS)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for payload in payloads:
                await call.write(payload)
            await call.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not EOF:
                pass
        code: grpc.StatusCode = await call.code()
        # Without the server's words it is this client's own status: it wrote to an ended call.
        is_own = code is CODES.INTERNAL and "the server's log" not in str(await call.details())
        return CODES.UNAVAILABLE if is_own else code

    async def check(self) -> None:
        """The text is the same, and both processes end in order and have logged no error."""
        assert await self.honest_text() == self.text
        for process in (self.target, self.draft):
            process.signal(signal.SIGTERM)
            assert await process.wait() == 0
            assert [each for each in process.events if each.fields.get("level") == "error"] == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("fuzz"), seed=1, max_len=MAX_LEN)
    with asyncio.Runner() as runner:
        found = World(runner, folder)
        started = found.started()
        runner.run(started.__aenter__())
        yield found
        runner.run(found.check())
        runner.run(started.__aexit__(None, None, None))


@pytest.mark.parametrize("method", METHODS)
@scaled(8)
@given(data=st.data())
def test_any_request_ends_with_an_answer_or_an_error_of_its_caller(
    world: World, method: str, data: st.DataObject
) -> None:
    valid = messages(METHODS[method])
    payload = data.draw(valid.map(lambda each: each.SerializeToString()) | almost(valid))
    assert world.runner.run(world.call(method, payload)) not in ERRORS_OF_THE_SERVER


def _commits(rows: list[list[int]]) -> bytes:
    return speculate_request(np.array(rows, dtype="<i4").tobytes()).SerializeToString()


def _opening(session: int, tokens: list[int], max_len: int) -> bytes:
    opening = OpenSession(
        session=session, token_ids=tuple(tokens), seed=1, temperature=0.5, max_len=max_len
    )
    return speculate_request(opening).SerializeToString()


NUMBER = st.integers(-1, 6) | st.integers(-(2**31), 2**31 - 1)
ANYTHING = (
    messages(speculation_pb2.SpeculateRequest).map(lambda each: each.SerializeToString())
    | almost(messages(speculation_pb2.SpeculateRequest))
    | st.builds(
        _opening,
        st.integers(1, 3),
        st.lists(st.integers(0, 40), min_size=1, max_size=MAX_LEN + 1),
        st.integers(0, 2 * MAX_LEN),
    )
    | st.builds(
        _commits,
        st.lists(st.lists(NUMBER, min_size=10, max_size=10), max_size=4),
    )
    | st.just(speculate_request(LinkSettings(fan_out_policy="uniform")).SerializeToString())
)


@scaled(25)
@given(has_hello=st.booleans(), payloads=st.lists(ANYTHING, max_size=8))
def test_a_draft_ends_any_link_with_an_answer_or_an_error_of_the_target(
    world: World, payloads: list[bytes], *, has_hello: bool
) -> None:
    hello = speculate_request(world.hello).SerializeToString()
    sent = [hello, *payloads] if has_hello else payloads
    code = world.runner.run(world.link(sent))
    # UNAVAILABLE is the status of a link that the draft ends, for example because of its room.
    assert code not in ERRORS_OF_THE_SERVER - {CODES.UNAVAILABLE}
