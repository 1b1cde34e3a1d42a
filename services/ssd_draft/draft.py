"""The draft process as one object: how it starts, serves, drains and ends.

Life cycle: bind the ports, load on the step thread, serve; after SIGTERM, SIGINT or ``Drain`` tell
the targets, take no new sessions, let those that are open end, close. Ports come first, so that a
taken one is known before weights are loaded.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ssd.ports import Clock
from ssd.process import StepThread, Watchdog, post
from ssd.rpc.call_guard import ServerLimits
from ssd.rpc.http import ProbeServer
from ssd.rpc.pool_codec import DraftStatus
from ssd.rpc.server import RpcServer, join_address
from ssd.telemetry import DRAFT_CAPACITY, get_logger, metrics_of
from ssd_draft.inbox import Inbox, enough_bytes
from ssd_draft.links import LinkServer, LinkTerms
from ssd_draft.servicer import SpeculationServicer
from ssd_draft.settings import DraftSettings
from ssd_draft.step_thread import ModelLoader, StepSettings
from ssd_draft.worker import Worker

_log = get_logger("ssd_draft")
_INBOX_CAPACITY = 1024
"""Events of one link that wait for the step thread at most."""
_LAST_WORDS_SECONDS = 5.0
"""After the drain: time for the step thread to finish its table."""


class Draft:
    """Everything the process holds. Asyncio loop.

    ``run`` returns when it has left; ``leave`` begins the drain.
    """

    def __init__(
        self, settings: DraftSettings, step: StepSettings, terms: LinkTerms, clock: Clock
    ) -> None:
        self._settings = settings
        self._terms = terms
        self._engine = step.engine
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._drain_seconds = settings.drain_seconds
        self._worker: Worker | None = None
        num_bytes = enough_bytes(settings.max_sessions, step.engine.max_model_len, _INBOX_CAPACITY)
        self._inbox = Inbox(_INBOX_CAPACITY, num_bytes, clock)
        self._desk = LinkServer(terms, self._inbox, clock)
        self._watchdog = Watchdog(clock)
        life = ModelLoader(step, self._inbox, clock, self._on_count, self._watchdog)
        self._step = StepThread(life.load, self._inbox.close, step.cpus)

    def leave(self) -> None:
        """Begin to drain, for as long as the settings say; once is enough."""
        self._leaving.set()

    def drain(self, seconds: float) -> int:
        """Begin to drain, for so long at most; returns the sessions open now."""
        if not self._leaving.is_set():
            self._drain_seconds = seconds
            self._leaving.set()
        return self._worker.num_sessions if self._worker is not None else 0

    def status(self) -> DraftStatus:
        """What the draft is doing."""
        worker = self._worker
        return DraftStatus(
            model=self._settings.model.rstrip("/").rpartition("/")[2],
            sessions=worker.num_sessions if worker is not None else 0,
            max_sessions=self._settings.max_sessions,
            links=self._desk.num_links,
            draining=self._leaving.is_set(),
            table_seconds=worker.table_seconds if worker is not None else 0.0,
            dtype=self._engine.dtype,
            dtype_reason=self._engine.dtype_reason,
        )

    async def run(self) -> None:
        """Serve until ``leave`` is called.

        Raises:
            SetupError: the process cannot start.
            TimeoutError: the step thread did not end after the drain.
            Exception: what the step thread crashed with.
        """
        started_at = self._clock.now()
        DRAFT_CAPACITY.set(self._settings.max_sessions)
        async with self._listening() as server:
            self._step.start()
            await self._first_of(self._step.loaded, self._step.ended)
            if not self._step.loaded.done():
                return
            self._worker = self._step.loaded.result()
            server.set_serving(True)
            _log.info("ready", seconds=round(self._clock.now() - started_at, 3))
            await self._first_of(self._step.ended)
            if self._step.ended.done():
                self._step.ended.result()
            server.set_serving(False)
            await self._drain(self._worker)

    async def _first_of(self, *events: "asyncio.Future[Worker] | asyncio.Future[None]") -> None:
        """Wait until one of the events, or until told to leave."""
        leaving = asyncio.create_task(self._leaving.wait())
        await asyncio.wait((*events, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()

    async def _drain(self, worker: Worker) -> None:
        """Let open sessions end, within bounds, then end links and the step thread."""
        _log.info("draining", sessions=worker.num_sessions)
        worker.start_draining()
        self._desk.start_draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._is_empty.wait()
        self._desk.close()
        self._inbox.close()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                # Shielded: a time-out must not cancel the future that the thread will set.
                await asyncio.shield(self._step.ended)
        except TimeoutError as error:
            raise TimeoutError(
                f"the step thread did not end within {_LAST_WORDS_SECONDS:g} s after the drain"
            ) from error

    def _on_count(self, num_sessions: int) -> None:
        """The number of sessions changed. Step thread."""
        change = self._is_empty.clear if num_sessions else self._is_empty.set
        post(self._loop, change)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[RpcServer]:
        """Both ports are bound inside."""
        settings = self._settings
        metrics = metrics_of("draft")
        probes = ProbeServer(
            settings.host, settings.http_port, self._is_live, self._is_ready, metrics
        )
        server = RpcServer(
            settings.host,
            settings.port,
            reflection=settings.reflection,
            limits=ServerLimits(message_bytes=self._terms.max_message_bytes),
        )
        servicer = SpeculationServicer(
            self._desk, is_ready=self._is_loaded, status=self.status, drain=self.drain
        )
        servicer.add_to(server)
        probes.start()
        try:
            await server.start()
            _log.info(
                "listening",
                grpc=join_address(settings.host, server.port),
                http=join_address(settings.host, probes.port),
            )
            yield server
        finally:
            await server.stop()
            probes.close()

    def _is_live(self) -> bool:
        return not self._step.ended.done() and not self._watchdog.is_stuck

    def _is_loaded(self) -> bool:
        return self._worker is not None

    def _is_ready(self) -> tuple[bool, str]:
        if self._step.ended.done():
            return False, "the step thread has ended"
        if self._leaving.is_set():
            return False, "draining"
        return (True, "ready") if self._worker is not None else (False, "loading")
