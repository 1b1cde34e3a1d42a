"""Bodies of requests, and clients that leave. Works on ASGI messages."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ssd.errors import CancelledError, DeadlineError, TooLargeError
from ssd_gateway.problems import MediaTypeError

BODY_SECONDS = 30.0
"""Maximum time until the body of a request has arrived."""
Result = TypeVar("Result")


class ClientLeftError(CancelledError):
    """The client closed the connection before the end of the response."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the body of a request that is declared as JSON.

    A page of another origin can send a request without asking the browser only if it is not
    declared as JSON.

    Raises:
        MediaTypeError: it is not declared as JSON.
        TooLargeError: it is over ``max_bytes``.
        DeadlineError: it did not arrive in time.
        ClientLeftError: the client left.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError(f"Content-Type is {kind[:64]!r}, must be 'application/json'")
    too_large = TooLargeError(f"the body is over the limit of {max_bytes} bytes")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:18]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise DeadlineError(f"the body did not arrive within {BODY_SECONDS:g} s") from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work after the body has been read; cancel it when the client leaves.

    Raises:
        ClientLeftError: the client left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
