"""Lists all kinds: at the start to be ready, and later to find deletions that a watch missed.

A readiness probe that succeeds sooner lets ``helm upgrade --wait`` and ``helm test`` pass on an
operator that sees nothing or can do nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from ssd.telemetry import get_logger
from ssd_operator.api.spec import KIND
from ssd_operator.observe.cluster import Cluster, ClusterError, ForbiddenError, Key
from ssd_operator.observe.object_cache import ObjectCache, key_of
from ssd_operator.runtime import metrics

PERIOD_SECONDS = 120.0
"""Longest time between two relists."""
SETTLE_SECONDS = 5.0
"""From a new list of a watch to the relist: the watches of other kinds begin again with it. Also
the time between two relists of an operator that is not ready."""
LIST_SECONDS = 60.0
"""Longest list of one kind, all pages together."""
LISTS_OF_FORBIDDEN = 4
"""Relists in which a namespace may be forbidden; rights that were just given take a moment."""

_log = get_logger(__name__)


class Readiness:
    """Why the operator is not ready, as ``/readyz`` reports it. Asyncio loop."""

    def __init__(self) -> None:
        """Start with nothing listed and no pass finished."""
        self._problem = "starting"
        self._listed: AbstractSet[Key] | None = None
        self._results: dict[Key, bool] = {}

    @property
    def problem(self) -> str:
        """The problem; empty once the operator was ready."""
        return self._problem

    def set_problem(self, problem: str) -> None:
        """Report a problem until it is solved; the log has it once."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("not_ready", reason=problem)

    def set_listed(self, resources: AbstractSet[Key]) -> None:
        """Every kind could be listed, and these resources exist."""
        self._listed = resources
        self._check()

    def finish(self, key: Key, *, is_good: bool) -> None:
        """A pass over a resource has ended."""
        self._results[key] = is_good or self._results.get(key, False)
        self._check()

    def _check(self) -> None:
        """Become ready once each resource had a pass, and not all passes failed.

        kopf begins passes when all its lists are complete, so a pass proves that they are.
        """
        if self._listed is None or not self._problem:
            return
        number, unseen = len(self._listed), self._listed - self._results.keys()
        if unseen:
            self.set_problem(f"{len(unseen)} of {number} resources have had no pass yet")
        elif self._listed and not any(self._results[key] for key in self._listed):
            self.set_problem(f"every pass over {number} resources has failed; see the log")
        else:
            self._problem = ""
            _log.info("ready")


class Relist:
    """Compares the object cache with what exists. Asyncio loop."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ObjectCache,
        wake: Callable[[Key], None],
        readiness: Readiness,
        namespaces: Sequence[str] = (),
    ) -> None:
        """Construct it."""
        self._cluster = cluster
        self._cache = cache
        self._wake = wake
        self._readiness = readiness
        self._namespaces = tuple(namespaces) or ("",)
        self._num_lists = 0
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Relist soon: a watch has begun again, and something may have been missed."""
        self._requested.set()

    async def run(self) -> None:
        """Relist until cancelled."""
        while True:
            await self.relist()
            period = SETTLE_SECONDS if self._readiness.problem else PERIOD_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._requested.wait()
                    await asyncio.sleep(SETTLE_SECONDS)
            self._requested.clear()

    async def relist(self) -> None:
        """List everything once; what cannot be listed is left to the next time."""
        self._cache.tidy()
        self._num_lists += 1
        resources, errors = set[Key](), dict[str, ClusterError | TimeoutError]()
        for namespace in self._namespaces:
            for kind in sorted(self._cache.kinds):
                try:
                    async with asyncio.timeout(LIST_SECONDS):
                        resources |= await self._relist(kind, namespace)
                except (ClusterError, TimeoutError) as error:
                    metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
                    message = str(error) or "too slow"
                    _log.warning("relist_failed", kind=kind, namespace=namespace, error=message)
                    errors.setdefault(namespace, error)
        if not self._readiness.problem:
            return
        # One of several namespaces that stays forbidden was deleted with our rights in it.
        are_forbidden = all(isinstance(error, ForbiddenError) for error in errors.values())
        is_lasting = self._num_lists >= LISTS_OF_FORBIDDEN and len(errors) < len(self._namespaces)
        if not errors or (are_forbidden and is_lasting):
            self._readiness.set_listed(resources)
        else:
            self._readiness.set_problem(str(next(iter(errors.values()))) or "a list is too slow")

    async def _relist(self, kind: str, namespace: str) -> set[Key]:
        """List a kind; the keys if it is the kind of resources."""
        # What is cached before the list is requested and is not in it is gone, and not too new.
        cached = self._cache.objects(kind, namespace)
        listed = await self._cluster.uids(kind, namespace)
        for thing in cached:
            metadata = thing["metadata"]
            if metadata["uid"] in listed:
                continue
            self._cache.mark_deleted(thing)
            name = f"{kind}/{metadata['name']}"
            _log.info("missed_deletion", namespace=metadata["namespace"], object=name)
            if (key := key_of(thing)) is not None:
                self._wake(key)
        return set(listed.values()) if kind == KIND else set()
