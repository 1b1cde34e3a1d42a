"""Messages between two processes over a collective channel.

With one GPU, both processes share it, which NCCL allows if it takes them for two hosts.
"""

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection, wait
from time import perf_counter

import numpy as np
from tests.gpu.environment import Figure

from ssd.errors import LinkError
from ssd.transport.communicator import (
    DRAFT_RANK,
    TARGET_RANK,
    Buffer,
    Communicator,
    Place,
    backend,
)
from ssd.transport.probe import probe
from ssd.transport.rendezvous import LinkStore

SECONDS = 60.0
"""Maximum time of each step of the two processes."""
NUM_MESSAGES = 200
MESSAGE_WORDS = 308
"""A table of the default settings."""


def exchange(name: str, devices: tuple[str, str]) -> dict[str, Figure]:
    """Exchange messages between two processes.

    Raises:
        LinkError: the processes could not connect, one of them ended, or a message changed.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    result, results = context.Pipe(duplex=False)
    ends = [
        context.Process(
            target=run_end, args=(rank, name, devices[rank], store, results), daemon=True
        )
        for rank, store in ((TARGET_RANK, near), (DRAFT_RANK, far))
    ]
    try:
        for end in ends:
            end.start()
        ready = wait([result, *(end.sentinel for end in ends)], 2 * SECONDS)
        if not result.poll():
            ended = [end for end in ends if end.sentinel in ready]
            for end in ended:
                end.join()
            problem = f"a process ended with {ended[0].exitcode}" if ended else "no process ended"
            raise LinkError(f"{name}: no result: {problem}")
        kind, *values = result.recv_bytes().decode().split("\n")
    finally:
        for end in ends:
            end.kill()
            end.join()
    if kind == "error":
        raise LinkError(f"{name}: {values[0]}")
    transport, round_trip, bandwidth, message = values
    return {
        "backend": name,
        "transport": transport,
        "devices": " and ".join(devices),
        "round_trip_of_4_kib_us": round(float(round_trip) * 1e6, 1),
        "bandwidth_gb_per_second": round(float(bandwidth) / 1e9, 2),
        "round_trip_of_a_table_us": round(float(message) * 1e6, 1),
    }


def run_end(rank: int, name: str, device: str, peer: Connection, results: Connection) -> None:
    """Connect to the other end, exchange messages and report; the function of a process."""
    # Two ranks may share a GPU if NCCL takes them for two hosts.
    os.environ["NCCL_HOSTID"] = f"gpu-check-{rank}"  # noqa: TID251 - of this process, for NCCL
    store = LinkStore(lambda key, value: peer.send_bytes(key.encode() + b"\0" + value), SECONDS)
    threading.Thread(target=_read_entries, args=(peer, store), daemon=True).start()
    try:
        communicator = backend(name).connect(store, Place(rank, device, "127.0.0.1", SECONDS))
        quality = probe(communicator, store, rank, perf_counter, lambda: None)
        seconds = _exchange(communicator, rank)
        values = (quality.round_trip_seconds, quality.bytes_per_second, seconds)
        report = "\n".join(("ok", communicator.transport, *map(str, values)))
    except LinkError as error:
        report = f"error\n{error}"
    # The echoing end has nothing to report, except an error.
    if rank == TARGET_RANK or not report.startswith("ok"):
        results.send_bytes(report.encode())
    threading.Event().wait(SECONDS)


def _read_entries(peer: Connection, store: LinkStore) -> None:
    while True:
        try:
            key, _, value = peer.recv_bytes().partition(b"\0")
        except EOFError:
            store.close("the other process ended")
            return
        store.put(key.decode(), value)


def _exchange(communicator: Communicator, rank: int) -> float:
    """Send messages, which the other end returns; return the mean seconds of a round trip.

    Raises:
        LinkError: a message came back with other contents.
    """
    message = communicator.buffer(MESSAGE_WORDS)
    started = perf_counter()
    for number in range(NUM_MESSAGES):
        if rank == DRAFT_RANK:
            _receive(communicator, message)
            _send(communicator, message)
            continue
        expected = np.arange(MESSAGE_WORDS, dtype=np.int32) * (number + 1)
        message.words[:] = expected
        _send(communicator, message)
        message.words[:] = -1
        _receive(communicator, message)
        if not np.array_equal(message.words, expected):
            raise LinkError(f"message {number} of {NUM_MESSAGES} came back changed")
    return (perf_counter() - started) / NUM_MESSAGES


def _send(communicator: Communicator, message: Buffer) -> None:
    communicator.start_send(message, MESSAGE_WORDS)
    communicator.end_send()


def _receive(communicator: Communicator, message: Buffer) -> None:
    communicator.start_receive(message)
    communicator.end_receive()
