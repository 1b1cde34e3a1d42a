"""What Helm runs once: ``helm test`` and the Job of an uninstall."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.unit.ssd_operator.memory_cluster import MemoryCluster
from tests.unit.ssd_operator.world import DEMO

from ssd.errors import NotReadyError, SetupError
from ssd.rpc.http import ProbeServer
from ssd_operator.api.parse import parse
from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import ForbiddenError, Key, MissingError, Ref
from ssd_operator.runtime import installation

MOMENT = 0.05
UNTOUCHED = ("kube-system", "three")


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "POLL_SECONDS", MOMENT)


@dataclass
class Installed(MemoryCluster):
    """A cluster in which something else acts on resources, too."""

    ready: Object = field(default_factory=dict)
    """Condition of each new resource."""
    held: set[str] = field(default_factory=set)
    """Names of resources that a finalizer keeps."""

    async def create(self, thing: Object) -> None:
        status = {"conditions": [self.ready]} if self.ready else {}
        await super().create(thing | {"status": status})

    async def delete(self, namespace: str, ref: Ref, uid: str) -> None:
        if ref.name not in self.held:
            await super().delete(namespace, ref, uid)

    def keys(self) -> set[Key]:
        return {(namespace, ref.name) for namespace, ref in self.objects}


async def writes_a_text(endpoint: str) -> str:
    assert endpoint == "ssd-sample.here.svc:50051"
    return "return n"


@contextlib.contextmanager
def probes(*, is_ready: bool) -> Iterator[int]:
    server = ProbeServer("::", 0, lambda: True, lambda: (is_ready, "starting"))
    server.start()
    yield server.port
    server.close()


async def test_an_operator_that_answers_is_ready() -> None:
    with probes(is_ready=True) as port:
        await installation.check_ready(f"http://127.0.0.1:{port}/readyz")


async def test_an_operator_that_is_not_ready_by_the_deadline_is_named_with_its_problem() -> None:
    with probes(is_ready=False) as port:
        url = f"http://127.0.0.1:{port}/readyz"
        with pytest.raises(NotReadyError, match=rf"{url} is not ready after .* starting"):
            await installation.check_ready(url, seconds=10 * MOMENT)


async def test_the_sample_serves_and_is_deleted() -> None:
    api = Installed(ready={"type": "Ready", "status": "True"})
    await installation.serve_sample(api, "here", writes_a_text)
    assert api.objects == {}


async def test_images_of_the_sample_are_pulled_with_the_secrets_of_the_release() -> None:
    api = Installed(ready={"type": "Ready", "status": "True"})
    found: list[Object] = []

    async def find_secrets(endpoint: str) -> str:
        sample = parse(api.objects["here", Ref(KIND, "ssd-sample")])
        found.extend(sample.spec.pod_template.image_pull_secrets)
        return "return n"

    secrets = ["registry", "mirror"]
    await installation.serve_sample(api, "here", find_secrets, pull_secrets=secrets)
    assert [secret["name"] for secret in found] == secrets


async def test_the_sample_of_an_interrupted_test_is_deleted_first() -> None:
    api = Installed(ready={"type": "Ready", "status": "True"})
    await api.create(installation._sample("here"))
    await installation.serve_sample(api, "here", writes_a_text)
    assert api.objects == {}


async def test_a_sample_that_never_serves_is_reported_with_its_condition_and_deleted() -> None:
    api = Installed(ready={"type": "Ready", "status": "False", "reason": "ImagePull"})
    with pytest.raises(NotReadyError, match=r"ssd-sample is not Ready after .* ImagePull"):
        await installation.serve_sample(api, "here", writes_a_text, seconds=MOMENT)
    assert api.objects == {}


async def test_a_sample_that_writes_nothing_fails() -> None:
    async def writes_nothing(endpoint: str) -> str:
        return ""

    api = Installed(ready={"type": "Ready", "status": "True"})
    with pytest.raises(SetupError, match="text is empty"):
        await installation.serve_sample(api, "here", writes_nothing)
    assert api.objects == {}


@pytest.mark.parametrize(
    ("scope", "left"), [((), set()), (("a",), {("b", "two")}), (("a", "b"), set())]
)
async def test_an_uninstall_deletes_what_is_in_scope(
    scope: tuple[str, ...], left: set[tuple[str, str]]
) -> None:
    api = Installed()
    for key in (("a", "one"), ("b", "two"), UNTOUCHED):
        api.create_resource(key, DEMO)
    await installation.delete_all(api, scope)
    assert api.keys() == left | {UNTOUCHED}


async def test_an_uninstall_without_the_definition_has_nothing_to_delete() -> None:
    class Gone(Installed):
        async def list_all(self, kind: str, namespace: str) -> tuple[list[Object], int]:
            raise MissingError("404")

    await installation.delete_all(Gone(), ())


async def test_an_uninstall_leaves_out_a_namespace_that_was_deleted() -> None:
    api = Installed(list_faults={"gone": ForbiddenError("403")})
    api.create_resource(("a", "one"), DEMO)
    await installation.delete_all(api, ("gone", "a"))
    assert api.keys() == set()


async def test_an_uninstall_that_loses_its_rights_after_the_last_list_is_complete() -> None:
    class Ending(Installed):
        async def list_all(self, kind: str, namespace: str) -> tuple[list[Object], int]:
            found = await super().list_all(kind, namespace)
            self.list_faults = {namespace: ForbiddenError("403")}
            return found

    await installation.delete_all(Ending(), ("a",))


@pytest.mark.parametrize("scope", [(), ("a",), ("a", "b")])
async def test_an_uninstall_that_may_list_nothing_fails(scope: tuple[str, ...]) -> None:
    api = Installed(list_faults={where: ForbiddenError("403") for where in scope or ("",)})
    with pytest.raises(ForbiddenError):
        await installation.delete_all(api, scope)


async def test_a_resource_that_stays_is_named() -> None:
    api = Installed(held={"one"})
    api.create_resource(("a", "one"), DEMO)
    with pytest.raises(NotReadyError, match=r"finalizer .*\('a', 'one'\)"):
        await installation.delete_all(api, (), seconds=MOMENT)
