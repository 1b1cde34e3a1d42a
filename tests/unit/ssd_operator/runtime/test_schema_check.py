"""What the operator finds out before it starts."""

import copy
from dataclasses import dataclass

import pytest

from ssd_operator.api.schema import crd
from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import BusyError, ClusterError, MissingError
from ssd_operator.runtime.schema_check import missing_fields, wait_for_schema


def served(kind: str = KIND) -> Object:
    """What an API server with our CRDs serves."""
    schema: Object = copy.deepcopy(crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return schema


def older(*path: str) -> Object:
    """The same without this field, as an older version has it."""
    schema = served()
    part = schema
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return schema


@dataclass
class Answers:
    """Schemas that are replaced by the next one while the operator sleeps."""

    schemas: list[Object | ClusterError]

    async def served_schema(self, kind: str) -> Object:
        found = self.schemas[0] if kind == KIND else served(kind)
        if isinstance(found, ClusterError):
            raise found
        return found

    async def sleep(self, seconds: float) -> None:
        self.schemas.pop(0)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("properties", "spec", "properties", "paused"), "spec.paused"),
        (
            ("properties", "status", "properties", "links", "items", "properties", "state"),
            "status.links[].state",
        ),
        (("properties", "status"), "status"),
    ],
)
def test_a_field_that_is_not_served_is_named(path: tuple[str, ...], name: str) -> None:
    assert list(missing_fields(served(), older(*path))) == [name]


async def test_nothing_begins_on_an_older_crd_until_it_is_upgraded() -> None:
    old = older("properties", "spec", "properties", "paused")
    missing = MissingError("no CRD")
    answers, problems = Answers([missing, old, BusyError("503"), served()]), list[str]()
    await wait_for_schema(answers.served_schema, problems.append, answers.sleep)
    assert "lacks spec.paused;" in problems.pop(1)
    assert problems == ["no CRD", "503", ""]
