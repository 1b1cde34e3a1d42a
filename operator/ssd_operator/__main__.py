"""``python -m ssd_operator``: read settings, reach the cluster, watch it until a signal."""

from ssd.runtime.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Signals are handled before the imports below, which take seconds.
    end_at_sigterm()

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ssd.errors import SSDError
from ssd.observability.log import configure_logging, get_logger
from ssd.rpc.http import ProbeServer
from ssd.settings import load, to_json
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.runtime import metrics
from ssd_operator.runtime.api_server import ApiServer, connect
from ssd_operator.runtime.engine_client import EngineClients, EngineCredentials
from ssd_operator.runtime.reconcile import Reconciler
from ssd_operator.runtime.schema_check import wait_for_schema
from ssd_operator.runtime.watches import Lists, watch
from ssd_operator.runtime.work_queue import PartialError, WorkQueue
from ssd_operator.settings import OperatorSettings

LONGEST_WAIT_SECONDS = 300.0
"""If a resource waits for longer, or every list fails for longer, a restart may help: the operator
may hang, or the certificates of the cluster may be new."""
PREFIX = "SSD_OPERATOR"
_QUIET = ("kopf", "kubernetes_asyncio")
"""Loggers that write a line for each event or call."""

_log = get_logger("ssd_operator")


class Operator:
    """Watches, queue, passes and engine tasks. Asyncio loop; probes are answered by threads."""

    def __init__(self, settings: OperatorSettings, cluster: ApiServer) -> None:
        self._settings = settings
        self._cluster = cluster
        self._queue = WorkQueue(self._reconcile, settings.num_workers)
        credentials = EngineCredentials(settings.credentials)
        self._cache = ObjectCache(self._queue.wake)
        self._engines = EngineClients(_now, self._cache.wake, credentials)
        self._reconciler = Reconciler(cluster, self._cache, self._engines, settings, _now)
        self._lists = Lists(cluster, self._cache, settings.scope)
        self._schema_problem = ""
        self._unseen: set[Key] = set()
        """Resources without a first pass."""
        self._has_good_pass = False
        """Whether a pass has written all that it may."""

    async def run(self) -> None:
        """Watch until a signal, or until kopf finds that it cannot continue.

        Raises:
            SSDError: a port is in use.
        """
        port = self._settings.http_port
        probes = ProbeServer("::", port, self._is_live, self._is_ready, metrics.REGISTRY)
        probes.start()
        try:
            await wait_for_schema(self._cluster.served_schema, self._report_schema)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work) for work in (self._lists.run(), self._start())
                ]
                await watch(self._cache, self._settings.scope)
                for task in background:
                    task.cancel()
        finally:
            await self._queue.close()
            await self._engines.close()
            probes.close()

    async def _start(self) -> None:
        await self._lists.is_listed.wait()
        self._unseen = self._cache.resources
        self._has_good_pass = not self._unseen
        self._queue.start()
        _log.info("started", namespaces=self._settings.scope or "all")

    async def _reconcile(self, key: Key) -> float | None:
        try:
            again_after = await self._reconciler.reconcile(key)
        except PartialError as error:  # a policy may deny one object for ever
            self._has_good_pass |= error.can_write
            raise
        finally:
            self._unseen.discard(key)
        self._has_good_pass = True
        return again_after

    def _report_schema(self, problem: str) -> None:
        if problem not in ("", self._schema_problem):
            _log.warning("not_ready", reason=problem)
        self._schema_problem = problem

    def _is_live(self) -> bool:
        waits = self._queue.longest_wait_seconds(), self._lists.seconds_without_answer()
        return max(waits) < LONGEST_WAIT_SECONDS

    def _is_ready(self) -> tuple[bool, str]:
        """Whether ``helm upgrade --wait`` may rely on this operator: it sees all and can write."""
        problem = self._schema_problem or self._lists.problem
        if self._unseen:
            problem = f"{len(self._unseen)} resources have had no pass yet"
        elif not problem and not self._has_good_pass:
            problem = "every pass has failed; see the log"
        return not problem, problem or "ok"


async def serve(settings: OperatorSettings) -> None:
    """Construct everything and run it until a signal.

    Raises:
        SSDError: no cluster, no answer, or a port is in use.
    """
    this = asyncio.current_task()
    assert this is not None
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # Until kopf handles the signals, they end the wait for a CRD, also of process 1.
        asyncio.get_running_loop().add_signal_handler(signal_number, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with connect() as cluster:
            await Operator(settings, cluster).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    try:
        loaded = load(OperatorSettings, sys.argv[1:] if argv is None else argv, prefix=PREFIX)
        settings = loaded.settings
        if loaded.is_only_shown:
            sys.stdout.write(to_json(settings) + "\n")
            return 0
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
