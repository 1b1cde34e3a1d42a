"""``python -m ssd_operator``: read settings, reach the cluster, watch it until a signal."""

from ssd.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Here, because what is imported below takes seconds.
    end_at_sigterm()

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import kopf
from prometheus_client.aiohttp import make_aiohttp_handler

from ssd.errors import SSDError
from ssd.settings import load
from ssd.telemetry import configure_logging, get_logger
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.runtime import metrics
from ssd_operator.runtime.api_server import ApiServer, connect
from ssd_operator.runtime.engine_client import EngineClients
from ssd_operator.runtime.handlers import make_registry, watch_settings
from ssd_operator.runtime.ports import probe
from ssd_operator.runtime.ports import serve as serve_port
from ssd_operator.runtime.reconcile import Reconciler
from ssd_operator.runtime.relist import Readiness, Relist
from ssd_operator.runtime.schema_check import wait_for_schema, watched_kinds
from ssd_operator.runtime.work_queue import WorkQueue
from ssd_operator.settings import OperatorSettings

LONGEST_WAIT_SECONDS = 300.0
"""A resource that waits for longer shows that the operator hangs; a restart may help."""
PREFIX = "SSD_OPERATOR"
_QUIET = ("kopf", "kubernetes_asyncio", "aiohttp.access")
"""Loggers that write a line for each event or call."""

_log = get_logger("ssd_operator")


class Operator:
    """Watch, queue, passes and engine tasks, which start once kopf hands over its indices."""

    def __init__(self, settings: OperatorSettings, cluster: ApiServer) -> None:
        self._settings = settings
        self._cluster = cluster
        self._engines = EngineClients(_now, self._wake)
        self._readiness = Readiness()
        self._queue: WorkQueue | None = None
        self._relist: Relist | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Watch until a signal, or until kopf finds that it cannot continue.

        Raises:
            SSDError: no answer, or a port is in use.
        """
        settings, namespaces = self._settings, self._settings.scope
        probes = {
            "/healthz": probe(self._problem),
            "/readyz": probe(lambda: self._readiness.problem),
        }
        exposition = {"/metrics": make_aiohttp_handler(metrics.REGISTRY)}
        async with (
            serve_port(settings.metrics_port, "metrics", exposition),
            serve_port(settings.probe_port, "probe", probes),
        ):
            await wait_for_schema(self._cluster.served_schema, self._readiness.set_problem)
            kinds = await watched_kinds(self._cluster, namespaces, self._readiness.set_problem)
            try:
                await kopf.operator(
                    registry=make_registry(kinds, self._start, self._wake, self._request_relist),
                    settings=watch_settings(),
                    clusterwide=not namespaces,
                    namespaces=namespaces,
                )
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._engines.close()

    def _start(self, cache: ObjectCache) -> None:
        """The indices exist: passes may begin as soon as events come."""
        settings, namespaces = self._settings, self._settings.scope
        reconciler = Reconciler(self._cluster, cache, self._engines, settings, _now)

        async def work(key: Key) -> float | None:
            is_good = False
            try:
                again_after = await reconciler.reconcile(key)
                is_good = True
            finally:
                self._readiness.finish(key, is_good=is_good)
            return again_after

        self._queue = WorkQueue(work, num_workers=settings.num_workers, now=time.monotonic)
        self._relist = Relist(self._cluster, cache, self._wake, self._readiness, namespaces)
        self._tasks = [asyncio.ensure_future(each.run()) for each in (self._queue, self._relist)]
        _log.info("started", namespaces=namespaces or "all")

    def _wake(self, key: Key, is_changed: bool = False) -> None:  # noqa: FBT001, FBT002
        if self._queue is not None:
            self._queue.wake(key, is_changed=is_changed)

    def _request_relist(self) -> None:
        if self._relist is not None:
            self._relist.request()

    def _problem(self) -> str:
        """Why the kubelet should restart the process; empty if nothing is wrong."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                return f"a task has ended with {error!r}"
        waits = 0.0 if self._queue is None else self._queue.longest_wait_seconds()
        return f"a resource waits for {waits:.0f} s" if waits > LONGEST_WAIT_SECONDS else ""


async def serve(settings: OperatorSettings) -> None:
    """Construct everything and run it until a signal.

    Raises:
        SSDError: no cluster, no answer, or a port is in use.
    """
    this = asyncio.current_task()
    assert this is not None
    for each in (signal.SIGTERM, signal.SIGINT):
        # Until kopf handles the signals, they end the wait for a CRD, also of process 1.
        asyncio.get_running_loop().add_signal_handler(each, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with connect() as cluster:
            await Operator(settings, cluster).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; returns its exit code."""
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
