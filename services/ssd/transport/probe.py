"""The measurement of a new communicator, before it carries frames. It also proves that it works."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ssd.transport.communicator import TARGET_RANK, WORD_BYTES, Buffer, Communicator
from ssd.transport.rendezvous import LinkStore

PING_BYTES = 4096
NUM_PINGS = 9
"""The result is their median: the first ones are slow because caches are cold."""
NUM_LARGE = 3
"""The result is the fastest: in the first one, backends allocate their buffers."""
_TICK_SECONDS = 1e-9
"""Resolution of a clock."""


@dataclass(frozen=True, slots=True)
class ChannelQuality:
    """The measurement of a communicator, beside the gRPC stream of its link."""

    round_trip_seconds: float
    """Median round trip of 4 KiB."""
    grpc_seconds: float
    """Median round trip of 4 KiB on the stream, measured in turn with the communicator."""
    bytes_per_second: float
    """Bandwidth of one large message with its 4 KiB echo, which is a lower bound."""


def probe(
    communicator: Communicator,
    store: LinkStore,
    rank: int,
    now: Callable[[], float],
    deliver: Callable[[], object],
) -> ChannelQuality:
    """Measure a communicator. Both ends call it at the same time; blocks.

    Args:
        communicator: nothing else uses it.
        store: of the same link; its entries travel on the stream.
        rank: of this end. The draft echoes, and its result is not meaningful.
        now: returns the seconds of any clock.
        deliver: waits for the asyncio loop, as a message of the stream and a frame do.

    Raises:
        LinkError: the connection is lost, or the communicator was aborted.
    """
    is_target = rank == TARGET_RANK
    ping = communicator.buffer(PING_BYTES // WORD_BYTES)
    large = communicator.buffer(communicator.num_probe_bytes // WORD_BYTES)

    def exchange(send: Callable[[], object], receive: Callable[[], object]) -> float:
        began = now()
        for step in (send, receive) if is_target else (receive, send):
            step()
        return now() - began

    def collective(message: Buffer) -> float:
        outgoing, incoming = (message, ping) if is_target else (ping, message)

        def send() -> None:
            communicator.start_send(outgoing, len(outgoing.words))
            communicator.end_send()

        def receive() -> None:
            communicator.start_receive(incoming)
            communicator.end_receive()
            deliver()

        return exchange(send, receive)

    def grpc(number: int) -> float:
        return exchange(
            lambda: store.set(f"ping {number} of {rank}", bytes(PING_BYTES)),
            lambda: store.get(f"ping {number} of {1 - rank}"),
        )

    pings = [(collective(ping), grpc(number)) for number in range(NUM_PINGS)]
    seconds = min(collective(large) for _ in range(NUM_LARGE))
    return ChannelQuality(
        round_trip_seconds=statistics.median(took for took, _ in pings),
        grpc_seconds=statistics.median(took for _, took in pings),
        bytes_per_second=communicator.num_probe_bytes / max(seconds, _TICK_SECONDS),
    )
