"""Targets behind a DNS name or a virtual address."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from tests.gateway import INFO, ScriptedTarget, endless
from tests.served import Service

from ssd.errors import (
    IncompleteTextError,
    NotReadyError,
    OverloadedError,
    RequestError,
    SSDError,
    TooLargeError,
    UnknownModelError,
    UnsupportedError,
)
from ssd.rpc.codec import GenerateCall
from ssd.types import SamplingParams
from ssd_gateway import targets
from ssd_gateway.problems import problem
from ssd_gateway.targets import TargetPool

CALL = GenerateCall(prompt="x", sampling=SamplingParams(), model="demo")


class Named:
    """Targets, of which a DNS name has some."""

    def __init__(self, pool: TargetPool, answers: list[set[str]]) -> None:
        self.pool = pool
        self.answers = answers

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.to_thread(int)

    async def answer(self, *addresses: str) -> None:
        """Change the answer, and wait until the pool has used it."""
        self.answers.clear()
        for _ in range(3):
            self.answers.append(set(addresses))
        await self.until(lambda: len(self.answers) == 1)

    async def run(self) -> None:
        async for _ in self.pool.generate(CALL, "id"):
            pass


@asynccontextmanager
async def named(monkeypatch: pytest.MonkeyPatch, *running: ScriptedTarget) -> AsyncIterator[Named]:
    """A pool whose name has the first of these targets."""
    monkeypatch.setattr(targets, "RESOLVE_SECONDS", 0.01)
    answers: list[set[str]] = []

    async def resolver(_host: str, _port: int) -> set[str]:
        answer = answers[0] if len(answers) == 1 else answers.pop()
        if "fails" in answer:
            raise OSError("no name server answers")
        return answer

    async with AsyncExitStack() as stack:
        for target in running:
            await stack.enter_async_context(target.serving())
        answers.append({running[0].address})
        pool = TargetPool(("targets.example:50051",), resolver=resolver)
        await stack.enter_async_context(pool.running())
        await asyncio.wait_for(pool.wait_ready(), 10)
        yield Named(pool, answers)


async def test_a_target_without_an_address_gets_no_request_and_finishes_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ScriptedTarget(endless), ScriptedTarget()
    async with named(monkeypatch, old, new) as it:
        async with aclosing(it.pool.generate(CALL, "id")) as running:
            assert (await anext(running)).text == "a"
            await it.answer(new.address)
            await it.until(lambda: it.pool._targets[new.address].is_ready)
            for _ in range(4):
                await it.run()
            assert (it.pool.num_targets, it.pool.num_ready, old.num_cancelled) == (2, 1, 0)
        await it.until(lambda: it.pool.num_targets == 1)
    assert (len(old.calls), len(new.calls)) == (1, 4)


async def test_a_name_that_has_had_no_address_can_have_any_model_after_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolver(host: str, _port: int) -> set[str]:
        return set() if host == "starts.example" else {target.address}

    async with (target := ScriptedTarget()).serving():
        pool = TargetPool(("starts.example:1", "serves.example:1"), resolver=resolver)
        async with pool.running():
            await asyncio.wait_for(pool.wait_ready(), 10)
            with pytest.raises(NotReadyError, match="1 of them has not answered since the start"):
                pool.model("other")
            monkeypatch.setattr(targets, "LOAD_SECONDS", 0.0)
            with pytest.raises(UnknownModelError):
                pool.model("other")


@pytest.mark.parametrize(
    "answer", [(), ("fails",), ("127.0.0.1:1",)], ids=["empty", "none", "not ready"]
)
async def test_targets_serve_while_their_name_has_no_address_that_does(
    answer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ScriptedTarget()
    async with named(monkeypatch, target) as it:
        await it.answer(*answer)
        await it.run()
        assert it.pool.num_ready == 1
    assert len(target.calls) == 1


async def test_a_draining_target_behind_a_virtual_address_is_left_and_finishes_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CHECK_SECONDS", "RECHECK_SECONDS"):
        monkeypatch.setattr(targets, name, 0.01)
    old, new = ScriptedTarget(endless), ScriptedTarget(info=replace(INFO, model="new"))
    async with old.serving(), new.serving():
        backends = [old.address]
        async with Service(backends) as service, (pool := TargetPool((service.address,))).running():
            await asyncio.wait_for(pool.wait_ready(), 10)
            async with aclosing(pool.generate(CALL, "id")) as running:
                assert (await anext(running)).text == "a"
                backends[0], old.reason = new.address, "draining"
                target = pool._targets[service.address]
                await Named(pool, []).until(lambda: target.serves("new"))
                assert old.num_cancelled == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OverloadedError("10.1.2.3:50051: envoy: 10.9.9.9 is full"), "refused the request"),
        (RequestError("10.1.2.3:50051: proxy 10.9.9.9 refused"), "refused the request"),
        (UnsupportedError("10.1.2.3:50051", "via ipv4:10.9.9.9"), "refused the request"),
        (TooLargeError("10.1.2.3:50051: the answer has 9 bytes"), "the answer has 9 bytes"),
        (NotReadyError("10.1.2.3:50051 cannot be reached: ipv4:10.9.9.9"), "cannot be reached"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_errors_of_a_proxy_do_not_have_an_address_either(error: SSDError, message: str) -> None:
    targets._hide_address(error, "10.1.2.3:50051")
    _, body = problem(error, "id")
    assert message in body["error"]["message"]
    assert "10." not in str(body)


async def test_errors_for_clients_do_not_have_the_address_of_a_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    target = ScriptedTarget(endless)
    async with AsyncExitStack() as stack:
        async with target.serving():
            pool = TargetPool((target.address,))
            await stack.enter_async_context(pool.running())
            await asyncio.wait_for(pool.wait_ready(), 10)
            running = await stack.enter_async_context(aclosing(pool.generate(CALL, "id")))
            await anext(running)
        with pytest.raises(IncompleteTextError) as lost:
            await anext(running)
        # As if the target had stopped after the newest check.
        pool._targets[target.address].reason = ""
        with pytest.raises(NotReadyError) as refused:
            await Named(pool, []).run()
    assert [str(each.value) for each in (lost, refused)] == [
        "the connection to the target was lost after 1 tokens, the text is incomplete",
        "the target cannot be reached",
    ]
    logged = [each.fields for each in caplog.records if each.getMessage() == "target_failed"]  # type: ignore[attr-defined]
    assert [each["target"] for each in logged] == [target.address] * 2
    assert f"the connection to {target.address} was lost after 1 tokens" in logged[0]["reason"]
    assert f"{target.address} cannot be reached: " in logged[1]["reason"]
