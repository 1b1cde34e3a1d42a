"""Check before the operator starts: the API server serves the resource with all our fields."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from ssd.errors import SetupError
from ssd_operator.api.schema import crd
from ssd_operator.api.spec import API_VERSION, KIND, Object
from ssd_operator.observe.cluster import ClusterError

RETRY_SECONDS = 5.0
"""Between two reads of a CRD that is too old."""
MOST_NAMED = 3
"""Fields that a message names."""


class Schemas(Protocol):
    """The calls that this check needs. Any method raises ``ClusterError``."""

    async def is_served(self, name: str) -> bool:
        """Whether the cluster serves a kind."""
        ...

    async def served_schema(self) -> Object:
        """The schema of SSDDeployments that is served."""
        ...


async def wait_for_schema(
    cluster: Schemas,
    report: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once the API server stores every field of our CRD; an older CRD drops new fields.

    Nothing may be written before.

    Args:
        cluster: the API server.
        report: called with the reason for waiting.
        sleep: waits.

    Raises:
        SetupError: the CRD is missing.
        ClusterError: the API server does not answer the first call.
    """
    if not await cluster.is_served(KIND):
        raise SetupError(
            f"the cluster does not serve {KIND} of {API_VERSION}; "
            "apply the CRD (charts/ssd/files/crd.yaml) or install the chart with crds.install=true"
        )
    ours = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    while problem := await _problem(cluster, ours):
        report(problem)
        await sleep(RETRY_SECONDS)


async def _problem(cluster: Schemas, ours: Object) -> str:
    try:
        absent = list(missing_fields(ours, await cluster.served_schema()))
    except ClusterError as error:
        return str(error)
    if not absent:
        return ""
    more = len(absent) - MOST_NAMED
    names = ", ".join(absent[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return (
        f"the CRD of this cluster lacks {names}; nothing is written until it is upgraded "
        "(charts/ssd/files/crd.yaml, or helm upgrade of the release that owns it)"
    )


def missing_fields(ours: Object, served: Object, path: str = "") -> Iterator[str]:
    """Paths of the fields of one schema that another does not have."""
    theirs = served.get("properties", {})
    for name, field in ours.get("properties", {}).items():
        here = f"{path}.{name}".removeprefix(".")
        if name in theirs:
            yield from missing_fields(field, theirs[name], here)
        else:
            yield here
    for part, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(ours.get(part), dict):
            yield from missing_fields(ours[part], served.get(part) or {}, path + mark)
