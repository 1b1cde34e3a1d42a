"""When the operator is ready, and what ``/readyz`` and the log say until then."""

import copy
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import pytest

from ssd_operator.api.schema import crd
from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Key
from ssd_operator.runtime.probes import serve_probes
from ssd_operator.runtime.readiness import Readiness, become_ready, missing_fields, wait_for_fields

ONE, TWO = ("default", "one"), ("default", "two")


def served() -> Object:
    """What an API server with our CRD serves."""
    schema: Object = copy.deepcopy(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return schema


def older(*path: str) -> Object:
    """The same, of a time when this field was not known."""
    schema = served()
    part = schema
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return schema


@dataclass
class Answers:
    """``Lists`` whose answers a test changes while the operator naps."""

    schema: Object = field(default_factory=served)
    resources: set[Key] = field(default_factory=set)
    errors: dict[str, ClusterError] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)
    naps: Iterator[Callable[[], None]] = field(default_factory=lambda: iter(()))

    async def served_schema(self) -> Object:
        return self.schema

    async def list_keys(self, kind: str, namespace: str, *, most: int = 0) -> set[Key]:
        self.asked.add((kind, namespace))
        for name in (kind, namespace):
            if name in self.errors:
                raise self.errors[name]
        return self.resources if kind == KIND else set()

    async def nap(self, seconds: float) -> None:
        next(self.naps)()


def test_our_own_crd_has_every_field() -> None:
    assert list(missing_fields(served(), served())) == []


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
    readiness, answers = Readiness(), Answers(older("properties", "spec", "properties", "paused"))
    told = []

    def still_old() -> None:
        told.append(readiness.problem())

    def upgrade() -> None:
        still_old()
        answers.schema = served()

    answers.naps = iter([still_old, upgrade])
    await wait_for_fields(readiness, answers, answers.nap)
    assert len(told) == 2
    assert all("lacks spec.paused;" in each for each in told)


async def test_an_operator_without_resources_is_ready_at_once() -> None:
    readiness = Readiness()
    assert readiness.problem() == "starting"
    answers = Answers()
    await become_ready(readiness, answers, (), answers.nap)
    assert readiness.problem() == ""


async def test_every_resource_is_looked_at_first() -> None:
    readiness, answers, told = Readiness(), Answers(resources={ONE, TWO}), []

    def look(key: Key, *, is_good: bool) -> Callable[[], None]:
        def then() -> None:
            told.append(readiness.problem())
            readiness.looked(key, is_good=is_good)

        return then

    answers.naps = iter([look(ONE, is_good=False), look(TWO, is_good=True)])
    await become_ready(readiness, answers, (), answers.nap)
    assert [each.partition(" ")[0] for each in told] == ["2", "1"]
    assert readiness.problem() == ""


async def test_an_operator_whose_every_pass_fails_is_not_ready() -> None:
    readiness, answers, told = Readiness(), Answers(resources={ONE}), []

    def again() -> None:
        told.append(readiness.problem())
        readiness.looked(ONE, is_good=len(told) > 2)

    readiness.looked(ONE, is_good=False)
    answers.naps = iter([again] * 3)
    await become_ready(readiness, answers, (), answers.nap)
    assert all("every pass over 1 resources has failed" in each for each in told)


async def test_a_resource_that_goes_before_it_was_seen_is_not_waited_for() -> None:
    readiness, answers = Readiness(), Answers(resources={ONE})
    answers.naps = iter([answers.resources.clear])
    await become_ready(readiness, answers, (), answers.nap)
    assert readiness.problem() == ""


async def test_a_kind_that_must_not_be_listed_is_told() -> None:
    readiness, answers = Readiness(), Answers()
    answers.errors["NetworkPolicy"] = ForbiddenError("GET networkpolicies: 403")
    told = []

    def allow() -> None:
        told.append(readiness.problem())
        answers.errors.clear()

    answers.naps = iter([allow])
    await become_ready(readiness, answers, ("a", "b"), answers.nap)
    assert told == ["GET networkpolicies: 403"]
    assert {("NetworkPolicy", "a"), ("Pod", "b")} <= answers.asked


async def test_a_namespace_that_stays_forbidden_is_not_waited_for_beside_another() -> None:
    readiness, naps = Readiness(), count()
    answers = Answers(errors={"gone": ForbiddenError("no right in gone")})
    answers.naps = ((lambda: None) for _ in naps)
    await become_ready(readiness, answers, ["here", "gone"], answers.nap)
    assert readiness.problem() == ""
    assert next(naps) >= 2, "rights may come a moment late"


async def test_what_was_ready_once_stays_so() -> None:
    readiness, answers = Readiness(), Answers(resources={ONE})
    readiness.looked(ONE, is_good=True)
    await become_ready(readiness, answers, (), answers.nap)
    readiness.looked(ONE, is_good=False)
    assert readiness.problem() == ""


async def test_a_probe_answers_what_is_wrong() -> None:
    readiness = Readiness()
    checks = {"/healthz": lambda: "", "/readyz": readiness.problem}
    async with serve_probes(0, checks) as port, aiohttp.ClientSession() as session:

        async def ask(path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, await answer.text()

        assert await ask("/healthz") == (200, "ok")
        if socket.has_dualstack_ipv6():
            async with session.get(f"http://[::1]:{port}/healthz") as answer:
                assert answer.status == 200, "the kubelet of an IPv6-only cluster has no IPv4"
        assert await ask("/readyz") == (503, "starting")
        readiness.done()
        assert await ask("/readyz") == (200, "ok")
