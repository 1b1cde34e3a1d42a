"""The thread that runs the model, and the watchdog that detects when it hangs."""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

from ssd.ports import Clock
from ssd.runtime.cpu_plan import set_slice
from ssd.runtime.threads import STEP_THREAD, post

STUCK_SECONDS = 60.0
"""A pass that takes longer is considered to hang: ``/livez`` fails, and a supervisor restarts the
process."""
Loaded = TypeVar("Loaded")


class Watchdog:
    """Detects a step thread that hangs. Any thread.

    The step thread sends a heartbeat at each step and before each pass of a target's model: a step
    with long prompts has many. It marks the time in which it waits for work.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy_since: float | None = None

    def heartbeat(self) -> None:
        """Record that a step or a pass begins."""
        self._busy_since = self._clock.now()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, the thread waits for work and no heartbeat is due."""
        self._busy_since = None
        yield
        self.heartbeat()

    @property
    def busy_seconds(self) -> float:
        """Time since the last heartbeat; 0 while the thread waits for work."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else self._clock.now() - busy_since

    @property
    def is_stuck(self) -> bool:
        """Whether the last heartbeat is more than ``STUCK_SECONDS`` ago."""
        return self.busy_seconds > STUCK_SECONDS


class StepThread(Generic[Loaded]):
    """A thread that loads a model and then serves with it. Asyncio loop, except ``_run``.

    ``loaded`` receives the first result of ``load``, or the error that prevented it. ``ended`` is
    set when the thread ends, with the error if one ended it while it served.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Loaded, Callable[[], None]]],
        on_end: Callable[[], None],
        cpus: Collection[int],
    ) -> None:
        """Prepare the thread.

        Args:
            load: returns the value of ``loaded``, and a function that serves until the inbox is
                closed.
            on_end: called last on the thread, also after an error.
            cpus: where it runs.
        """
        self._load = load
        self._on_end = on_end
        self._cpus = cpus
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # A daemon: a crashed process ends even if a forward pass never returns.
        self._thread = threading.Thread(target=self._run, name=STEP_THREAD, daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """End with an error that another part of the process has found. Asyncio loop.

        The thread may be in a pass that never returns.
        """
        self._end(error)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._load_and_serve()
        except Exception as raised:  # noqa: BLE001 - raised again where it is awaited
            error = raised
        except BaseException as raised:  # noqa: BLE001 - likewise
            # Raised in a task, a SystemExit would stop the loop and look like a normal exit.
            error = RuntimeError(f"{type(raised).__name__} on the step thread: {raised}")
            error = error.with_traceback(raised.__traceback__)
        finally:
            self._on_end()
            post(self._loop, self._end, error)

    def _load_and_serve(self) -> None:
        os.sched_setaffinity(0, self._cpus)
        set_slice(0.0)
        loaded, serve = self._load()
        # Modules and weights stay until the process ends: garbage collection can skip them.
        gc.collect()
        gc.freeze()
        post(self._loop, self._publish_loaded, loaded)
        serve()

    def _publish_loaded(self, loaded: Loaded) -> None:
        if not self.loaded.done():
            self.loaded.set_result(loaded)

    def _end(self, error: Exception | None) -> None:
        """Publish the end of the thread, once. Asyncio loop."""
        if self.ended.done():
            return
        if error is not None and not self.loaded.done():
            self.loaded.set_exception(error)
            error = None
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
