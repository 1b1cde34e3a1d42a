"""Bodies to requests, away from the event loop if they are large."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ssd_gateway.body_limits import BodyLimits
from ssd_gateway.schemas import AnyRequest, PreparedRequest, parse

SMALL_BYTES = 32 * 1024
"""A body of this size is parsed in at most 3 ms."""


class RequestParser:
    """Parses bodies. Asyncio loop."""

    def __init__(self) -> None:
        # One thread: the interpreter lock is held while the library parses, so the event loop
        # would wait for each of several threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parser")

    async def prepare(
        self, kind: type[AnyRequest], body: bytes, limits: BodyLimits
    ) -> PreparedRequest:
        """Return the request of a JSON body.

        Raises:
            TooLargeError: it has too many values.
            RequestError: it is not valid or asks for something that is not supported.
        """
        if len(body) <= SMALL_BYTES:
            return _prepare(kind, body, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _prepare, kind, body, limits)


def _prepare(kind: type[AnyRequest], body: bytes, limits: BodyLimits) -> PreparedRequest:
    limits.check_values(body)
    return parse(kind, body).prepared()
