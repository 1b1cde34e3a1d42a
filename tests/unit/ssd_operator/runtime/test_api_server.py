"""Calls to an API server, as it receives them."""

import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes_asyncio import client

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import (
    BusyError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    MissingError,
    Ref,
    RefusedError,
)
from ssd_operator.runtime.api_server import ApiServer


@contextlib.asynccontextmanager
async def answering(*pages: Object) -> AsyncIterator[tuple[ApiServer, list[web.Request]]]:
    """An API server that returns these answers, one a call, and the requests that it received."""
    requests: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(request)
        page = pages[len(requests) - 1]
        await request.read()  # it stays readable after the answer
        return web.json_response(page, status=page.get("code", 200))

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with client.ApiClient(settings) as api:
        yield ApiServer(api), requests
    await runner.cleanup()


def page(*names: str, token: str = "") -> Object:
    fields = [{"manager": "ssd-operator", "fieldsV1": {"f:spec": {}}}]
    metadata = {"namespace": "here", "managedFields": fields}
    items = [{"metadata": {**metadata, "name": name}} for name in names]
    return {"metadata": {"continue": token, "resourceVersion": "7"}, "items": items}


async def test_a_long_list_is_read_page_by_page_and_each_object_has_its_kind() -> None:
    async with answering(page("a", "b", token="more"), page("c")) as (cluster, requests):
        things, version = await cluster.list_all("Pod", "here")
    wanted = {"apiVersion": "v1", "kind": "Pod"}
    assert things == [
        {**wanted, "metadata": {"namespace": "here", "name": name}} for name in "abc"
    ], "and who wrote which field is half of its size"
    assert version == 7
    assert [request.path for request in requests] == ["/api/v1/namespaces/here/pods"] * 2
    assert [request.query.get("continue") for request in requests] == [None, "more"]
    selector = "app.kubernetes.io/managed-by=ssd-operator,!service.kubernetes.io/headless"
    assert [request.query["labelSelector"] for request in requests] == [selector] * 2


async def test_resources_are_listed_whatever_their_labels_and_a_list_of_nothing_is_null() -> None:
    empty = {"metadata": {"resourceVersion": "7"}, "items": None}
    async with answering(empty) as (cluster, requests):
        assert await cluster.list_all(KIND, "") == ([], 7)
    assert requests[0].path == "/apis/ssd.dev/v1alpha1/ssddeployments"
    assert "labelSelector" not in requests[0].query


async def test_a_page_of_a_proxy_in_place_of_a_list_is_an_error_that_is_tried_again() -> None:
    async with answering({"message": "<html>Sign in"}) as (cluster, _):
        with pytest.raises(BusyError, match="/api/v1/pods: no list: <html>Sign in"):
            await cluster.list_all("Pod", "")


GONE = {
    "code": 409,
    "message": "uid mismatch: the provided object specified uid uid-1, and no existing object was "
    "found",
    "details": {"name": "demo", "kind": "services"},
}
REPLACED = {
    "code": 422,
    "message": 'metadata.uid: Invalid value: "uid-1": field is immutable',
    "details": {"causes": [{"reason": "FieldValueInvalid", "field": "metadata.uid"}]},
}
ENDING = {
    "code": 403,
    "message": 'services "demo" is forbidden: unable to create new content in namespace a because '
    "it is being terminated",
    "details": {"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]},
}
"""What an API server of Kubernetes 1.34 answers."""


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (GONE, ConflictError),
        (REPLACED, ConflictError),
        (ENDING, MissingError),
        ({"code": 401, "message": "Unauthorized"}, BusyError),
        ({"code": 403, "message": "exceeded quota"}, ForbiddenError),
        ({"code": 422, "message": "spec.ports: Required value"}, RefusedError),
    ],
)
async def test_each_refusal_is_the_error_that_decides_what_a_pass_does(
    answer: Object, kind: type[ClusterError]
) -> None:
    wanted = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "a", "name": "demo"}}
    async with answering(answer) as (cluster, requests):
        with pytest.raises(kind, match=f"PATCH .*/demo: {answer['code']} {answer['message']}"):
            await cluster.apply(wanted, "uid-1")
        sent = json.loads(await requests[0].text())
    assert sent["metadata"]["uid"] == "uid-1"
    assert "uid" not in wanted["metadata"]


async def test_a_patch_is_a_merge_patch_of_our_field_manager() -> None:
    async with answering({"kind": "Scale"}) as (cluster, requests):
        await cluster.patch("a", Ref(KIND, "demo"), {"spec": {"replicas": 2}}, "scale")
        sent = json.loads(await requests[0].text())
    assert (requests[0].method, requests[0].content_type) == (
        "PATCH",
        "application/merge-patch+json",
    )
    assert requests[0].path == "/apis/ssd.dev/v1alpha1/namespaces/a/ssddeployments/demo/scale"
    assert requests[0].query["fieldManager"] == "ssd-operator"
    assert sent == {"spec": {"replicas": 2}}
