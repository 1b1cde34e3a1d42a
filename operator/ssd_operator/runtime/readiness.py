"""When the operator is ready: the API server stores all that it knows, and it got to all there is.

A probe that says yes sooner lets ``helm upgrade --wait`` and ``helm test`` pass on an operator that
sees nothing or can do nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Protocol, TypeVar

from ssd.telemetry import get_logger
from ssd_operator.api.schema import crd
from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import WATCHED_KINDS, ClusterError, ForbiddenError, Key

FIELDS_SECONDS = 5.0
"""Between two looks at a CRD that is too old."""
LOOK_SECONDS = 1.0
"""Between two looks at whether the first passes are done."""
LOOKS_AT_RIGHTS = 4
"""At a namespace that may not be listed; rights that have just been given take a moment."""
MOST_NAMED = 3
"""Fields that a message names."""

_log = get_logger(__name__)
_Sleep = Callable[[float], Awaitable[None]]
_T = TypeVar("_T")


class Lists(Protocol):
    """What must be asked before the operator is ready. Any method raises ``ClusterError``."""

    async def served_schema(self) -> Object:
        """The schema of SSDDeployments that is served."""
        ...

    async def list_keys(self, kind: str, namespace: str, *, most: int = 0) -> set[Key]:
        """Namespaces and names of a kind's objects, 0 for all; without a namespace, everywhere."""
        ...


class Readiness:
    """Why the operator is not ready, as ``/readyz`` tells it."""

    def __init__(self) -> None:
        """Nothing has been done yet."""
        self._problem = "starting"
        self._results: dict[Key, bool] = {}

    def problem(self) -> str:
        """What is wrong; empty once the operator was ready."""
        return self._problem

    def looked(self, key: Key, *, is_good: bool) -> None:
        """A pass has ended."""
        self._results[key] = is_good or self._results.get(key, False)

    def missing(self, keys: AbstractSet[Key]) -> str:
        """What of the first passes over these resources is missing; empty if nothing is."""
        unseen = keys - self._results.keys()
        if unseen:
            return f"{len(unseen)} of {len(keys)} resources have not been looked at yet"
        if keys and not any(self._results[key] for key in keys):
            return f"every pass over {len(keys)} resources has failed; the log says why"
        return ""

    def wait_for(self, problem: str) -> None:
        """This is in the way now; the log tells it once."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("not_ready", reason=problem)

    def done(self) -> None:
        """Nothing is in the way any more."""
        self._problem = ""
        _log.info("ready")


async def wait_for_fields(
    readiness: Readiness, cluster: Lists, sleep: _Sleep = asyncio.sleep
) -> None:
    """Return once the API server keeps every field that we know; an older CRD drops them silently.

    Nothing may be written before.
    """
    known = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    while True:
        served = await _patiently(readiness, cluster.served_schema, sleep)
        absent = list(missing_fields(known, served))
        if not absent:
            return
        more = len(absent) - MOST_NAMED
        names = ", ".join(absent[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        readiness.wait_for(
            f"the CRD of this cluster lacks {names}; nothing is written until it is upgraded "
            "(charts/ssd/files/crd.yaml, or helm upgrade of the release that owns it)"
        )
        await sleep(FIELDS_SECONDS)


async def become_ready(
    readiness: Readiness,
    cluster: Lists,
    namespaces: Sequence[str],
    sleep: _Sleep = asyncio.sleep,
) -> None:
    """Return once every kind can be listed and every resource was looked at, not all in vain.

    kopf begins passes when all its lists are there, so a pass proves that they are. A namespace of
    several that stays forbidden, because it was deleted with our rights in it, is not waited for.
    """
    scopes = await _open_scopes(readiness, cluster, namespaces or [""], sleep)
    while True:
        keys = set[Key]()
        for scope in scopes:
            keys |= await _patiently(readiness, partial(cluster.list_keys, KIND, scope), sleep)
        problem = readiness.missing(keys)
        if not problem:
            return readiness.done()
        readiness.wait_for(problem)
        await sleep(LOOK_SECONDS)


async def _open_scopes(
    readiness: Readiness, cluster: Lists, scopes: Sequence[str], sleep: _Sleep
) -> list[str]:
    """Those in which every kind can be listed, once there is one and the others stay shut."""
    num_looks = 0
    while True:
        num_looks += 1
        shut: dict[str, ClusterError] = {}
        for scope in scopes:
            try:
                for kind in WATCHED_KINDS:
                    await cluster.list_keys(kind, scope, most=1)
            except ClusterError as error:
                shut[scope] = error
        found = [scope for scope in scopes if scope not in shut]
        is_lasting = found and num_looks >= LOOKS_AT_RIGHTS
        if not shut or (is_lasting and _are_forbidden(shut.values())):
            for scope, words in shut.items():
                _log.warning("namespace_forbidden", namespace=scope, error=str(words))
            return found
        readiness.wait_for(str(next(iter(shut.values()))))
        await sleep(FIELDS_SECONDS)


def _are_forbidden(errors: Iterable[ClusterError]) -> bool:
    return all(isinstance(error, ForbiddenError) for error in errors)


def missing_fields(known: Object, served: Object, path: str = "") -> Iterator[str]:
    """Paths of the fields of one schema that another has no place for."""
    theirs = served.get("properties", {})
    for name, field in known.get("properties", {}).items():
        here = f"{path}.{name}".removeprefix(".")
        if name in theirs:
            yield from missing_fields(field, theirs[name], here)
        else:
            yield here
    for part, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(known.get(part), dict):
            yield from missing_fields(known[part], served.get(part) or {}, path + mark)


async def _patiently(readiness: Readiness, ask: Callable[[], Awaitable[_T]], sleep: _Sleep) -> _T:
    while True:
        try:
            return await ask()
        except ClusterError as error:
            readiness.wait_for(str(error))
            await sleep(FIELDS_SECONDS)
