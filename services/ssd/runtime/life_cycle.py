"""The life cycle of target and draft: bind the ports, load, serve, drain, stop.

Ports are bound first, so that a port in use is reported before weights are loaded. Calls that
arrive while the model loads are answered UNAVAILABLE.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, Literal, Protocol

from ssd.engine_settings import EngineSettings
from ssd.observability.log import get_logger
from ssd.observability.metrics import metrics_of
from ssd.ports import Clock
from ssd.rpc.call_guard import OnFailure, ServerLimits, ignore_failure
from ssd.rpc.http import ProbeServer
from ssd.rpc.listen import join_address
from ssd.rpc.security import security_of
from ssd.rpc.server import RpcServer
from ssd.runtime.step_thread import Loaded, StepThread, Watchdog
from ssd.tasks import beside

STOP_SECONDS = 5.0
"""After the drain: time for the step thread to end and for the last messages to be sent."""
_log = get_logger("ssd")


class _Servicer(Protocol):
    """One gRPC service of the process."""

    def add_to(self, server: RpcServer) -> None:
        """Register the service."""


class LifeCycle(Generic[Loaded]):
    """Runs one process around its step thread. Asyncio loop.

    Call ``listening``, inside it ``load`` and then ``serve``. ``start_draining`` may be called at
    any time, ``is_live`` and ``readiness`` from any thread.
    """

    def __init__(
        self, step: StepThread[Loaded], watchdog: Watchdog, clock: Clock, drain_seconds: float
    ) -> None:
        self._step = step
        self._watchdog = watchdog
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._started_at = clock.now()
        self._draining = asyncio.Event()
        self._server: RpcServer | None = None
        self._is_serving = False

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun."""
        return self._draining.is_set()

    def start_draining(self, seconds: float | None = None) -> None:
        """End ``serve`` after the running work, or after some seconds. Only the first call counts.

        Args:
            seconds: limit of the drain; None takes that of the settings.
        """
        if seconds is not None and not self.is_draining:
            self._drain_seconds = seconds
        self._draining.set()

    @contextlib.asynccontextmanager
    async def listening(
        self,
        process: Literal["target", "draft"],
        settings: EngineSettings,
        servicers: Sequence[_Servicer],
        limits: ServerLimits,
        on_failure: OnFailure = ignore_failure,
    ) -> AsyncIterator[None]:
        """Inside, both ports are bound and probes and calls are answered.

        Raises:
            AddressError: a port is in use.
            SettingsError: a file of certificates or tokens is missing or invalid.
        """
        probes = ProbeServer(
            settings.host, settings.http_port, self.is_live, self.readiness, metrics_of(process)
        )
        server = RpcServer(
            settings.host,
            settings.port,
            reflection=settings.reflection,
            limits=limits,
            security=security_of(settings, process),
            on_failure=on_failure,
        )
        for servicer in servicers:
            servicer.add_to(server)
        try:
            probes.start()
            await server.start()
            _log.info(
                "listening",
                grpc=join_address(settings.host, server.port),
                http=join_address(settings.host, probes.port),
            )
            self._server = server
            yield
        finally:
            await server.stop()
            probes.close()

    async def load(self) -> Loaded | None:
        """Load on the step thread; None if a drain began first.

        Raises:
            Exception: what prevented it; a ``SetupError`` if the cause is the configuration.
        """
        self._step.start()
        await self._wait_for(self._step.loaded)
        return self._step.loaded.result() if self._step.loaded.done() else None

    async def serve(
        self, finish: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
    ) -> None:
        """Report readiness, wait until a drain begins, then drain and end the step thread.

        Args:
            finish: refuses new work and returns when no work is left. It is cancelled when the
                limit of the drain is reached.
            stop: ends the work that is left and closes the step thread's inbox.

        Raises:
            TimeoutError: the step thread did not end after the drain.
            Exception: what ended the step thread.
        """
        assert self._server is not None
        self._is_serving = True
        self._server.set_serving(True)
        _log.info("ready", seconds=round(self._clock.now() - self._started_at, 3))
        await self._wait_for(self._step.ended)
        if self._step.ended.done():
            self._step.ended.result()
        self._server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await finish()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await stop()
                # Shielded: a time-out must not cancel the future that the thread will set.
                await asyncio.shield(self._step.ended)
        except TimeoutError as error:
            raise TimeoutError(
                f"the step thread did not end within {STOP_SECONDS:g} s after the drain"
            ) from error

    def is_live(self) -> bool:
        """Whether the step thread runs and makes progress."""
        return not self._step.ended.done() and not self._watchdog.is_stuck

    def readiness(self) -> tuple[bool, str]:
        """Whether calls are accepted, and why or why not."""
        if self._step.ended.done():
            return False, "the step thread has ended"
        if self.is_draining:
            return False, "draining"
        return (True, "ready") if self._is_serving else (False, "loading")

    async def _wait_for(self, event: "asyncio.Future[Any]") -> None:
        """Wait for an event of the step thread, or for the drain."""
        async with beside(self._draining.wait()) as tasks:
            await asyncio.wait({event, *tasks}, return_when=asyncio.FIRST_COMPLETED)
