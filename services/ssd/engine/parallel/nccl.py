"""The communicator between GPUs; imported only with CUDA.

A collective that does not end within its time-out ends the process: torch's watchdog aborts the
communicator and the process with it. Rank 0 waits longer, so that it can name the rank that does
not answer.
"""

from datetime import timedelta

import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupNCCL, Store

from ssd.engine.parallel.shard import Shard

KIND = ProcessGroup.BackendType.NCCL


def connect(store: Store, shard: Shard, device: str, timeout: timedelta) -> ProcessGroupNCCL:
    """Connect the GPU of this rank to those of the others."""
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    backend = ProcessGroupNCCL(store, shard.rank, shard.size, options)
    backend.eager_connect_single_device(torch.device(device))
    return backend
