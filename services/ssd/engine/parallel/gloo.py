"""The communicator between CPUs, over localhost."""

from datetime import timedelta

from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store

from ssd.engine.parallel.shard import Shard

KIND = ProcessGroup.BackendType.GLOO
HOST = "127.0.0.1"


def connect(store: Store, shard: Shard, device: str, timeout: timedelta) -> ProcessGroupGloo:
    """Connect this rank to the others."""
    del device
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
    # The default is the address of the host's name, which may not exist or face a network.
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    options._threads = 2  # noqa: SLF001
    return ProcessGroupGloo(store, shard.rank, shard.size, options)
