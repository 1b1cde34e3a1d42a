"""Whether the API server stores every field of our CRDs; an older CRD drops new fields silently."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from ssd_operator.api.schema import crd
from ssd_operator.api.spec import RESOURCE_KINDS, Object
from ssd_operator.observe.cluster import ClusterError

RETRY_SECONDS = 5.0
"""Time between two reads of a CRD that is missing or too old."""
MOST_NAMED = 3
"""Fields that a message names."""


async def wait_for_schema(
    served_schema: Callable[[str], Awaitable[Object]],
    report: Callable[[str], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once every field is stored; nothing may be written before.

    ``report`` receives the reason for which fields are not stored.
    """
    for kind in sorted(RESOURCE_KINDS):
        while problem := await _problem(served_schema, kind):
            report(problem)
            await sleep(RETRY_SECONDS)
    report("")


async def _problem(served_schema: Callable[[str], Awaitable[Object]], kind: str) -> str:
    ours = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    try:
        absent = list(missing_fields(ours, await served_schema(kind)))
    except ClusterError as error:
        return str(error)
    if not absent:
        return ""
    more = len(absent) - MOST_NAMED
    names = ", ".join(absent[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return (
        f"the CRD of {kind} lacks {names}; nothing is written until it is upgraded "
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
