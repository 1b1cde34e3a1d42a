"""Bodies of requests, and clients that leave. Works on ASGI messages."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ssd.errors import CancelledError, OverloadedError, TooLargeError
from ssd.tasks import beside
from ssd_gateway.problems import BODY_READ_KEY, MediaTypeError, SlowBodyError

BODY_SECONDS = 30.0
"""Maximum time until the body of a request has arrived."""
PART_SECONDS = 5.0
"""Maximum time until the next ``PART_BYTES`` of a body, or its end, have arrived."""
PART_BYTES = 64 * 1024
Result = TypeVar("Result")


class ClientLeftError(CancelledError):
    """The client closed the connection before the end of the response."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


class BodyBudget:
    """Bounds the bytes of bodies that are received, and of prompts and whole responses in memory.

    Before its request runs, a client gets at most half of what the others leave, so no client can
    use all of it. Asyncio loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_request_bytes = max_bytes // 2
        """Maximum size of one request, which it can have only while there is no other."""
        self._by_client: Counter[str] = Counter()

    @contextlib.contextmanager
    def share(self, client: str) -> Generator["Share", None, None]:
        """Yield the share of a request of a client; its end returns the bytes."""
        share = Share(self, client)
        try:
            yield share
        finally:
            share.keep(0)

    def change(self, client: str, num_bytes: int, *, is_running: bool = False) -> None:
        """Give bytes to a client, or take them back.

        Raises:
            OverloadedError: the client would have more than its part, or more than there is for a
                request that runs.
        """
        new = self._by_client[client] + num_bytes
        left = self._max_bytes - self._by_client.total() + self._by_client[client]
        part, share = ("all", left) if is_running else ("half", left // 2)
        if num_bytes > 0 and new > share:
            raise OverloadedError(
                f"the requests of this client in progress would have {new} bytes, must have at "
                f"most {share}: {part} of what others leave of {self._max_bytes} "
                "(max_total_body_bytes)"
            )
        self._by_client[client] = new
        if not new:
            # The names of clients that have left would take memory.
            del self._by_client[client]


class Share:
    """The bytes of one request. Asyncio loop."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    def take(self, num_bytes: int, *, is_running: bool = False) -> None:
        """Take more bytes.

        Raises:
            TooLargeError: the request would have more than it could have alone.
            OverloadedError: see ``BodyBudget.change``.
        """
        if self._num_bytes + num_bytes > self._budget.max_request_bytes:
            raise TooLargeError(
                f"prompt and response would have over {self._budget.max_request_bytes} bytes, half "
                "of max_total_body_bytes; set stream, or ask for fewer tokens, choices or "
                "log-probabilities"
            )
        self._budget.change(self._client, num_bytes, is_running=is_running)
        self._num_bytes += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Return all but some bytes; no effect if it has fewer."""
        surplus = max(0, self._num_bytes - num_bytes)
        self._num_bytes -= surplus
        self._budget.change(self._client, -surplus)


async def read_body(scope: Scope, receive: Receive, max_bytes: int, share: Share) -> bytes:
    """Return the body of a request that is declared as JSON.

    A page of another origin can send a request without asking the browser only if it is not
    declared as JSON.

    Raises:
        MediaTypeError: it is not declared as JSON, or is compressed.
        TooLargeError: it is over ``max_bytes``.
        OverloadedError: ``share`` refused its bytes.
        SlowBodyError: it did not arrive in time, or too slowly.
        ClientLeftError: the client left.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        reason = f"Content-Type is {kind[:64]!r}" if kind else "Content-Type is missing"
        raise MediaTypeError(f"{reason}; send the header 'Content-Type: application/json'")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(f"Content-Encoding is {encoding[:64]!r}; send a body without it")
    too_large = TooLargeError(f"the body is over the limit of {max_bytes} bytes")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:18]) > max_bytes:
        raise too_large
    loop = asyncio.get_running_loop()
    end_at = loop.time() + BODY_SECONDS
    body = bytearray()
    num_timed = 0
    try:
        async with asyncio.timeout_at(min(end_at, loop.time() + PART_SECONDS)) as deadline:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                part = message.get("body", b"")
                if len(body) + len(part) > max_bytes:
                    raise too_large
                share.take(len(part))
                body += part
                if not message.get("more_body", False):
                    scope[BODY_READ_KEY] = True
                    return bytes(body)
                if len(body) - num_timed >= PART_BYTES:
                    num_timed = len(body)
                    deadline.reschedule(min(end_at, loop.time() + PART_SECONDS))
    except TimeoutError as error:
        raise SlowBodyError(
            f"the body arrives too slowly: {len(body)} bytes so far; send {PART_BYTES} bytes "
            f"every {PART_SECONDS:g} s, and all within {BODY_SECONDS:g} s"
        ) from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work after the body has been read; cancel it when the client leaves.

    Raises:
        ClientLeftError: the client left.
    """
    async with beside(work, _left(receive)) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientLeftError
        result: Result = tasks[0].result()
        return result


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
