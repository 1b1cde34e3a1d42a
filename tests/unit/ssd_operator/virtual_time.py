"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout is not None else None)
        if not found and timeout is not None:
            self.now += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing else is to be done."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(test: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a test in virtual time, from 0 on."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(test)


def now() -> float:
    """Virtual seconds since the begin of the test."""
    return asyncio.get_running_loop().time()


async def pass_by(seconds: float) -> None:
    """Let virtual time pass."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Future()
