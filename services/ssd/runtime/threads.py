"""Calls between the asyncio loop and other threads, and whether the step thread runs."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

STEP_THREAD = "step"
"""Name of the thread that runs the model."""
Result = TypeVar("Result")


def is_step_thread_running() -> bool:
    """Whether this process has a step thread that has not ended. Any thread."""
    return any(thread.name == STEP_THREAD for thread in threading.enumerate())


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call something on the loop's thread; does nothing if the loop is closed. Any thread.

    A thread may finish its work after the loop, while the process stops.
    """
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def in_daemon_thread(call: Callable[[], Result]) -> Result:
    """Run a call in its own daemon thread, which the end of the process does not wait for.

    For calls that may never return. The loop's own executor has few threads and is joined.

    Raises:
        Exception: what the call raised.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: object) -> None:
        if not outcome.done():
            set_outcome(value)

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            post(loop, settle, outcome.set_exception, error)
        else:
            post(loop, settle, outcome.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await outcome
