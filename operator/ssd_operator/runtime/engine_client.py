"""Calls to engines: state of targets and drains of drafts, in tasks of their own with deadlines.

A pass never waits for an engine. It sets which targets are followed and which drafts drain, and
reads the latest facts. A new fact wakes the resource.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ssd.errors import NotReadyError, SettingsError, SSDError
from ssd.observability.log import get_logger
from ssd.rpc.client import DraftClient, TargetClient
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials, Reloaded, TlsFiles
from ssd.rpc.listen import join_address
from ssd.rpc.pool_codec import PoolStatus
from ssd_operator.children.objects import DRAFT_PORT, TARGET_PORT, Component, server_name
from ssd_operator.observe.cluster import Key
from ssd_operator.observe.pod_state import Address
from ssd_operator.observe.snapshot import TargetReport
from ssd_operator.policy.drain import Drain
from ssd_operator.runtime import metrics

POLL_SECONDS = 10.0
"""Longest time between two calls to a target, which reports changes in between."""
RETRY_SECONDS = 2.0
"""Time from a failed call to a target to the next call."""
REPORT_SECONDS = 0.5
"""Shortest time between two reports of a target."""
CALL_SECONDS = 2.0
"""Longest call to a draft."""
DRAIN_POLL_SECONDS = 0.5
"""Time between two calls that read whether a draft has drained."""
LONGEST_DRAIN_SECONDS = 300.0
"""A draft refuses a longer deadline."""
_FILES = ("ca.crt", "tls.crt", "tls.key", "token")
"""What the folder of the setting ``credentials`` may have."""

_log = get_logger(__name__)
_TaskId = tuple[Key, str, Address | None]
"""Resource, pod and, for targets, address."""


class EngineCredentials:
    """Credentials of calls to engines. Files that are added, changed or removed are read again.

    The token is sent only to pods that accept tokens, after their certificate has been checked:
    every user who may create a resource selects the image that receives the call.
    """

    def __init__(self, folder: str) -> None:
        """Read the files of a folder, each of which may be missing; without a folder none is read.

        Raises:
            SettingsError: there is no such folder, or a file is invalid.
        """
        if folder and not Path(folder).is_dir():
            raise SettingsError(f"credentials: {folder} is not a folder")
        paths = [str(Path(folder) / file) for file in _FILES] if folder else []
        self._credentials = Reloaded(paths, lambda: _read_credentials(paths))

    def of(self, key: Key, service: str, address: Address) -> ClientCredentials:
        """Return the credentials for a pod behind a Service of a resource."""
        if not address.is_tls:
            return NO_CREDENTIALS
        without_token, with_token = self._credentials.current()
        credentials = with_token if address.has_tokens else without_token
        return credentials.of_server(server_name(key[0], service))


def _read_credentials(paths: list[str]) -> tuple[ClientCredentials, ClientCredentials]:
    """Return credentials without and with the token, from the files that exist.

    A metric shows the end of the certificate.
    """
    ca, certificate, key, token = (
        path if Path(path).exists() else "" for path in paths or [""] * len(_FILES)
    )
    if not ca:
        # A call to a port with TLS then fails, and the status has the reason.
        metrics.show_certificate(None)
        return NO_CREDENTIALS, NO_CREDENTIALS
    tls = TlsFiles(ca=ca, certificate=certificate, key=key)
    without_token, with_token = ClientCredentials(tls), ClientCredentials(tls, token)
    # Calls may last for days: the metric reads a new certificate before the next call does.
    metrics.show_certificate((lambda: without_token.expires_at) if certificate else None)
    return without_token, with_token


class Engines(Protocol):
    """Targets and drafts as a pass sees them. Asyncio loop; no method waits."""

    def state(self, key: Key) -> tuple[Mapping[str, TargetReport], Mapping[str, str]]:
        """The last reports of a resource's targets, and results of its drains, by pod.

        The result of a drain is empty while it runs.
        """

    def errors(self, key: Key) -> Mapping[str, str]:
        """Error of the last failed call to each target of a resource; none after a report."""

    def drain(self, key: Key, wanted: Iterable[Drain]) -> None:
        """Begin these drains; those that have begun continue."""

    def follow(self, key: Key, targets: Mapping[str, Address], pods: AbstractSet[str]) -> None:
        """Follow these targets of a resource, address by pod; drop drains of all other pods."""


class EngineClients:
    """``Engines`` behind gRPC. Asyncio loop."""

    def __init__(
        self, now: Callable[[], float], wake: Callable[[Key], None], credentials: EngineCredentials
    ) -> None:
        """``now`` is in seconds since the epoch; ``wake`` is called at new facts of a resource."""
        self._now = now
        self._wake = wake
        self._credentials = credentials
        self._pools: dict[Key, dict[str, TargetReport]] = {}
        self._errors: dict[Key, dict[str, str]] = {}
        self._drains: dict[Key, dict[str, str]] = {}
        self._tasks: dict[_TaskId, asyncio.Task[None]] = {}

    def state(self, key: Key) -> tuple[Mapping[str, TargetReport], Mapping[str, str]]:
        """See ``Engines``."""
        return dict(self._pools.get(key, {})), dict(self._drains.get(key, {}))

    def errors(self, key: Key) -> Mapping[str, str]:
        """See ``Engines``."""
        return dict(self._errors.get(key, {}))

    def drain(self, key: Key, wanted: Iterable[Drain]) -> None:
        """See ``Engines``."""
        drains = self._drains.setdefault(key, {})
        for drain in wanted:
            if drain.address is not None and drain.pod not in drains:
                drains[drain.pod] = ""
                work = self._drain_and_report(key, drain.pod, drain.address, drain.deadline)
                self._start((key, drain.pod, None), work)

    def follow(self, key: Key, targets: Mapping[str, Address], pods: AbstractSet[str]) -> None:
        """See ``Engines``."""
        wanted = {(key, pod, address) for pod, address in targets.items()}
        for task_id in list(self._tasks):
            owner, pod, target_address = task_id
            is_drain = target_address is None and pod in pods
            if owner == key and task_id not in wanted and not is_drain:
                self._tasks.pop(task_id).cancel()
        for _, pod, address in wanted - self._tasks.keys():
            self._start((key, pod, address), self._follow(key, pod, address))
        pools, drains = self._pools.pop(key, {}), self._drains.pop(key, {})
        errors = self._errors.pop(key, {})
        if targets or pods:
            self._errors[key] = {pod: error for pod, error in errors.items() if pod in targets}
            self._pools[key] = {pod: report for pod, report in pools.items() if pod in targets}
            self._drains[key] = {pod: result for pod, result in drains.items() if pod in pods}

    async def close(self) -> None:
        """End all tasks. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, task_id: _TaskId, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task_id] = task
        task.add_done_callback(partial(self._end, task_id))

    def _end(self, task_id: _TaskId, task: "asyncio.Task[None]") -> None:
        """Count a task that crashed; the next pass starts another."""
        if self._tasks.get(task_id) is task:
            del self._tasks[task_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
            _log.error("task_crashed", task=task_id, error=repr(error))

    async def _follow(self, key: Key, pod: str, address: Address) -> None:
        """Call a target again and again; each report becomes a fact."""
        endpoint = join_address(address.host, TARGET_PORT)
        while True:
            # Files of credentials may have been added since the last failure.
            credentials = self._credentials.of(key, key[1], address)
            async with TargetClient(endpoint, credentials=credentials) as target:
                await self._read_reports(key, pod, target)
            await asyncio.sleep(RETRY_SECONDS)

    async def _read_reports(self, key: Key, pod: str, target: TargetClient) -> None:
        """Read the reports of a target until a call fails or ends."""
        while True:
            has_reported = False
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    async with contextlib.aclosing(target.watch_pool()) as reports:
                        async for status in reports:
                            self._put(key, pod, status)
                            has_reported = True
                            # A target sends one a second at most. Another pod may send thousands.
                            await asyncio.sleep(REPORT_SECONDS)
                return
            except TimeoutError:
                # After its first report, a target without changes reports nothing: call again.
                if not has_reported:
                    self._note(key, pod, f"no report within {POLL_SECONDS:g} s")
            except SSDError as error:
                self._note(key, pod, str(error))
                return

    def _note(self, key: Key, pod: str, error: str) -> None:
        errors = self._errors.setdefault(key, {})
        if errors.get(pod) != error:
            _log.warning("target_unreachable", pod=pod, error=error)
        errors[pod] = error

    def _put(self, key: Key, pod: str, status: PoolStatus) -> None:
        self._errors.get(key, {}).pop(pod, None)
        pools = self._pools.setdefault(key, {})
        old = pools.get(pod)
        pools[pod] = TargetReport(status, self._now())
        if old is None or _states(old.status) != _states(status):
            self._wake(key)

    async def _drain_and_report(
        self, key: Key, pod: str, address: Address, deadline: float
    ) -> None:
        result = await self._drain_draft(key, pod, address, deadline)
        metrics.DRAINS_TOTAL.labels(result).inc()
        _log.info("drain_ended", pod=pod, result=result)
        drains = self._drains.get(key, {})
        if pod in drains:
            drains[pod] = result
            self._wake(key)

    async def _drain_draft(self, key: Key, pod: str, address: Address, deadline: float) -> str:
        service = f"{key[1]}-{Component.DRAFT}"
        credentials = self._credentials.of(key, service, address)
        endpoint = join_address(address.host, DRAFT_PORT)
        end = min(deadline, self._now() + LONGEST_DRAIN_SECONDS)
        has_begun = False
        async with DraftClient(endpoint, credentials) as draft:
            while (left := end - self._now()) > 0:
                try:
                    async with asyncio.timeout(min(left, CALL_SECONDS)):
                        if not has_begun:
                            await draft.drain(int(left * 1000))
                            has_begun = True
                        status = await draft.get_status()
                    # A draft that does not drain is a process that began after the drained one.
                    if status.sessions == 0 or not status.draining:
                        return "Drained"
                except NotReadyError:
                    if has_begun:
                        return "Drained"  # the process ends after its last session
                except (SSDError, TimeoutError) as error:
                    _log.debug("draft_unreachable", pod=pod, error=str(error))
                await asyncio.sleep(DRAIN_POLL_SECONDS)
        return "TimedOut" if has_begun else "Unreachable"


def _states(status: PoolStatus) -> object:
    """The part of a report that may change a decision at once."""
    links = [
        (link.address, link.draft_pod, link.state, link.reason, link.transport)
        for link in status.links
    ]
    return sorted(links), status.speculating
