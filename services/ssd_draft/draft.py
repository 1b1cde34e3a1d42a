"""The draft process as one object: how it starts, serves, drains and ends.

``ssd.runtime.life_cycle`` describes the common part. A drain, which SIGTERM, SIGINT or ``Drain``
begins, sends ``Draining`` to the targets, refuses new sessions and lets the open ones end.
"""

import asyncio
from collections.abc import Collection
from functools import partial

from ssd.observability.log import get_logger
from ssd.observability.metrics import DRAFT_MAX_SESSIONS
from ssd.ports import Clock
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.pool_codec import DraftStatus
from ssd.runtime.life_cycle import LifeCycle
from ssd.runtime.step_thread import StepThread, Watchdog
from ssd.runtime.threads import post
from ssd_draft.inbox import Inbox, enough_bytes
from ssd_draft.link_server import LinkServer, max_message_bytes
from ssd_draft.servicer import SpeculationServicer
from ssd_draft.setup import DraftSetup
from ssd_draft.step_thread import load_worker
from ssd_draft.worker import Worker

_log = get_logger("ssd_draft")
_INBOX_CAPACITY = 1024
"""Largest number of events of one link that wait for the step thread."""


class Draft:
    """Everything the process holds. Asyncio loop.

    ``run`` returns after the drain, which ``drain`` begins.
    """

    def __init__(self, setup: DraftSetup, step_cpus: Collection[int], clock: Clock) -> None:
        settings = setup.settings
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._worker: Worker | None = None
        max_len = setup.model.engine.max_model_len
        num_bytes = enough_bytes(settings.max_sessions, max_len, _INBOX_CAPACITY)
        self._inbox = Inbox(_INBOX_CAPACITY, num_bytes)
        watchdog = Watchdog(clock)
        self._links = LinkServer(setup, self._inbox, clock, watchdog)
        load = partial(load_worker, setup, self._inbox, clock, self._on_count, watchdog)
        thread = StepThread(load, self._inbox.close, step_cpus)
        self._life_cycle = LifeCycle(thread, watchdog, clock, settings.drain_seconds)

    def drain(self, seconds: float | None = None) -> int:
        """Begin to drain; returns the number of sessions that are open now.

        The limit of the first call counts; None is the limit of the settings.
        """
        self._life_cycle.start_draining(seconds)
        return self._num_sessions

    def status(self) -> DraftStatus:
        """Return the state of the draft."""
        settings, engine = self._setup.settings, self._setup.model.engine
        return DraftStatus(
            model=settings.model.rstrip("/").rpartition("/")[2],
            sessions=self._num_sessions,
            max_sessions=settings.max_sessions,
            links=self._links.num_links,
            draining=self._life_cycle.is_draining,
            table_seconds=self._worker.table_seconds if self._worker is not None else 0.0,
            dtype=engine.precision,
            dtype_reason=engine.dtype_reason,
        )

    async def run(self) -> None:
        """Serve until ``drain`` is called.

        Raises:
            SetupError: the process cannot start.
            TimeoutError: the step thread did not end after the drain.
            Exception: what the step thread crashed with.
        """
        DRAFT_MAX_SESSIONS.set(self._setup.settings.max_sessions)
        servicer = SpeculationServicer(
            self._links, is_ready=self._is_loaded, status=self.status, drain=self.drain
        )
        limits = ServerLimits(message_bytes=max_message_bytes(self._setup))
        settings = self._setup.settings
        async with self._life_cycle.listening("draft", settings, (servicer,), limits):
            self._worker = await self._life_cycle.load()
            if self._worker is not None:
                await self._life_cycle.serve(self._finish_sessions, self._close)

    @property
    def _num_sessions(self) -> int:
        return self._worker.num_sessions if self._worker is not None else 0

    async def _finish_sessions(self) -> None:
        assert self._worker is not None
        _log.info("draining", sessions=self._num_sessions)
        self._worker.start_draining()
        self._links.start_draining()
        await self._is_empty.wait()

    async def _close(self) -> None:
        self._links.close()
        self._inbox.close()

    def _on_count(self, num_sessions: int) -> None:
        """Publish whether sessions are open. Step thread."""
        change = self._is_empty.clear if num_sessions else self._is_empty.set
        post(self._loop, change)

    def _is_loaded(self) -> bool:
        return self._worker is not None
