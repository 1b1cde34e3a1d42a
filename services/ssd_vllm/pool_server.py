"""The loop of the links: it dials drafts and serves ``AdminService`` on ``admin_port``.

The port is the same for ``ssd pool`` and for the operator as that of ``ssd-target``. vLLM owns the
requests, so there is no ``Drain``: SIGTERM to vLLM drains them within its ``--shutdown-timeout``,
which is 0 by default. The number of waiting requests is known to vLLM's scheduler alone; it is 0
here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import cast

from ssd.errors import FieldError, SetupError
from ssd.observability.log import get_logger
from ssd.observability.metrics import DESIRED_DRAFT_REPLICAS, OPEN_SESSIONS
from ssd.pool.dialer import LinkDialer
from ssd.pool.pool import DraftPool
from ssd.pool.status import pool_status
from ssd.rpc.admin_servicer import AdminServicer
from ssd.rpc.codec import SpeculationChange
from ssd.rpc.listen import join_address
from ssd.rpc.pool_codec import PoolStatus
from ssd.rpc.server import RpcServer
from ssd.types import FanOutName, LinkSettings, Mode
from ssd_vllm.settings import PluginSettings
from ssd_vllm.step_control import StepControl

_log = get_logger(__name__)
PUBLISH_SECONDS = 1.0


class PoolServer:
    """Serves until it is cancelled. Asyncio loop."""

    def __init__(
        self,
        settings: PluginSettings,
        port: int,
        pool: DraftPool,
        control: StepControl,
        identity: PoolStatus,
        make_dialer: Callable[[], LinkDialer],
    ) -> None:
        """Construct.

        Args:
            settings: settings of the plugin.
            port: 0 serves no calls.
            pool: pool of the steps, which run on the worker's thread.
            control: chooses whether they speculate.
            identity: has the weights and the data type of the target.
            make_dialer: makes the dialer of the links.
        """
        self._settings = settings
        self._port = port
        self._pool = pool
        self._control = control
        self._identity = identity
        self._make_dialer = make_dialer
        self._dialer: LinkDialer | None = None

    async def run(self) -> None:
        """Dial drafts, answer calls and publish gauges."""
        self._dialer = self._make_dialer()
        # The policy may have been changed before a bug ended the links.
        self._dialer.configure(LinkSettings(fan_out_policy=self._settings.fan_out))
        async with self._listening(), asyncio.TaskGroup() as group:
            group.create_task(self._dialer.run())
            group.create_task(self._publish())

    def status(self) -> PoolStatus:
        """Return what ``GetPoolStatus`` answers."""
        reports = [] if self._dialer is None else self._dialer.reports()
        log, now = self._control.round_log, self._control.clock.now()
        return pool_status(reports, self._pool, log, now, self._identity)

    def set_speculation(self, change: SpeculationChange) -> None:
        """Change how steps speculate, from the next one on; None keeps a value.

        Raises:
            FieldError: vLLM has no such mode; nothing is changed.
        """
        if change.mode is Mode.SYNCHRONOUS:
            raise FieldError("mode", "SYNCHRONOUS does not exist in vLLM; use another mode")
        fan_out = cast("FanOutName", change.fan_out_policy or self._settings.fan_out)
        self._settings = replace(self._settings.changed(change), fan_out=fan_out)
        self._pool.configure(self._settings)
        if change.mode is not None:
            self._control.set_mode(change.mode)
        if change.fan_out_policy is not None and self._dialer is not None:
            self._dialer.configure(LinkSettings(fan_out_policy=change.fan_out_policy))
        _log.info(
            "speculation_set",
            **{name: str(value) for name, value in asdict(change).items() if value},
        )

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """Inside, calls are answered; without the port, vLLM serves and links work."""
        if not self._port:
            yield
            return
        admin = AdminServicer(self.status, set_speculation=self.set_speculation, drain=None)
        host = self._settings.admin_host
        try:
            server = RpcServer(host, self._port, security=self._settings.security())
            admin.add_to(server)
            await server.start()
        except SetupError as error:
            _log.error("admin_port_failed", error=str(error))
            yield
            return
        server.set_serving(True)
        _log.info("listening", admin=join_address(host, server.port))
        try:
            yield
        finally:
            admin.close()
            await server.stop()

    async def _publish(self) -> None:
        while True:
            OPEN_SESSIONS.set(self._pool.num_sessions)
            DESIRED_DRAFT_REPLICAS.set(self.status().desired_draft_replicas)
            await asyncio.sleep(PUBLISH_SECONDS)
