import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from ssd.errors import CancelledError, DeadlineError, FieldError, NotReadyError, UnsupportedError
from ssd.rpc import codec
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.pool_codec import DraftStatus
from ssd.rpc.server import RpcServer
from ssd.types import FinishReason, GenerationChunk, Mode, SamplingParams
from ssd.v1 import (
    admin_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    speculation_pb2,
    speculation_pb2_grpc,
)


class Target(generate_pb2_grpc.GenerateServiceServicer):
    """Says its prompt back, a character a chunk; ``*`` in it makes it wait for ever."""

    def __init__(self) -> None:
        self.calls: list[GenerateCall] = []
        self.left = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        call = codec.generate_call(request, 1000)
        self.calls.append(call)
        try:
            for character in str(call.prompt):
                if character == "*":
                    await asyncio.Event().wait()
                if character == "!":
                    raise CancelledError("the target drained")
                chunk = GenerationChunk(token_ids=(ord(character),), text=character)
                await context.write(codec.generate_response(chunk))
            ending = GenerationChunk(token_ids=(), finish_reason=FinishReason.STOP)
            await context.write(codec.generate_response(ending))
        finally:
            self.left.set()

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generate_pb2.TokenizeResponse(token_ids=request.text.encode())

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generate_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())


class Draft(speculation_pb2_grpc.SpeculationServiceServicer):
    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speculation_pb2.GetStatusResponse(model="d", capacity=4)

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speculation_pb2.DrainDraftResponse(sessions=request.deadline_ms)


@pytest.fixture
async def target() -> Target:
    return Target()


@pytest.fixture
async def endpoint(target: Target) -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1", 0)
    server.add(
        "ssd.v1.GenerateService",
        partial(generate_pb2_grpc.add_GenerateServiceServicer_to_server, target),
    )
    server.add(
        "ssd.v1.SpeculationService",
        partial(speculation_pb2_grpc.add_SpeculationServiceServicer_to_server, Draft()),
    )
    server.add(
        "ssd.v1.AdminService",
        partial(
            admin_pb2_grpc.add_AdminServiceServicer_to_server, admin_pb2_grpc.AdminServiceServicer()
        ),
    )
    server.set_serving(True)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[TargetClient]:
    async with TargetClient(endpoint) as running:
        yield running


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


async def test_chunks_come_in_order_and_end(client: TargetClient) -> None:
    chunks = [chunk async for chunk in client.generate("abc")]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_without_sampling_everything_is_left_to_the_server(
    client: TargetClient, target: Target
) -> None:
    _ = [chunk async for chunk in client.generate("abc")]
    _ = [
        chunk
        async for chunk in client.generate(
            [1, 2], SamplingParams(seed=0, temperature=0.0), Mode.AUTOREGRESSIVE
        )
    ]
    bare, told = target.calls
    assert (bare.seed, bare.max_tokens, bare.prompt) == (None, None, "abc")
    assert (told.seed, told.max_tokens, told.prompt) == (0, 256, (1, 2))
    assert told.sampling.temperature == 0.0
    assert told.mode is Mode.AUTOREGRESSIVE


async def test_a_call_that_is_spelt_out_is_sent_as_it_is(
    client: TargetClient, target: Target
) -> None:
    call = GenerateCall(prompt="x", model="m", max_tokens=3, sampling=SamplingParams(max_tokens=3))
    _ = [chunk async for chunk in client.generate(call)]
    assert target.calls == [call]


async def test_leaving_the_iterator_ends_the_call_on_the_server(
    client: TargetClient, target: Target
) -> None:
    chunks = client.generate("a*")
    assert (await anext(chunks)).text == "a"
    await chunks.aclose()
    await target.left.wait()


async def test_a_deadline_is_an_error_that_says_so(client: TargetClient) -> None:
    with pytest.raises(DeadlineError, match="within the deadline"):
        _ = [chunk async for chunk in client.generate("a*", timeout_seconds=0.05)]


async def test_a_request_that_the_server_cancels_is_a_cancelled_error(
    client: TargetClient,
) -> None:
    with pytest.raises(CancelledError, match="drained"):
        _ = [chunk async for chunk in client.generate("a!")]


async def test_bad_input_is_refused_by_the_server_in_our_words(client: TargetClient) -> None:
    with pytest.raises(FieldError, match="temperature"):
        _ = [chunk async for chunk in client.generate("a", SamplingParams(temperature=3.0))]
    with pytest.raises(FieldError, match="is not UTF-8"):
        await client.tokenize("\ud800")


async def test_text_goes_to_ids_and_back(client: TargetClient) -> None:
    assert await client.detokenize(await client.tokenize("abc")) == "abc"


async def test_a_dead_server_is_not_ready_and_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with TargetClient(address) as client:
        with pytest.raises(NotReadyError, match=address):
            await client.model_info()
        with pytest.raises(NotReadyError, match=f"{address} is not ready after 0.1 s"):
            await client.wait_ready(0.1)


async def test_a_client_can_wait_for_a_server_that_is_not_there_yet() -> None:
    port = free_port()
    async with TargetClient(f"127.0.0.1:{port}") as client:
        waiting = asyncio.create_task(client.wait_ready(8.0))
        with pytest.raises(NotReadyError):
            await client._is_serving()
        server = RpcServer("127.0.0.1", port)
        server.set_serving(True)
        await server.start()
        await waiting
        await server.stop(0)


async def test_a_method_that_is_not_served_is_unsupported(client: TargetClient) -> None:
    with pytest.raises(UnsupportedError):
        await client.pool_status()


async def test_a_draft_answers_about_itself(endpoint: str) -> None:
    async with DraftClient(endpoint) as draft:
        await draft.wait_ready(5.0)
        assert await draft.get_status() == DraftStatus(
            model="d", sessions=0, capacity=4, links=0, draining=False, table_seconds=0.0
        )
        assert await draft.drain(7) == 7


async def test_closing_twice_is_fine(endpoint: str) -> None:
    client = TargetClient(endpoint)
    assert await client.tokenize("x") == (120,)
    await client.close()
    await client.close()
    assert client._opened is None


async def test_a_server_that_is_slow_to_accept_is_given_time() -> None:
    accept = asyncio.get_running_loop().sock_accept
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        async with DraftClient(f"127.0.0.1:{server.getsockname()[1]}") as client:
            asking = asyncio.create_task(client.get_status())
            connection, _ = await accept(server)
            with connection, pytest.raises(TimeoutError):
                async with asyncio.timeout(0.7):
                    await accept(server)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
