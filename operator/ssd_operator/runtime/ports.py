"""The operator's HTTP ports: probes and metrics, answered by the loop that does the work.

A loop that stalls answers neither, and the kubelet restarts the process.

*Decision*: kopf's liveness endpoint is not used. *Because* it has one path, caches its answer for
10 s and starts with the watches (kopf 1.45), but an operator that waits for its CRD has to be alive
and not ready before it watches. *Revisit when* kopf serves several paths from the start.
"""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from ssd.errors import AddressError
from ssd.rpc.listen import bindable


def probe(check: Callable[[], str]) -> Handler:
    """Answer 200, or 503 with the problem that a check returns."""

    async def answer(_: web.Request) -> web.Response:
        problem = check()
        status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        return web.Response(status=status, text=problem or "ok")

    return answer


@contextlib.asynccontextmanager
async def serve(port: int, what: str, routes: Mapping[str, Handler]) -> AsyncIterator[int]:
    """Answer while the block runs; yields the port, which is another one for 0.

    Raises:
        AddressError: the port is in use.
    """
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_get(path, handler)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, _listening(port, what)).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _listening(port: int, what: str) -> socket.socket:
    family, host = bindable("::")
    is_dual = family == socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise AddressError(
            f"cannot listen on port {port} for {what}: {os.strerror(error.errno or 0)}; "
            f"choose another --{what}-port"
        ) from error
