"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import contextlib
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

ParametersP = ParamSpec("ParametersP")


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


def in_virtual_time(
    test: Callable[ParametersP, Coroutine[Any, Any, None]],
) -> Callable[ParametersP, None]:
    """A test that runs in virtual time, from 0 on."""

    @functools.wraps(test)
    def timed(*args: ParametersP.args, **kwargs: ParametersP.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return timed


def now() -> float:
    """Virtual seconds since the begin of the test."""
    return asyncio.get_running_loop().time()


async def pass_by(seconds: float) -> None:
    """Let virtual time pass."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Future()
