"""Ends requests that run too long, or longer than the drain of the gateway."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from ssd.errors import DeadlineError, NotReadyError


class Deadlines:
    """The deadlines of all requests in progress, and whether the gateway drains. Asyncio loop."""

    def __init__(self, allowed_seconds: float) -> None:
        self._allowed_seconds = allowed_seconds
        self._open: set[asyncio.Timeout] = set()
        self._have_passed = False
        self.draining = asyncio.Event()
        """Set when the drain begins."""

    def pass_all(self) -> None:
        """End all requests, at the end of the drain: the HTTP server ends streams without an error.

        Later requests end at once.
        """
        self._have_passed = True
        for timeout in self._open:
            if not timeout.expired():
                timeout.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def bound(self) -> AsyncGenerator[None, None]:
        """Bound the time of a request.

        Raises:
            DeadlineError: it ran too long.
            NotReadyError: the drain ended first.
        """
        try:
            async with asyncio.timeout(0.0 if self._have_passed else self._allowed_seconds) as own:
                self._open.add(own)
                try:
                    yield
                finally:
                    self._open.discard(own)
        except TimeoutError as error:
            if self._have_passed:
                raise NotReadyError(
                    "the gateway cancelled the request, because it stops; the text is incomplete"
                ) from error
            raise DeadlineError(
                f"the request took {self._allowed_seconds:g} s, the maximum of this gateway "
                "(request_timeout_seconds); request fewer tokens"
            ) from error
