"""Finds out what was deleted while a watch had a gap, which the watch itself never tells.

*Decision*: all kinds that are watched are listed, metadata only, when a watch has begun anew and
every two minutes besides. *Because* a list of nothing is a listing that no event announces, and a
phantom is costly: a pod that does not exist is waited for, a Service that does not is not made
again. *Not chosen*: reading each object by name in each pass. *Revisit when* the watch tells.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import product

from ssd.telemetry import get_logger
from ssd_operator.observe.cluster import WATCHED_KINDS, Cluster, ClusterError, Key, ref_of
from ssd_operator.observe.object_cache import ObjectCache, key_of
from ssd_operator.runtime import metrics

PERIOD_SECONDS = 120.0
"""Longest time between two roll calls."""
SETTLE_SECONDS = 5.0
"""From a new listing to its roll call: the watches of other kinds begin anew with it."""
LIST_SECONDS = 60.0
"""Longest listing of one kind, all pages together."""

_log = get_logger(__name__)


class RollCall:
    """Compares the view with what exists. Asyncio loop."""

    def __init__(
        self,
        cluster: Cluster,
        view: ObjectCache,
        wake: Callable[[Key], None],
        namespaces: Sequence[str] = (),
    ) -> None:
        """Remember the parts.

        Args:
            cluster: what exists.
            view: what is seen of it.
            wake: a key is to be looked at, since something of it is gone.
            namespaces: those that are watched; none for all.
        """
        self._cluster = cluster
        self._view = view
        self._wake = wake
        self._namespaces = tuple(namespaces) or ("",)
        self._is_listed = asyncio.Event()

    def listed(self) -> None:
        """A watch has begun anew: something may have been missed."""
        self._is_listed.set()

    async def run(self) -> None:
        """Call until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._is_listed.wait()
                    await asyncio.sleep(SETTLE_SECONDS)
            self._is_listed.clear()
            await self.call()

    async def call(self) -> None:
        """One roll call; what cannot be listed is left to the next one."""
        self._view.tidy()
        for kind, namespace in product(WATCHED_KINDS, self._namespaces):
            try:
                async with asyncio.timeout(LIST_SECONDS):
                    await self._call(kind, namespace)
            except (ClusterError, TimeoutError) as error:
                metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
                words = str(error) or "too slow"
                _log.warning("roll_call_failed", kind=kind, namespace=namespace, error=words)

    async def _call(self, kind: str, namespace: str) -> None:
        # Seen before the list is asked for, so what it does not have is gone, and not too new.
        seen = [
            thing
            for thing in self._view.everything()
            if thing["kind"] == kind and namespace in ("", thing["metadata"]["namespace"])
        ]
        present = await self._cluster.uids(kind, namespace)
        for thing in seen:
            if thing["metadata"]["uid"] in present:
                continue
            where, ref = thing["metadata"]["namespace"], ref_of(thing)
            _log.info("missed_deletion", namespace=where, object=f"{ref.kind}/{ref.name}")
            self._view.bury(thing)
            if (key := key_of(thing)) is not None:
                self._wake(key)
