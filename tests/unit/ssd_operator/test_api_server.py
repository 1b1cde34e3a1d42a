"""Calls to an API server, as they look on its side."""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from kubernetes_asyncio import client

from ssd_operator.api_server import ApiServer
from ssd_operator.spec import KIND


@contextlib.asynccontextmanager
async def answering(*pages: object) -> AsyncIterator[tuple[ApiServer, list[web.Request]]]:
    """An API server that gives these answers, one a call, and what it was asked."""
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response(pages[len(asked) - 1])

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    async with client.ApiClient(settings) as api:
        yield ApiServer(api), asked
    await runner.cleanup()


def page(*names: str, token: str = "") -> object:
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
