"""The operator's HTTP ports."""

import socket

import aiohttp
import pytest
from prometheus_client.aiohttp import make_aiohttp_handler

from ssd.errors import AddressError
from ssd_operator.runtime import metrics
from ssd_operator.runtime.ports import probe, serve


async def test_a_port_in_use_is_named_with_its_flag() -> None:
    with socket.create_server(("", 0)) as other:
        port = int(other.getsockname()[1])
        message = rf"port {port} for metrics: Address already in use; choose another --metrics-port"
        with pytest.raises(AddressError, match=message):
            async with serve(port, "metrics", {}):
                pass


async def test_metrics_are_served_until_the_block_ends() -> None:
    routes = {"/metrics": make_aiohttp_handler(metrics.REGISTRY)}
    async with serve(0, "metrics", routes) as port:
        assert "ssd_operator_reconcile_seconds" in (await get(port, "/metrics"))[1]
    async with serve(port, "metrics", routes) as again:
        assert again == port


async def test_a_probe_answers_with_the_problem_on_both_families() -> None:
    problems = ["starting"]
    routes = {"/healthz": probe(lambda: ""), "/readyz": probe(lambda: problems[0])}
    async with serve(0, "probe", routes) as port:
        assert await get(port, "/healthz") == (200, "ok")
        if socket.has_dualstack_ipv6():
            answer = await get(port, "/healthz", "[::1]")
            assert answer == (200, "ok"), "the kubelet of an IPv6-only cluster has no IPv4"
        assert await get(port, "/readyz") == (503, "starting")
        problems[0] = ""
        assert await get(port, "/readyz") == (200, "ok")


async def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()
