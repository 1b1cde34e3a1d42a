"""The links of a pool on a thread of their own, for a target without an asyncio loop.

*Decision*: the thread may run on every CPU on which the process may run. *Because*: a target that
pins its threads starts this one on its own core, where heartbeats wait until the model's pass ends,
and the link's lease runs out. *Not chosen*: a process of its own, whose tables need one more copy.
*Revisit when* links end because the interpreter is held for longer than a lease.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from queue import SimpleQueue

from ssd.errors import LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import PROPOSER_CRASHES_TOTAL

_log = get_logger(__name__)
STOP_SECONDS = 5.0
RESTART_SECONDS = 10.0
"""Pause after a bug of the coroutine."""


@contextlib.contextmanager
def doorbell(ring: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call a function on a thread of its own, whenever the function that this yields is called.

    *Decision*: one such thread for each link of ``LinkThread``. *Because*: a call from another
    thread into an asyncio loop writes to a socket, which releases the interpreter. The thread of
    the loop takes it, and vLLM's thread waited 340 us for it after each commit. A queue does not
    release it, so the loop runs while the model's pass does. *Not chosen*: for all links; one more
    switch of threads makes rounds of a small model on two CPUs about 1 % longer.
    """
    rings: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run() -> None:
        while rings.get() is not None:
            # The loop is closed: the link ends.
            with contextlib.suppress(LinkError):
                ring()

    threading.Thread(target=run, name="ssd-doorbell", daemon=True).start()
    try:
        yield partial(rings.put, ring)
    finally:
        rings.put(None)


class LinkThread:
    """Runs a coroutine, which dials until it is cancelled, from ``start`` to ``stop``.

    One thread starts and stops it. The coroutine runs on the given CPUs.
    """

    def __init__(
        self, serve: Callable[[], Coroutine[None, None, None]], cpus: Collection[int]
    ) -> None:
        self._serve = serve
        self._cpus = cpus
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssd-links", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to dial."""
        self._thread.start()

    def stop(self) -> None:
        """End all links. Idempotent."""
        self._stopping.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        # Links work on any CPU, only later.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 decoding continues without drafts
            _log.exception("links_crashed", error=repr(error))

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        while not self._stopping.is_set():
            try:
                await self._serve()
            except Exception as error:  # noqa: BLE001 meanwhile, decoding continues without drafts
                if self._stopping.is_set():
                    return
                _log.exception("links_crashed", error=repr(error))
                PROPOSER_CRASHES_TOTAL.inc()
            else:
                return
            await asyncio.sleep(RESTART_SECONDS)
