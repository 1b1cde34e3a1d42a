"""Bodies of requests, and clients that leave. Works on ASGI messages."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ssd.errors import CancelledError, DeadlineError, OverloadedError, TooLargeError
from ssd_gateway.problems import MediaTypeError

BODY_SECONDS = 30.0
"""Maximum time until the body of a request has arrived."""
Result = TypeVar("Result")


class ClientLeftError(CancelledError):
    """The client closed the connection before the end of the response."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


class BodyBudget:
    """Bounds the bytes of the bodies of all requests in progress. Asyncio loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextlib.contextmanager
    def share(self) -> Generator[Callable[[int], None], None, None]:
        """Yield a function that takes bytes for a request; its end returns them.

        The function raises ``OverloadedError`` if too few are left.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self._num_bytes + num_bytes > self._max_bytes:
                raise OverloadedError(
                    f"the bodies of the requests in progress have {self._num_bytes} bytes; with "
                    f"this one they would pass {self._max_bytes}, the maximum of this gateway "
                    "(max_total_body_bytes)"
                )
            self._num_bytes += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self._num_bytes -= taken


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, take: Callable[[int], None]
) -> bytes:
    """Return the body of a request that is declared as JSON.

    A page of another origin can send a request without asking the browser only if it is not
    declared as JSON.

    Raises:
        MediaTypeError: it is not declared as JSON, or is compressed.
        TooLargeError: it is over ``max_bytes``.
        OverloadedError: ``take`` refused its bytes.
        DeadlineError: it did not arrive in time.
        ClientLeftError: the client left.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        found = f"Content-Type is {kind[:64]!r}" if kind else "Content-Type is missing"
        raise MediaTypeError(f"{found}; send the header 'Content-Type: application/json'")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(f"Content-Encoding is {encoding[:64]!r}; send a body without it")
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
                part = message.get("body", b"")
                if len(body) + len(part) > max_bytes:
                    raise too_large
                take(len(part))
                body += part
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
