"""Communicators between CPUs: gloo over TCP.

A ``ProcessGroupGloo`` is constructed directly, with its own store and its own network device. Its
messages need no call on a thread of Python while they travel. Its sockets and threads end with the
last reference to its objects. So no exception that leaves this module has such an object in its
traceback.
"""

import contextlib
import socket
import threading
from collections import deque
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from ssd.errors import LinkError
from ssd.transport.communicator import Buffer, Place
from ssd.transport.rendezvous import LinkStore

_FOREVER = timedelta(days=3650)
"""A receive waits as long as the link is idle; by default, gloo would end it."""
SEND_SECONDS = 3.0
"""Maximum time that the peer lets a message wait; longer than the lease of a link. If the peer asks
for a message and ends before it is written, gloo itself never ends the send, not even by abort."""
_CONNECT_TIMEOUTS = 5
"""gloo waits this many time-outs for a connection, also for that of a peer that has ended."""
_TAG, _UNUSED_TAG = 0, 1
_AT_ONCE = timedelta(milliseconds=1)


class GlooBuffer:
    """Memory of one message on the host."""

    def __init__(self, num_words: int) -> None:
        self.tensor = torch.empty(num_words, dtype=torch.int32)
        self.words = self.tensor.numpy()


class GlooCommunicator:
    """A ``Communicator`` over TCP. Closing it closes its sockets and ends gloo's threads."""

    transport = "tcp"
    num_probe_bytes = 1 << 20

    def __init__(self, group: Any, peer_rank: int) -> None:
        self._group = group
        self._peer_rank = peer_rank
        self._sending: deque[Any] = deque()
        self._receiving: deque[Any] = deque()
        self._lock = threading.Lock()
        self._is_aborted = False

    def buffer(self, num_words: int) -> GlooBuffer:
        """See ``Communicator``."""
        return GlooBuffer(num_words)

    def start_send(self, buffer: Buffer, num_words: int) -> None:
        """See ``Communicator``. Sends no more words than needed."""
        assert isinstance(buffer, GlooBuffer)
        self._sending.append(self._start("send", buffer.tensor[:num_words]))

    def end_send(self) -> None:
        """See ``Communicator``."""
        if problem := problem_of(self._sending.popleft(), timedelta(seconds=SEND_SECONDS)):
            raise LinkError(f"the gloo connection is lost: {problem}")

    def start_receive(self, buffer: Buffer) -> None:
        """See ``Communicator``."""
        assert isinstance(buffer, GlooBuffer)
        self._receiving.append(self._start("recv", buffer.tensor))

    def end_receive(self) -> None:
        """See ``Communicator``."""
        if problem := problem_of(self._receiving.popleft(), _FOREVER):
            raise LinkError(f"the gloo connection is lost: {problem}")

    def check(self) -> None:
        """See ``Communicator``. A receive reports the loss of the connection."""

    def abort(self) -> None:
        """See ``Communicator``."""
        with self._lock:
            was_aborted, self._is_aborted = self._is_aborted, True
            if was_aborted:
                return
            # gloo has no abort, but one time-out closes the connections of a group and ends all of
            # its transfers at both ends.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self._peer_rank, _UNUSED_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        """See ``Communicator``."""
        self.abort()
        self._sending.clear()
        self._receiving.clear()
        self._group = None

    def _start(self, method: Literal["send", "recv"], tensor: torch.Tensor) -> Any:
        """Return a ``Work`` of gloo."""
        with self._lock:
            if self._is_aborted:
                raise LinkError("the gloo connection was aborted")
            try:
                return getattr(self._group, method)([tensor], self._peer_rank, _TAG)
            except RuntimeError as error:
                problem = first_line(error)
        raise LinkError(f"the gloo connection is lost: {problem}")


def problem_of(work: Any, longest: timedelta) -> str:
    """Wait for a message; return what failed."""
    try:
        work.wait(longest)
    except RuntimeError as error:
        return first_line(error)
    return ""


def is_available(device: str) -> bool:
    """Whether this build of torch has gloo; frames are on the host with every device."""
    del device
    return distributed.is_available() and distributed.is_gloo_available()


def connect(store: LinkStore, place: Place) -> GlooCommunicator:
    """See ``Backend``."""
    group = _group(store, place)
    if isinstance(group, str):
        raise LinkError(f"gloo does not connect: {group}")
    return GlooCommunicator(group, 1 - place.rank)


def _group(store: LinkStore, place: Place) -> Any:
    """Return a ``ProcessGroupGloo`` of two ranks, or why there is none."""
    try:
        device = distributed.ProcessGroupGloo.create_device(hostname=local_address(place.peer_host))
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        options._devices = [device]  # noqa: SLF001 - its only name
        options._threads = 1  # noqa: SLF001 - sends and receives run on the device's thread
        options._timeout = timedelta(seconds=place.seconds / _CONNECT_TIMEOUTS)  # noqa: SLF001
        return distributed.ProcessGroupGloo(store, place.rank, 2, options)
    except (RuntimeError, OSError, LinkError) as error:
        return first_line(error)


def local_address(peer_host: str) -> str:
    """Return the address of this process on the network interface that leads to a peer.

    Raises:
        OSError: the host is unknown, or no route leads to it.
    """
    addresses = socket.getaddrinfo(peer_host, None, type=socket.SOCK_DGRAM)
    # Both ends must choose the same family: ``localhost`` has both.
    family, kind, protocol, _, address = min(addresses, key=lambda row: row[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        # No packet is sent: the system only selects the route.
        probe.connect((address[0], 9, *address[2:]))
        return str(probe.getsockname()[0])


def first_line(error: Exception) -> str:
    """Return the first line of a message of torch, which can have a stack trace."""
    return str(error).partition("\n")[0]
