import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

import pytest
from kubernetes_asyncio.client import ApiException, CustomObjectsApi

from ssd.errors import NotReadyError, SetupError
from ssd_operator.api.spec import Object
from ssd_operator.runtime import installation

MOMENT = 0.05


class FakeApi:
    """Resources in memory; an old CRD has no accelerators and rejects none."""

    def __init__(self, *, knows_accelerators: bool = True, condition: Object | None = None) -> None:
        self.stored: dict[tuple[str, str], Object] = {}
        self.held: set[str] = set()
        self._knows_accelerators = knows_accelerators
        self._status = {"conditions": [condition]} if condition else {}

    async def create_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, body: Object, dry_run: str = ""
    ) -> Object:
        if self._knows_accelerators and body["spec"]["accelerator"] not in {"cpu", "nvidia"}:
            raise refused('spec.accelerator: Unsupported value: "abacus"')
        if dry_run != "All":
            self.stored[namespace, body["metadata"]["name"]] = body | {"status": self._status}
        return body

    async def get_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, name: str
    ) -> Object:
        return self.stored[namespace, name]

    async def delete_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, name: str
    ) -> None:
        if (namespace, name) not in self.stored:
            raise ApiException(status=404)
        if name not in self.held:
            del self.stored[namespace, name]

    async def list_cluster_custom_object(self, *kind: str) -> Object:
        return {
            "items": [{"metadata": {"namespace": at, "name": name}} for at, name in self.stored]
        }

    async def list_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str
    ) -> Object:
        everything = (await self.list_cluster_custom_object())["items"]
        return {
            "items": [item for item in everything if item["metadata"]["namespace"] == namespace]
        }


def refused(message: str) -> ApiException:
    error = ApiException(status=422)
    error.body = json.dumps({"message": message}).encode()
    return error


def as_api(fake: FakeApi) -> CustomObjectsApi:
    return cast("CustomObjectsApi", fake)


async def writes_a_text(endpoint: str) -> str:
    assert endpoint == "ssd-sample.here.svc:50051"
    return "return n"


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/readyz"
        server.shutdown()


async def test_an_operator_that_answers_is_ready() -> None:
    with answering(200) as url:
        await installation.check_ready(url)


async def test_an_operator_that_is_not_ready_by_the_deadline_is_named() -> None:
    with answering(500) as url, pytest.raises(NotReadyError, match=url):
        await installation.check_ready(url, seconds=MOMENT)


async def test_a_current_crd_passes_and_nothing_is_stored() -> None:
    api = FakeApi()
    await installation.check_admission(as_api(api), "here")
    assert api.stored == {}


async def test_a_crd_that_accepts_anything_is_found() -> None:
    with pytest.raises(SetupError, match="accepts accelerator abacus"):
        await installation.check_admission(as_api(FakeApi(knows_accelerators=False)), "here")


async def test_a_rejected_good_resource_is_reported_with_the_servers_message() -> None:
    class Forbids(FakeApi):
        async def create_namespaced_custom_object(self, *given: Any, dry_run: str = "") -> Object:
            raise refused("quota exceeded")

    with pytest.raises(SetupError, match="rejects a good SSDDeployment: quota exceeded"):
        await installation.check_admission(as_api(Forbids()), "here")


async def test_the_sample_serves_and_is_deleted() -> None:
    api = FakeApi(condition={"type": "Ready", "status": "True"})
    await installation.serve_sample(as_api(api), "here", writes_a_text)
    assert api.stored == {}


async def test_a_sample_that_never_serves_is_reported_with_its_condition_and_deleted() -> None:
    api = FakeApi(condition={"type": "Ready", "status": "False", "reason": "ImagePull"})
    with pytest.raises(NotReadyError, match=r"ssd-sample is not Ready after .* ImagePull"):
        await installation.serve_sample(as_api(api), "here", writes_a_text, seconds=MOMENT)
    assert api.stored == {}


async def test_a_sample_that_writes_nothing_fails() -> None:
    async def writes_nothing(endpoint: str) -> str:
        return ""

    api = FakeApi(condition={"type": "Ready", "status": "True"})
    with pytest.raises(SetupError, match="text is empty"):
        await installation.serve_sample(as_api(api), "here", writes_nothing)
    assert api.stored == {}


@pytest.mark.parametrize(
    ("scope", "left"), [((), set()), (("a",), {("b", "two")}), (("a", "b"), set())]
)
async def test_an_uninstall_deletes_what_is_in_scope(
    scope: tuple[str, ...], left: set[tuple[str, str]]
) -> None:
    api = FakeApi()
    api.stored = {("a", "one"): {}, ("b", "two"): {}}
    await installation.delete_all(as_api(api), scope)
    assert set(api.stored) == left


async def test_an_uninstall_without_the_definition_has_nothing_to_delete() -> None:
    class Gone(FakeApi):
        async def list_cluster_custom_object(self, *given: Any) -> Object:
            raise ApiException(status=404)

    await installation.delete_all(as_api(Gone()), ())


async def test_a_resource_that_stays_is_named() -> None:
    api = FakeApi()
    api.stored, api.held = {("a", "one"): {}}, {"one"}
    with pytest.raises(NotReadyError, match=r"finalizer .*\('a', 'one'\)"):
        await installation.delete_all(as_api(api), (), seconds=MOMENT)
