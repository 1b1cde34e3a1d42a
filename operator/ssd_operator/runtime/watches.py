"""The watches of kopf and lists of all kinds, which keep the object cache up to date.

*Decision*: passes run from our own work queue and read our own cache. *Because* change handlers
make kopf write annotations into resources, and timers and daemons add a finalizer; its indices lack
the answers to our own writes, without which a pass repeats them, and keep what was deleted during a
gap of a watch (tried with 1.45). *Revisit when* kopf can run handlers without writing, and
removes from its indices what a new list does not have.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product, repeat
from typing import Any

import kopf

from ssd.observability.log import get_logger
from ssd_operator.api.spec import RESOURCE_KINDS
from ssd_operator.children.objects import KINDS, WATCHED_KINDS, ServedKind
from ssd_operator.observe.cluster import Cluster, ClusterError, ForbiddenError
from ssd_operator.observe.object_cache import LABELS, ObjectCache, whole
from ssd_operator.runtime import metrics

REQUEST_SECONDS = 30.0
EXIT_SECONDS = 25.0
"""Time for the end of kopf; less than the grace period of the operator's pod."""
PERIOD_SECONDS = 120.0
"""Longest time until a deletion is found that a watch missed."""
_FIRST_BACK_OFFS = (1.0, 2.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0)
LONGEST_BACK_OFF_SECONDS = 30.0
"""Longest time from an error to the next call of kopf."""
RETRY_SECONDS = 5.0
"""Time from an error to the next list."""
LISTS_OF_FORBIDDEN = 4
"""Lists that may be forbidden; rights that were just given take a moment."""

_log = get_logger(__name__)
_Place = tuple[str, str]
"""Kind and namespace; no namespace means all."""
_WATCHED = {KINDS[kind]: kind for kind in WATCHED_KINDS}
_LABELLED = WATCHED_KINDS - RESOURCE_KINDS


async def watch(cache: ObjectCache, namespaces: Sequence[str]) -> None:
    """Bring changes of all kinds into the cache, until a signal or an error of kopf."""
    await kopf.operator(
        registry=make_registry(cache),
        settings=watch_settings(),
        clusterwide=not namespaces,
        namespaces=namespaces,
    )


def watch_settings() -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing and needs no right beyond ours."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.error_backoffs = _EndlessBackOffs()
    settings.process.ultimate_exiting_timeout = EXIT_SECONDS
    settings.persistence.diffbase_storage = _NoEssence()
    settings.watching.label_selectors[lambda resource: _kind(resource) in _LABELLED] = LABELS
    return settings


class _EndlessBackOffs:
    """Pauses between the attempts of a call, without a last one.

    After the last attempt kopf would end. Calls about a namespace that was deleted with our rights
    fail as long as the operator runs, and must not end the watches of other namespaces.
    """

    def __iter__(self) -> Iterator[float]:
        """Begin anew; kopf iterates once for each call."""
        return chain(_FIRST_BACK_OFFS, repeat(LONGEST_BACK_OFF_SECONDS))


class _NoEssence(kopf.DiffBaseStorage):
    """Stores nothing to compare with: otherwise kopf copies each object at each event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def make_registry(cache: ObjectCache) -> kopf.OperatorRegistry:
    """Make the handlers: coroutines, because kopf runs plain functions in threads."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**context: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    async def handle_event(event: Any, resource: Any, **_: Any) -> None:
        # A removed label arrives as a deletion; the next pass finds the object by name.
        report = cache.mark_deleted if event["type"] == "DELETED" else cache.put
        report(whole(_kind(resource) or "", event["object"]))

    # With handlers that name no group, kopf reads all groups and ends if one is not available.
    for kind in sorted(WATCHED_KINDS):
        api_version, plural = KINDS[kind]
        group, _, version = api_version.rpartition("/")
        kopf.on.event(group=group, version=version, plural=plural, registry=registry)(handle_event)
    return registry


class Lists:
    """Lists each kind in each namespace from time to time. Asyncio loop.

    The first lists make the cache complete, so that passes may begin. Later ones find deletions
    that a watch missed.
    """

    def __init__(self, cluster: Cluster, cache: ObjectCache, namespaces: Sequence[str]) -> None:
        """List nothing yet; no namespaces mean all."""
        self._cluster = cluster
        self._cache = cache
        self._namespaces = frozenset(namespaces or ("",))
        self._places = list(product(sorted(WATCHED_KINDS), self._namespaces))
        self._problems: dict[_Place, str] = dict.fromkeys(self._places, "starting")
        """Why a list has not come yet."""
        self._errors: dict[_Place, str] = {}
        """The newest error of each list that fails; a repetition is not logged."""
        self._num_forbidden: Counter[_Place] = Counter()
        self.is_listed = asyncio.Event()
        """Set once every kind was listed."""
        self._now = asyncio.get_running_loop().time
        self._answered_at = math.inf
        """When the newest list was answered, of any kind."""

    @property
    def problem(self) -> str:
        """What is not listed yet; empty if every kind was."""
        return "" if self.is_listed.is_set() else next(iter(self._problems.values()), "")

    def seconds_without_answer(self) -> float:
        """Return the time for which the API server has answered no list. Any thread."""
        return self._now() - self._answered_at

    async def run(self) -> None:
        """List until cancelled."""
        self._answered_at = self._now()
        async with asyncio.TaskGroup() as tasks:
            for kind, namespace in self._places:
                tasks.create_task(self._repeat(kind, namespace))

    async def _repeat(self, kind: str, namespace: str) -> None:
        place, pause = (kind, namespace), RETRY_SECONDS
        while True:
            try:
                objects, version = await self._cluster.list_all(kind, namespace)
            except ClusterError as error:
                metrics.ERRORS_TOTAL.labels(type(error).__name__).inc()
                if isinstance(error, ForbiddenError):
                    self._answered_at = self._now()  # a restart brings no rights
                if self._errors.get(place) != (reason := str(error)):
                    self._errors[place] = reason
                    _log.warning("list_failed", kind=kind, namespace=namespace, error=reason)
                if place in self._problems:
                    self._problems[place] = reason
                    self._num_forbidden[place] += isinstance(error, ForbiddenError)
                self._check()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._answered_at = self._now()
            self._errors.pop(place, None)
            self._cache.replace(kind, namespace, objects, version)
            self._problems.pop(place, None)
            self._check()
            # The watch of kopf begins a moment after the first list.
            await asyncio.sleep(pause)
            pause = PERIOD_SECONDS

    def _check(self) -> None:
        """Let passes begin if all is listed, but for namespaces deleted with our rights.

        In these namespaces no resource is known, so no pass lacks the kinds that are not listed.
        """
        lost = {
            namespace
            for _, namespace in self._problems
            if all(self._is_forbidden(kind, namespace) for kind in RESOURCE_KINDS)
        }
        if lost < self._namespaces and all(namespace in lost for _, namespace in self._problems):
            self.is_listed.set()

    def _is_forbidden(self, kind: str, namespace: str) -> bool:
        is_problem = (kind, namespace) in self._problems
        return is_problem and self._num_forbidden[kind, namespace] >= LISTS_OF_FORBIDDEN


def _kind(resource: Any) -> str | None:
    """The kind of a resource that kopf has discovered; None for one that is not watched."""
    api_version = f"{resource.group}/{resource.version}".removeprefix("/")
    return _WATCHED.get(ServedKind(api_version, resource.plural))
