"""Calls to an API server, as they look on its side."""

import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes_asyncio import client

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import ConflictError, RefusedError
from ssd_operator.runtime.api_server import ApiServer


@contextlib.asynccontextmanager
async def answering(*pages: Object) -> AsyncIterator[tuple[ApiServer, list[web.Request]]]:
    """An API server that gives these answers, one a call, and what it was asked."""
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        page = pages[len(asked) - 1]
        await request.read()  # it stays readable after the answer
        return web.json_response(page, status=page.get("code", 200))

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with client.ApiClient(settings) as api:
        yield ApiServer(api), asked
    await runner.cleanup()


def page(*names: str, token: str = "") -> Object:
    items = [
        {"metadata": {"namespace": "here", "name": name, "uid": f"uid-{name}"}} for name in names
    ]
    return {"metadata": {"continue": token}, "items": items}


async def test_a_long_list_is_read_page_by_page_without_the_objects() -> None:
    async with answering(page("a", "b", token="more"), page("c")) as (cluster, asked):
        found = await cluster.list_keys("Pod", "here")
    assert found == {("here", "a"), ("here", "b"), ("here", "c")}
    assert [request.path for request in asked] == ["/api/v1/namespaces/here/pods"] * 2
    assert [request.query.get("continue") for request in asked] == [None, "more"]
    assert all("as=PartialObjectMetadataList" in request.headers["Accept"] for request in asked)


async def test_a_list_of_nothing_comes_as_null() -> None:
    async with answering({"metadata": {}, "items": None}) as (cluster, asked):
        assert await cluster.list_keys("SSDDeployment", "") == set()
    assert asked[0].path == "/apis/ssd.dev/v1alpha1/ssddeployments"


async def test_whether_a_kind_may_be_listed_costs_one_page() -> None:
    async with answering(page("a", token="more")) as (cluster, asked):
        assert await cluster.list_keys("Pod", "here", most=1) == {("here", "a")}
    assert asked[0].query["limit"] == "1"


async def test_a_list_of_nothing_has_no_uids() -> None:
    async with answering({"metadata": {}, "items": None}) as (cluster, _):
        assert await cluster.uids("Pod", "") == frozenset()


async def test_all_pages_of_uids_are_read_and_only_of_what_is_ours() -> None:
    async with answering(page("a", token="more"), page("b")) as (cluster, asked):
        assert await cluster.uids("Pod", "here") == {"uid-a", "uid-b"}
    assert asked[1].path == "/api/v1/namespaces/here/pods"
    assert asked[1].query["continue"] == "more"
    selector = "app.kubernetes.io/managed-by=ssd-operator"
    assert [request.query["labelSelector"] for request in asked] == [selector] * 2
    assert all("as=PartialObjectMetadataList" in request.headers["Accept"] for request in asked)


async def test_resources_are_listed_whatever_their_labels() -> None:
    async with answering(page("a")) as (cluster, asked):
        assert await cluster.uids(KIND, "") == {"uid-a"}
    assert asked[0].path == "/apis/ssd.dev/v1alpha1/ssddeployments"
    assert "labelSelector" not in asked[0].query


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
"""What an API server of Kubernetes 1.34 says."""


@pytest.mark.parametrize("answer", [GONE, REPLACED], ids=["gone", "replaced"])
async def test_an_object_that_is_not_the_one_that_was_meant_is_no_fault_of_ours(
    answer: Object,
) -> None:
    wanted = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "a", "name": "demo"}}
    async with answering(answer) as (cluster, asked):
        with pytest.raises(ConflictError):
            await cluster.apply(wanted, "uid-1")
        sent = json.loads(await asked[0].text())
    assert sent["metadata"]["uid"] == "uid-1"
    assert "uid" not in wanted["metadata"]


async def test_an_object_that_may_be_somebody_elses_keeps_its_lists() -> None:
    wanted = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "a", "name": "demo"}}
    refusal = {"code": 422, "message": "Only one reference can have Controller set to true"}
    async with answering(refusal) as (cluster, asked):
        with pytest.raises(RefusedError):
            await cluster.apply(wanted)
    (call,) = asked
    assert call.headers["Content-Type"] == "application/apply-patch+yaml"


async def test_what_others_added_is_removed_if_it_is_still_what_was_seen() -> None:
    live = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "a", "name": "demo", "uid": "uid-1", "labels": {"a/b": "x"}},
        "spec": {"list": [1, 2]},
    }
    async with answering({}) as (cluster, asked):
        await cluster.prune(live, [("spec", "list", 1), ("metadata", "labels", "a/b")])
        sent = json.loads(await asked[0].text())
    assert asked[0].method == "PATCH"
    assert asked[0].content_type == "application/json-patch+json"
    assert sent == [
        {"op": "test", "path": "/metadata/uid", "value": "uid-1"},
        {"op": "test", "path": "/spec/list/1", "value": 2},
        {"op": "remove", "path": "/spec/list/1"},
        {"op": "test", "path": "/metadata/labels/a~1b", "value": "x"},
        {"op": "remove", "path": "/metadata/labels/a~1b"},
    ]
    refusal = {"code": 422, "message": "test failed"}
    async with answering(refusal, {"code": 404}) as (cluster, _):
        with pytest.raises(ConflictError):
            await cluster.prune(live, [("spec", "list", 1)])


async def test_a_removal_that_a_policy_refuses_is_no_conflict() -> None:
    metadata = {"namespace": "a", "name": "demo", "uid": "uid-1", "resourceVersion": "7"}
    live: Object = {"kind": "Service", "metadata": metadata, "spec": {"list": [1, 2]}}
    for version, error in (("7", RefusedError), ("8", ConflictError)):
        now = {**live, "metadata": {**metadata, "resourceVersion": version}}
        refusal: Object = {"code": 422, "message": "the variable is required"}
        async with answering(refusal, now) as (cluster, _):
            with pytest.raises(error):
                await cluster.prune(live, [("spec", "list", 1)])
