"""How the two ends of a link know that it lives, and what they do when it does not."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ssd.errors import LinkError

BEAT_SECONDS = 0.25
"""Pause between two signs of life."""
LEASE_SECONDS = 1.5
"""Silence after which a peer counts as gone."""
HANDSHAKE_SECONDS = 5.0
"""How long either end waits for the other's first word."""

Ending = TypeVar("Ending")


class Allowance:
    """How fast messages are taken: ``burst`` units at once, then ``per_second``. Pure."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._unit_seconds = 1.0 / per_second
        self._burst_seconds = burst / per_second
        self._paid_until = -float("inf")

    def spend(self, units: float, now: float) -> float:
        """Seconds to wait before the next message, after one of so many units; 0 in the burst."""
        start = max(self._paid_until, now - self._burst_seconds)
        self._paid_until = start + units * self._unit_seconds
        return max(0.0, self._paid_until - now)


def as_link_error(error: Exception) -> LinkError:
    """What a channel reports, as an error of the link."""
    return error if isinstance(error, LinkError) else LinkError(str(error))


async def first_result(*endings: Awaitable[Ending]) -> Ending:
    """Wait for the first of several endings; the others are cancelled and waited for.

    Raises:
        Exception: what the first one raised.
    """
    tasks = {asyncio.ensure_future(ending) for ending in endings}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
