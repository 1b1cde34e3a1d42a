"""A gateway in front of one target, which the tests of a module share. A test sets its answers."""

from collections.abc import AsyncIterator

import pytest_asyncio
from openai import AsyncOpenAI
from tests.gateway import Front, ScriptedTarget, fronting

Running = tuple[ScriptedTarget, Front, AsyncOpenAI]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    target = ScriptedTarget()
    async with fronting(target) as front, front.client() as client:
        yield target, front, client


@pytest_asyncio.fixture(loop_scope="module")
async def target(running: Running) -> ScriptedTarget:
    """The target, without calls and with the answers of a new one."""
    target, _, _ = running
    target.reset()
    return target


@pytest_asyncio.fixture(loop_scope="module")
async def front(running: Running, target: ScriptedTarget) -> Front:
    return running[1]


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Running, target: ScriptedTarget) -> AsyncOpenAI:
    """The official client of the gateway."""
    return running[2]
