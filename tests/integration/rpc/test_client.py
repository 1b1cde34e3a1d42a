import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tests import served
from tests.ports import free_port

from ssd.errors import (
    CancelledError,
    DeadlineError,
    FieldError,
    IncompleteTextError,
    NotReadyError,
    UnknownHostError,
    UnsupportedError,
)
from ssd.rpc import codec
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.codec import GenerateCall
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
    """Returns the prompt, one character in each chunk; at ``*`` it waits for ever."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.calls: list[GenerateCall] = []
        self.left = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.num_refusals = num_refusals

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        call = codec.generate_call(request, 1000)
        self.calls.append(call)
        if len(self.calls) <= self.num_refusals:
            raise NotReadyError("draining")
        try:
            for character in str(call.prompt):
                if character == "*":
                    await asyncio.Event().wait()
                if character == "!":
                    raise CancelledError("the target drained")
                if character == "#" or (character == "~" and len(self.calls) == 1):
                    token_ids, text = ((35,), "#") if character == "#" else ((), "")
                    await self._write(context, token_ids, text, FinishReason.CANCELLED)
                    return
                if character == "?":
                    raise NotReadyError("the target drains")
                if character == "-":
                    await self.may_go_on.wait()
                await self._write(context, (ord(character),), character)
            await self._write(context, (), "", FinishReason.STOP)
        finally:
            self.left.set()

    async def _write(
        self, context: Any, token_ids: Any, text: str, reason: FinishReason | None = None
    ) -> None:
        chunk = GenerationChunk(token_ids=token_ids, text=text, finish_reason=reason)
        await context.write(codec.generate_response(chunk))

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generate_pb2.TokenizeResponse(token_ids=request.text.encode())

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return generate_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())


class Draft(speculation_pb2_grpc.SpeculationServiceServicer):
    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speculation_pb2.GetStatusResponse(model="d", max_sessions=4, dtype="float32")

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speculation_pb2.DrainDraftResponse(sessions=request.deadline_ms)


@pytest.fixture
async def target() -> Target:
    return Target()


@asynccontextmanager
async def serving(target: Target, port: int = 0) -> AsyncIterator[str]:
    """Address of a server that has only the services of this test."""
    async with served.serving(target, port=port) as server:
        yield f"127.0.0.1:{server.port}"


async def text_of(client: TargetClient, prompt: str, timeout_seconds: float | None = None) -> str:
    chunks = client.generate(prompt, timeout_seconds=timeout_seconds)
    return "".join([chunk.text async for chunk in chunks])


@pytest.fixture
async def endpoint(target: Target) -> AsyncIterator[str]:
    async with served.serving(target, Draft(), admin_pb2_grpc.AdminServiceServicer()) as server:
        server.set_serving(True)
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[TargetClient]:
    async with TargetClient(endpoint) as running:
        yield running


async def test_chunks_arrive_in_order(client: TargetClient) -> None:
    chunks = [chunk async for chunk in client.generate("abc")]
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", ""]
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_the_server_receives_what_is_set_and_uses_its_defaults_for_the_rest(
    client: TargetClient, target: Target
) -> None:
    sampling = SamplingParams(seed=0, temperature=0.0)
    call = GenerateCall(prompt="x", model="m", sampling=SamplingParams(max_tokens=3))
    for asked in (("abc",), ([1, 2], sampling, Mode.AUTOREGRESSIVE), (call,)):
        _ = [chunk async for chunk in client.generate(*asked)]
    explicit = GenerateCall(prompt=(1, 2), sampling=sampling, mode=Mode.AUTOREGRESSIVE)
    assert target.calls == [GenerateCall(prompt="abc"), explicit, call]


async def test_closing_the_iterator_ends_the_call_on_the_server(
    client: TargetClient, target: Target
) -> None:
    chunks = client.generate("a*")
    assert (await anext(chunks)).text == "a"
    await chunks.aclose()
    await target.left.wait()


async def test_a_passed_deadline_is_a_deadline_error(client: TargetClient) -> None:
    with pytest.raises(DeadlineError, match="within the deadline"):
        await text_of(client, "a*", 0.05)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [("a!", CancelledError, "drained"), ("a?", IncompleteTextError, "the target drains")],
)
async def test_a_request_is_not_sent_again_after_its_first_token(
    prompt: str, error: type[Exception], message: str, target: Target, client: TargetClient
) -> None:
    with pytest.raises(error, match=message):
        await text_of(client, prompt)
    assert len(target.calls) == 1


async def test_bad_input_raises_the_error_of_the_server(client: TargetClient) -> None:
    with pytest.raises(FieldError, match="temperature"):
        _ = [chunk async for chunk in client.generate("a", SamplingParams(temperature=3.0))]
    with pytest.raises(FieldError, match="is not UTF-8"):
        await client.tokenize("\ud800")


async def test_tokenize_and_detokenize_return_the_same_text(client: TargetClient) -> None:
    assert await client.detokenize(await client.tokenize("abc")) == "abc"


async def test_an_unreachable_server_is_named_in_a_not_ready_error() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with TargetClient(address) as client:
        with pytest.raises(NotReadyError, match=address):
            await client.model_info()
        with pytest.raises(NotReadyError, match=f"{address} is not ready after 0.1 s"):
            await client.wait_ready(0.1)


async def test_wait_ready_returns_when_the_server_starts() -> None:
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


async def test_a_request_is_sent_again_before_its_first_token() -> None:
    target = Target(num_refusals=2)
    reasons: list[NotReadyError] = []
    async with (
        serving(target) as endpoint,
        TargetClient(endpoint, on_wait=reasons.append) as client,
    ):
        assert await text_of(client, "abc") == "abc"
    assert [call.prompt for call in target.calls] == ["abc"] * 3
    assert [str(reason) for reason in reasons] == ["draining"], "called once"


async def test_a_request_waits_until_the_target_starts() -> None:
    port, waits = free_port(), asyncio.Event()
    client = TargetClient(f"127.0.0.1:{port}", on_wait=lambda _error: waits.set())
    async with client:
        answer = asyncio.create_task(text_of(client, "abc"))
        await waits.wait()
        async with serving(Target(), port):
            assert await answer == "abc"


async def test_a_request_that_the_stopping_target_cancels_while_it_waits_is_sent_again(
    target: Target, client: TargetClient
) -> None:
    assert await text_of(client, "~a") == "~a"
    assert len(target.calls) == 2


async def test_a_text_that_the_stopping_target_cancels_is_an_error_after_its_tokens(
    target: Target, client: TargetClient
) -> None:
    chunks = client.generate("a#")
    received = [await anext(chunks), await anext(chunks)]
    assert [(each.text, each.finish_reason) for each in received] == [("a", None), ("#", None)]
    with pytest.raises(IncompleteTextError, match="cancelled the request, because"):
        await anext(chunks)
    assert len(target.calls) == 1


async def test_a_connection_lost_during_a_response_reports_the_received_tokens(
    endpoint: str,
) -> None:
    async with served.Service([endpoint]) as service, TargetClient(service.address) as client:
        chunks = client.generate("abc*")
        assert [(await anext(chunks)).text for _ in "abc"] == ["a", "b", "c"]
        service.cut()
        lost = (
            f"the connection to {service.address} was lost after 3 tokens, the text is incomplete: "
        )
        with pytest.raises(IncompleteTextError, match=lost):
            await anext(chunks)


async def test_a_client_without_a_wait_sends_a_request_once() -> None:
    target = Target(num_refusals=1)
    async with serving(target) as endpoint, TargetClient(endpoint, ready_seconds=0) as client:
        with pytest.raises(NotReadyError, match="draining"):
            await text_of(client, "abc")
    assert len(target.calls) == 1


class Unresolved(Target):
    """Ends one call as gRPC does if the name of the server has no address."""

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        if len(self.calls) != self.num_refusals:
            await super().Generate(request, context)
            return
        self.calls.append(codec.generate_call(request, 1000))
        text = "errors resolving x:1: [address lookup failed for x:1: Domain name not found]"
        await context.abort(grpc.StatusCode.UNAVAILABLE, text)


async def test_a_host_without_an_address_is_not_waited_for() -> None:
    target = Unresolved()
    async with serving(target) as endpoint, TargetClient(endpoint) as client:
        with pytest.raises(UnknownHostError, match=f"{endpoint} cannot be reached: Domain name"):
            await text_of(client, "abc")
    assert len(target.calls) == 1


async def test_a_host_that_has_lost_its_address_is_waited_for() -> None:
    target = Unresolved(num_refusals=1)
    async with serving(target) as endpoint, TargetClient(endpoint) as client:
        assert await text_of(client, "abc") == "abc"
    assert len(target.calls) == 3


@pytest.mark.parametrize(("ready_seconds", "timeout_seconds"), [(0.5, None), (30.0, 0.5)])
async def test_a_wait_for_a_target_ends_with_the_cause(
    ready_seconds: float, timeout_seconds: float | None
) -> None:
    target = Target(num_refusals=10_000)
    async with (
        serving(target) as endpoint,
        TargetClient(endpoint, ready_seconds=ready_seconds) as client,
    ):
        with pytest.raises(NotReadyError, match="draining"):
            await text_of(client, "abc", timeout_seconds)
    assert 2 <= len(target.calls) <= 4


async def test_requests_move_from_a_draining_target_and_its_streams_finish() -> None:
    old, new = Target(), Target()
    async with serving(old) as first, serving(new) as second:
        backends = [first]
        async with served.Service(backends) as service, TargetClient(service.address) as client:
            stream = client.generate("a-b")
            assert (await anext(stream)).text == "a"
            old.num_refusals, backends[0] = 10_000, second
            assert await text_of(client, "abc") == "abc"
            assert await text_of(client, "def") == "def"
            assert len(old.calls) == 2, "the connection was left after one refusal"
            old.may_go_on.set()
            assert [chunk.text async for chunk in stream] == ["-", "b", ""]


async def test_a_client_without_a_wait_leaves_a_draining_target() -> None:
    old, new = Target(num_refusals=10_000), Target()
    async with serving(old) as first, serving(new) as second:
        backends = [first]
        async with (
            served.Service(backends) as service,
            TargetClient(service.address, ready_seconds=0) as client,
        ):
            with pytest.raises(NotReadyError, match="draining"):
                await text_of(client, "abc")
            backends[0] = second
            assert await text_of(client, "abc") == "abc"
    assert len(old.calls) == 1


async def test_requests_rotate_over_the_reachable_addresses() -> None:
    targets = Target(), Target()
    async with serving(targets[0]) as one, serving(targets[1]) as two:
        endpoint = f"ipv4:{one},{two},127.0.0.1:{free_port()}"
        async with TargetClient(endpoint, ready_seconds=0) as client:
            for _ in range(6):
                assert await text_of(client, "abc") == "abc"
            # The first requests can go to the address that was connected first.
            assert min(len(target.calls) for target in targets) >= 2


async def test_closing_a_client_ends_its_calls_with_a_cancelled_error(endpoint: str) -> None:
    client = TargetClient(endpoint)
    chunks = client.generate("a*")
    await anext(chunks)
    rest = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(CancelledError, match=r"the client of .* was closed during the call"):
        await rest


async def test_closing_a_client_ends_a_waiting_request() -> None:
    waits = asyncio.Event()
    client = TargetClient(f"127.0.0.1:{free_port()}", on_wait=lambda _error: waits.set())
    answer = asyncio.create_task(text_of(client, "abc"))
    await waits.wait()
    await client.close()
    with pytest.raises(CancelledError, match="is closed"):
        await answer
    with pytest.raises(CancelledError, match="is closed"):
        await client.model_info()


async def test_open_generators_can_be_closed_in_any_order(client: TargetClient) -> None:
    opened: list[Any] = []
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=opened.append)
    try:
        chunks = client.generate("a*")
        await anext(chunks)
    finally:
        sys.set_asyncgen_hooks(*hooks)
    # An ending loop closes all of them, sometimes the inner ones first.
    for each in reversed(opened):
        await each.aclose()
    assert opened[0] is chunks


async def test_cancelling_the_task_of_a_caller_raises_asyncio_cancelled_error(
    client: TargetClient, target: Target
) -> None:
    chunks = client.generate("a*")
    await anext(chunks)
    rest = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    rest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rest
    await target.left.wait()


async def test_the_status_of_a_call_that_ends_with_its_task_is_a_cancellation(
    client: TargetClient,
) -> None:
    async def cancelled_during_a_call() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await client.pool_status()  # fails with a status: the server does not have it

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(cancelled_during_a_call())


async def test_an_unknown_method_is_an_unsupported_error(client: TargetClient) -> None:
    with pytest.raises(UnsupportedError):
        await client.pool_status()


async def test_a_draft_returns_its_status(endpoint: str) -> None:
    async with DraftClient(endpoint) as draft:
        await draft.wait_ready(5.0)
        status = await draft.get_status()
        assert (status.model, status.sessions, status.max_sessions) == ("d", 0, 4)
        assert (status.draining, status.dtype) == (False, "float32")
        assert await draft.drain(7) == 7


async def test_closing_twice_is_fine(endpoint: str) -> None:
    client = TargetClient(endpoint)
    assert await client.tokenize("x") == (120,)
    await client.close()
    await client.close()
    assert client._opened is None


async def test_a_slow_connect_does_not_fail() -> None:
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
