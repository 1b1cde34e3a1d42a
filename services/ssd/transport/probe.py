"""The measurement of a new communicator, before it carries frames. It also proves that it works."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ssd.transport.communicator import TARGET_RANK, Communicator, Slot

WORD_BYTES = 4
PING_BYTES = 4096
NUM_PINGS = 9
"""The result is their median: the first ones are slow because caches are cold."""
NUM_LARGE = 3
"""The result is the fastest: in the first one, backends allocate their buffers."""

_TICK_SECONDS = 1e-9
"""Resolution of a clock."""


@dataclass(frozen=True, slots=True)
class ChannelQuality:
    """The measurement of a communicator."""

    round_trip_seconds: float
    """Of 4 KiB, median."""
    bytes_per_second: float
    """Of one large message and its 4 KiB echo, so at least this much."""


def probe(communicator: Communicator, rank: int, now: Callable[[], float]) -> ChannelQuality:
    """Measure a communicator. Both ends call it at the same time; blocks.

    Args:
        communicator: without transfers.
        rank: of this end. The draft echoes, and its result is not meaningful.
        now: returns the seconds of any clock.

    Raises:
        LinkError: the connection is lost, or the communicator was aborted.
    """
    ping = communicator.slot(PING_BYTES // WORD_BYTES)
    large = communicator.slot(communicator.num_probe_bytes // WORD_BYTES)
    is_target = rank == TARGET_RANK
    round_trips = [_exchange(communicator, ping, ping, now, is_target) for _ in range(NUM_PINGS)]
    seconds = [_exchange(communicator, large, ping, now, is_target) for _ in range(NUM_LARGE)]
    return ChannelQuality(
        statistics.median(round_trips),
        communicator.num_probe_bytes / max(min(seconds), _TICK_SECONDS),
    )


def _exchange(
    communicator: Communicator,
    message: Slot,
    echo: Slot,
    now: Callable[[], float],
    is_target: bool,  # noqa: FBT001
) -> float:
    """Send a message and receive an echo, or the reverse; return the seconds."""
    began = now()
    if is_target:
        communicator.send(message, len(message.words)).wait()
        communicator.receive(echo).wait()
    else:
        communicator.receive(message).wait()
        communicator.send(echo, len(echo.words)).wait()
    return now() - began
