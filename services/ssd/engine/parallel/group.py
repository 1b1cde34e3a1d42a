"""The ranks of one model as a group: what a layer or an execution needs from the other ranks.

A group has two communicators. One carries the tensors of layers: gloo between CPUs, NCCL between
GPUs. One carries steps from rank 0 in host memory, with gloo on every device: a rank waits for the
next step without a deadline and without its device. All sockets are on localhost.

*Decision*: ``add`` gathers the parts and adds them in the order of the ranks, in float32.
*Because*: an all-reduce adds in an order that depends on the place of a value in the tensor. The
bits of a row would depend on its place in the batch, and plain decoding could differ from
speculation. For the few rows of a verify, a gather also has fewer phases. *Not chosen*: an
all-reduce, which moves fewer bytes for long chunks of prompts. *Revisit when* a collective that
reduces in a fixed order exists on every platform.

*Decision*: communicators are objects, not the default group of ``torch.distributed``. *Because*:
a process can have other groups, such as those of its links.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    Backend,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from ssd.engine.capture import CaptureError, is_capturing
from ssd.engine.parallel.shard import WHOLE, Shard
from ssd.errors import RankError

HOST = "127.0.0.1"
JOIN_SECONDS = 30.0
"""Deadline for the connections of all ranks."""
START_SECONDS = 300.0
"""Deadline of a collective until the target serves: ranks compile at different speeds, and a GPU's
kernels and samplers take minutes if no earlier start has left them in a cache."""
LOAD_SECONDS = 1800.0
"""Deadline for the weights of all ranks: one can read from a disk while another has them cached."""
SERVICE_SECONDS = 5.0
"""Deadline of a collective while the target serves."""
STEP_DEADLINES = 3
"""Deadline of a whole step, in deadlines of a collective. Collectives in a CUDA graph have none of
their own, and a rank can hang outside of them."""
NAMING_SECONDS = 3.0
"""Time in which rank 0 finds the rank that does not answer, after the others have ended."""
_STEP_TAG = 1
_STEP_WAIT = timedelta(days=365)
"""A rank waits for a step as long as the target has no request. It ends with rank 0."""


class Group:
    """The ranks of a model, as layers and executions use them: here one, which has it all.

    Step thread only.

    Raises:
        RankError: from each method; another rank has ended or does not answer.
    """

    shard = WHOLE
    """The rank of this process."""

    def add(self, part_XD: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, the same bits on each rank."""
        return part_XD

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks, once all have loaded their weights."""
        return number

    def begin_service(self) -> None:
        """Use ``SERVICE_SECONDS`` from now on; rank 0, once its target is ready."""


ALONE = Group()
"""The group of a model that is not split."""


class RankGroup(Group):
    """One rank of several. Step thread only."""

    def __init__(self, shard: Shard, steps: ProcessGroup, tensors: ProcessGroup) -> None:
        self.shard = shard
        self._steps: ProcessGroup | None = steps
        self._tensors = tensors
        self._deadline_seconds = JOIN_SECONDS
        self.set_deadline(START_SECONDS)

    @property
    def deadline_seconds(self) -> float:
        """Deadline of each collective except ``smallest`` and a rank's wait for a step."""
        return self._deadline_seconds

    def set_deadline(self, seconds: float) -> None:
        """Set ``deadline_seconds``."""
        if seconds != self._deadline_seconds:
            self._deadline_seconds = seconds
            # NCCL ends a process that waits longer; rank 0 then has to name the rank.
            margin = NAMING_SECONDS if self.shard.rank == 0 else 0.0
            self._tensors.set_timeout(timedelta(seconds=seconds + margin))

    def add(self, part_XD: Tensor) -> Tensor:
        """See ``Group.add``."""
        first_XD, *others, last_XD = self.gather(part_XD).unbind()
        total_XD = first_XD.to(torch.float32, copy=bool(others))
        for other_XD in others:
            total_XD += other_XD
        # The last addition rounds to the dtype of the parts.
        return torch.add(total_XD, last_XD, out=torch.empty_like(part_XD))

    def gather(self, part_X: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, along a new first dimension."""
        return self._gathered(self._tensors, part_X, self._deadline_seconds)

    def smallest(self, number: int) -> int:
        """See ``Group.smallest``."""
        assert self._steps is not None
        numbers_N1 = self._gathered(self._steps, torch.tensor([number]), LOAD_SECONDS)
        return int(numbers_N1.min())

    def begin_service(self) -> None:
        """See ``Group.begin_service``; other ranks receive the deadline with each step."""
        self.set_deadline(SERVICE_SECONDS)

    def send_step(self, step_W: Tensor) -> None:
        """Send a tensor of host memory to all other ranks; rank 0."""
        deadline = timedelta(seconds=self._deadline_seconds)
        with self._needing_all_ranks():
            assert self._steps is not None
            sent = [
                self._steps.send([step_W], rank, _STEP_TAG) for rank in range(1, self.shard.size)
            ]
            try:
                while sent:
                    sent.pop().wait(deadline)
            finally:
                # A pending message would keep the connections open.
                sent.clear()

    def receive_step(self, step_W: Tensor) -> None:
        """Receive the next tensor that rank 0 sends; other ranks. Waits as long as rank 0 lives."""
        with self._needing_all_ranks():
            assert self._steps is not None
            self._steps.recv([step_W], 0, _STEP_TAG).wait(_STEP_WAIT)

    def _gathered(self, group: ProcessGroup, part_X: Tensor, seconds: float) -> Tensor:
        all_NX = part_X.new_empty(self.shard.size * part_X.numel())
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=seconds)
        with self._needing_all_ranks():
            # On a GPU, only its stream waits.
            group.all_gather_single(all_NX, part_X.flatten(), options).wait()
        return all_NX.view(self.shard.size, *part_X.shape)

    @contextlib.contextmanager
    def _needing_all_ranks(self) -> Iterator[None]:
        try:
            with _collective(self.shard):
                yield
        except RankError:
            # Its connections close: ranks that wait for a step end too, except one that hangs.
            self._steps = None
            raise


def join(shard: Shard, port: int, device: str, listener: int | None = None) -> RankGroup:
    """Connect this rank to the others, with a store at this port of localhost.

    On rank 0, ``listener`` is the descriptor of a socket that is bound to the port; it is owned by
    the store from now on.

    Raises:
        RankError: a rank did not connect within ``JOIN_SECONDS``.
    """
    start = timedelta(seconds=JOIN_SECONDS)
    with _collective(shard):
        store = TCPStore(
            HOST,
            port,
            shard.size,
            is_master=listener is not None,
            timeout=start,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        steps = _communicator(PrefixStore("steps", store), shard, "cpu")
        tensors = _communicator(PrefixStore("tensors", store), shard, device)
    return RankGroup(shard, steps, tensors)


def _communicator(store: Store, shard: Shard, device: str) -> ProcessGroup:
    timeout = timedelta(seconds=JOIN_SECONDS)
    store.set_timeout(timeout)
    group = ProcessGroup(store, shard.rank, shard.size)
    if device.startswith("cuda"):
        kind = ProcessGroup.BackendType.NCCL
        backend = _connect_gpus(store, shard, device, timeout)
    else:
        kind = ProcessGroup.BackendType.GLOO
        backend = _connect_cpus(store, shard, timeout)
    # There are no public methods for a group of its own.
    group._set_default_backend(kind)  # noqa: SLF001
    group._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    return group


def _connect_cpus(store: Store, shard: Shard, timeout: timedelta) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
    # The default is the address of the host's name, which may not exist or face a network.
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    options._threads = 2  # noqa: SLF001
    return ProcessGroupGloo(store, shard.rank, shard.size, options)


def _connect_gpus(store: Store, shard: Shard, device: str, timeout: timedelta) -> Backend:
    """Connect the GPUs of all ranks.

    A collective that does not end within its time-out ends the process: torch's watchdog aborts the
    communicator and the process with it. Rank 0 waits longer, so that it can name the rank that
    does not answer.
    """
    # A build of torch without CUDA does not have it.
    from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    backend = ProcessGroupNCCL(store, shard.rank, shard.size, options)
    backend.eager_connect_single_device(torch.device(device))
    return backend


@contextlib.contextmanager
def _collective(shard: Shard) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        if is_capturing():
            # It has waited for no rank: it can still run, outside of a graph.
            raise CaptureError(f"a collective is not captured: {cause}") from error
        raise RankError(f"rank {shard.rank} has lost another rank: {cause}") from error
