"""Two gloo communicators in one process, and what they hold of the system."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

from ssd.runtime.threads import in_daemon_thread
from ssd.transport import gloo
from ssd.transport.communicator import Place
from ssd.transport.gloo import GlooCommunicator
from ssd.transport.rendezvous import LinkStore

SECONDS = 20.0
"""Long: a busy machine makes a good set-up slow."""


def stores(seconds: float = SECONDS) -> tuple[LinkStore, LinkStore]:
    """Return two stores that send their entries to each other."""
    near = LinkStore(lambda key, value: far.put(key, value), seconds)  # noqa: PLW0108
    far = LinkStore(near.put, seconds)
    return near, far


def place(rank: int, seconds: float = SECONDS) -> Place:
    """Return an end on this machine."""
    return Place(rank, "cpu", "127.0.0.1", seconds)


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[tuple[GlooCommunicator, GlooCommunicator]]:
    """Two communicators that are connected. Inside, the test closes them."""
    near, far = await asyncio.gather(
        *(
            in_daemon_thread(partial(gloo.connect, store, place(rank)))
            for rank, store in enumerate(stores())
        )
    )
    yield near, far


@contextlib.contextmanager
def connections() -> Iterator[dict[tuple[object, object], socket.socket]]:
    """The connected sockets of this process, by own and peer address; copies of the descriptors."""
    found = {}
    with contextlib.ExitStack() as stack:
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                each = stack.enter_context(socket.socket(fileno=os.dup(int(descriptor.name))))
                if each.family == socket.AF_INET:
                    found[each.getsockname(), each.getpeername()] = each
        yield found


def sent_bytes(connection: socket.socket) -> int:
    """Bytes that the peer has acknowledged."""
    (acknowledged,) = struct.unpack_from(
        "<Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200), 120
    )
    return int(acknowledged)


def held() -> tuple[int, int]:
    """Return the numbers of open descriptors and of threads of this process, those of gloo too."""
    me = Path("/proc/self")
    descriptors, threads = (len(list((me / each).iterdir())) for each in ("fd", "task"))
    return descriptors, threads


async def until_released(before: tuple[int, int]) -> None:
    """Wait until this process has no more descriptors and threads than before."""
    async with asyncio.timeout(SECONDS):
        while any(now > then for now, then in zip(held(), before, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0)
