"""Calls between the loop and other threads, also when one of them never returns."""

import asyncio
import threading

import pytest

from ssd.runtime.threads import in_daemon_thread, post


def test_a_call_posted_to_a_closed_loop_is_dropped_without_an_error() -> None:
    loop = asyncio.new_event_loop()
    calls: list[int] = []
    post(loop, calls.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    post(loop, calls.append, 2)
    assert calls == [1]


async def test_a_call_that_never_returns_can_be_cancelled() -> None:
    async with asyncio.timeout(60):
        assert await in_daemon_thread(lambda: threading.current_thread().daemon)
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(lambda: 1 // 0)
        hanging = asyncio.ensure_future(in_daemon_thread(threading.Event().wait))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
    assert hanging.cancelled()
