"""Two ranks that exchange messages of fixed sizes, and the backends that implement them.

Rank 0 is the target, rank 1 the draft. A communicator belongs to one link and one epoch. It is not
part of torch's default group: a target has many drafts, which come and go.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from ssd.transport.rendezvous import LinkStore

TARGET_RANK = 0
DRAFT_RANK = 1
BACKENDS = {"nccl": "ssd.transport.nccl", "gloo": "ssd.transport.gloo"}
"""Name to module, the preferred one first. Each has ``is_available`` and ``connect``."""
SETUP_SECONDS = {"nccl": 30.0, "gloo": 5.0}
"""Maximum duration of the set-up, in seconds. NCCL loads its kernels first."""
MUST_BE_FASTER = ("nccl",)
"""Used only where a round trip is shorter than over gRPC. Both gloo and gRPC use TCP, and while the
two processes start, a comparison of them depends more on the load of the CPUs than on the path."""
WORD_BYTES = 4


class Buffer(Protocol):
    """The buffer of one message. ``words`` is its memory on the host."""

    @property
    def words(self) -> npt.NDArray[np.int32]:
        """int32, as many as were asked for."""


class Communicator(Protocol):
    """One end of a connection between two ranks. Messages of one direction arrive in order.

    At most one thread starts to send, one waits for what is sent, and one receives. A buffer
    belongs to its message until that has ended. Both ends use buffers of the same size for it, and
    it states its own length. Each call, except ``abort`` and ``close``, raises a ``LinkError`` if
    the connection is lost, or the communicator was aborted.
    """

    @property
    def transport(self) -> str:
        """How the bytes travel: ``tcp``, or the path that NCCL reports."""

    def buffer(self, num_words: int) -> Buffer:
        """Return a new buffer. Raises a ``LinkError`` if there is no memory for it."""

    @property
    def num_probe_bytes(self) -> int:
        """Size of the message that measures the bandwidth."""

    def start_send(self, buffer: Buffer, num_words: int) -> None:
        """Start to send the first words of a buffer, or all of it. Does not block."""

    def end_send(self) -> None:
        """Wait until the oldest such message has ended."""

    def start_receive(self, buffer: Buffer) -> None:
        """Post a buffer for the next message for which there is none."""

    def end_receive(self) -> None:
        """Wait for the message of the oldest posted buffer."""

    def check(self) -> None:
        """Look for an error of the network. Any thread; does not block."""

    def abort(self) -> None:
        """End all calls with a ``LinkError``. Any thread: does not block. Idempotent."""

    def close(self) -> None:
        """Abort, and release connections and buffers. Called once, after the last other call.

        Raises:
            RuntimeError: of the device.
        """


@dataclass(frozen=True, slots=True)
class Place:
    """Where one end of a communicator is."""

    rank: int
    device: str
    """Device of the process's model: ``cpu``, ``cuda:0``."""
    peer_host: str
    """Name or address of the peer; the connection uses the network interface that leads there."""
    seconds: float
    """Maximum duration of each step of the set-up."""


class Backend(Protocol):
    """A module of ``BACKENDS``."""

    def is_available(self, device: str) -> bool:
        """Whether processes with this device can use the backend."""

    def connect(self, store: LinkStore, place: Place) -> Communicator:
        """Connect to the peer, which does the same. Blocks; not on the asyncio loop.

        Raises:
            LinkError: no connection within the time, or ``store`` was closed.
        """


def backend(name: str) -> Backend:
    """Return the backend of a name of ``BACKENDS``."""
    return cast(Backend, importlib.import_module(BACKENDS[name]))


def available_backends(device: str) -> tuple[str, ...]:
    """Return the names of the backends that a process with this device has, best first."""
    return tuple(name for name in BACKENDS if backend(name).is_available(device))


def common_backend(wanted: Sequence[str], device: str) -> tuple[str, str]:
    """Return the first of the target's backends that this draft has, or why it has none of them.

    Args:
        wanted: by the target, best first.
        device: of this draft.
    """
    available = available_backends(device)
    if common := next((name for name in wanted if name in available), ""):
        return common, ""
    mine = ", ".join(available) or "no collective channel"
    return "", f"the draft on {device} has {mine}, the target has {', '.join(wanted)}"
