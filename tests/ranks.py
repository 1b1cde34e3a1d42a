"""Ranks as threads of one process, connected by gloo: for tests of what ranks compute."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ssd.engine.parallel.group import HOST, RankGroup, join
from ssd.engine.parallel.shard import Shard

Result = TypeVar("Result")


def on_ranks(size: int, run: Callable[[RankGroup], Result]) -> list[Result]:
    """Run a function on each rank of a group, at the same time; return the results by rank.

    A rank that raises fails the others too: their collectives end.
    """
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]

    def rank(number: int) -> Result:
        descriptor = listener.detach() if number == 0 else None
        return run(join(Shard(number, size), port, "cpu", descriptor))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))
