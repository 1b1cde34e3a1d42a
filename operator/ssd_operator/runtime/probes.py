"""The kubelet's probes, answered by the loop that does the work: if it stalls, nobody does."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from http import HTTPStatus

from aiohttp import web

from ssd.errors import AddressError
from ssd.rpc.listen import bindable

Check = Callable[[], str]
"""What is wrong; empty if nothing is."""


@contextlib.asynccontextmanager
async def serve_probes(port: int, checks: Mapping[str, Check]) -> AsyncIterator[int]:
    """Answer while the block runs; yields the port, which is another one if 0 was asked for.

    Args:
        port: on every address.
        checks: by path. The answer is 200, or 503 with what is wrong.

    Raises:
        AddressError: the port is in use.
    """
    application = web.Application()
    for path, check in checks.items():
        application.router.add_get(path, partial(_answer, check))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, _listening(port)).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _listening(port: int) -> socket.socket:
    """A socket on each address of both families: the kubelet is outside, and knows one of them."""
    family, host = bindable("::")
    is_dual = family == socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise AddressError(
            f"cannot listen on port {port} for probes: {os.strerror(error.errno or 0)}; "
            "choose another --probe-port"
        ) from error


async def _answer(check: Check, _: web.Request) -> web.Response:
    problem = check()
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return web.Response(status=status, text=problem or "ok")
