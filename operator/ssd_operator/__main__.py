"""``python -m ssd_operator``: read settings, reach the cluster, watch it until told to stop."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import kopf
from prometheus_client import start_http_server

from ssd.errors import SSDError
from ssd.settings import load
from ssd.telemetry import configure_logging, get_logger
from ssd_operator.api_server import check_served, connect
from ssd_operator.cluster import Cluster, Key
from ssd_operator.handlers import make_registry, watch_settings
from ssd_operator.pool import EnginePool
from ssd_operator.reconcile import Reconciler
from ssd_operator.roll_call import RollCall
from ssd_operator.settings import OperatorSettings
from ssd_operator.view import View
from ssd_operator.work_queue import WorkQueue

LONGEST_WAIT_SECONDS = 300.0
"""A resource that waits for longer shows a stuck operator, which a restart may mend."""
PREFIX = "SSD_OPERATOR"
_QUIET = ("kopf", "kubernetes_asyncio", "aiohttp.access")
"""Loggers that write a line for each event or call."""

_log = get_logger("ssd_operator")


class Operator:
    """Watch, queue, passes and engine tasks, which start once kopf hands over its indices."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._engines = EnginePool(_now)
        self._queue: WorkQueue[Key] | None = None
        self._roll_call: RollCall | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Watch until a signal, or until kopf finds that it cannot go on."""
        namespaces = self._settings.watch_namespaces
        try:
            await kopf.operator(
                registry=make_registry(
                    self._start, self._wake, self._changed, self._listed, self._problem
                ),
                settings=watch_settings(),
                clusterwide=not namespaces,
                namespaces=namespaces,
                liveness_endpoint=f"http://0.0.0.0:{self._settings.probe_port}/healthz",
            )
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._engines.close()

    def _start(self, view: View) -> None:
        """The indices exist: passes may begin as soon as events come."""
        reconciler = Reconciler(self._cluster, view, self._engines, self._settings.config, _now)
        num_workers = self._settings.num_workers
        self._queue = WorkQueue(reconciler.reconcile, num_workers=num_workers, now=time.monotonic)
        self._engines.on_news(self._wake)
        namespaces = self._settings.watch_namespaces
        self._roll_call = RollCall(self._cluster, view, self._wake, namespaces)
        runs = (self._queue.run(), self._roll_call.run())
        self._tasks = [asyncio.ensure_future(run) for run in runs]
        _log.info("started", namespaces=namespaces or "all")

    def _wake(self, key: Key) -> None:
        if self._queue is not None:
            self._queue.wake(key)

    def _changed(self, key: Key) -> None:
        if self._queue is not None:
            self._queue.wake(key, is_changed=True)

    def _listed(self) -> None:
        if self._roll_call is not None:
            self._roll_call.listed()

    def _problem(self) -> str:
        """Why the kubelet should restart us; empty if nothing is wrong."""
        if self._queue is None:
            return ""
        if any(task.done() for task in self._tasks):
            return "the queue or the roll call has ended"
        waits = self._queue.longest_wait_seconds()
        return f"a resource waits for {waits:.0f} s" if waits > LONGEST_WAIT_SECONDS else ""


async def serve(settings: OperatorSettings) -> None:
    """Construct everything and run it.

    Raises:
        SSDError: no cluster, no CRD, or no answer.
    """
    async with connect() as cluster:
        await check_served(cluster)
        with contextlib.ExitStack() as stack:
            server, thread = start_http_server(settings.metrics_port)
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            await Operator(settings, cluster).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; the result is its exit code."""
    try:
        settings = load(
            OperatorSettings, sys.argv[1:] if argv is None else argv, prefix=PREFIX
        ).settings
        configure_logging(settings.log_format, "operator", settings.log_level.upper())
        for name in _QUIET:
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
        asyncio.run(serve(settings))
    except SSDError as error:
        _log.error("failed", error=type(error).__name__, message=str(error))
        return 1
    _log.info("stopped")
    return 0


def _now() -> float:
    """Seconds since the epoch, the clock that objects of a cluster carry."""
    return datetime.now(UTC).timestamp()


if __name__ == "__main__":
    sys.exit(main())
