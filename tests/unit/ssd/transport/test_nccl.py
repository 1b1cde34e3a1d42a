"""What NCCL is called with, and what ends a communicator. The library and the GPU are replaced."""

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from ssd.errors import LinkError
from ssd.transport import nccl
from ssd.transport.communicator import DRAFT_RANK, TARGET_RANK, Place
from ssd.transport.nccl import NcclCommunicator, path_of
from ssd.transport.rendezvous import LinkStore

MAX_SECONDS = 20.0
LOG = """\
host:7:91 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] via SHM/direct/direct
host:7:91 [0] NCCL INFO Connected all rings
host:7:98 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
host:7:98 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


class RecordedNccl:
    """Records calls; ``problem`` is the next error of the network."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ids: list[bytes] = []
        self.problem = ""

    def call(self, name: str, *args: object) -> None:
        self.calls.append((name, *args))

    def unique_id(self) -> nccl.UniqueId:
        number = len(self.calls) + len(self.ids)
        return nccl.UniqueId((ctypes.c_ubyte * 128)(number, 0, 7))

    def communicator(self, unique_id: nccl.UniqueId, rank: int) -> str:
        self.ids.append(bytes(unique_id))
        return f"communicator {len(self.ids) - 1} of rank {rank}"

    def check_network(self, communicator: str) -> None:
        if self.problem:
            raise LinkError(self.problem)


class Stream:
    """A stream whose operations have ended."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        self.cuda_stream = 5

    def synchronize(self) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, **_settings: object) -> None: ...

    def record(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class HostSlot:
    """A slot without a device."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host = torch.zeros(num_words, dtype=torch.int32)
        self.device = torch.zeros(num_words, dtype=torch.int32)
        self.words = self.host.numpy()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> RecordedNccl:
    made = RecordedNccl()
    monkeypatch.setattr(nccl, "library", lambda: made)
    monkeypatch.setattr(nccl, "NcclSlot", HostSlot)
    monkeypatch.setattr(nccl, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def connected(rank: int = TARGET_RANK) -> NcclCommunicator:
    store = LinkStore(lambda _key, _value: None, 1.0)
    if rank == DRAFT_RANK:
        for sender in (TARGET_RANK, DRAFT_RANK):
            store.put(f"nccl/{sender}", bytes([sender]) * 128)
    return nccl.connect(store, Place(rank, "cuda:0", "peer", 1.0))


@pytest.mark.parametrize("rank", [TARGET_RANK, DRAFT_RANK])
def test_each_direction_has_its_own_communicator(library: RecordedNccl, rank: int) -> None:
    ends = connected(rank)
    slot = ends.slot(10)
    ends.send(slot, 3).wait()
    ends.receive(slot).wait()
    sent, received = (each for each in library.calls if each[0] in {"ncclSend", "ncclRecv"})
    assert sent[0] == "ncclSend"
    assert sent[2:] == (10, 2, 1 - rank, f"communicator {rank} of rank {rank}", 5)
    assert received[2:] == (10, 2, 1 - rank, f"communicator {1 - rank} of rank {rank}", 5)
    ends.close()


def test_both_ends_use_the_ids_of_the_target(library: RecordedNccl) -> None:
    connected(DRAFT_RANK).close()
    assert library.ids == [bytes([0]) * 128, bytes([1]) * 128]


def test_an_id_of_another_size_is_refused(library: RecordedNccl) -> None:
    store = LinkStore(lambda _key, _value: None, 1.0)
    store.put("nccl/0", b"short")
    with pytest.raises(LinkError, match="has 5 bytes, expected 128"):
        nccl.connect(store, Place(DRAFT_RANK, "cuda:0", "peer", 1.0))


def test_an_abort_happens_once_and_refuses_what_follows(library: RecordedNccl) -> None:
    ends = connected()
    slot = ends.slot(4)
    waiting = ends.receive(slot)
    ends.abort()
    ends.close()
    assert [each[0] for each in library.calls].count("ncclCommAbort") == 2
    with pytest.raises(LinkError, match="aborted"):
        waiting.wait()
    with pytest.raises(LinkError, match="aborted"):
        ends.send(slot, 4)


def test_an_error_of_the_network_aborts_both_directions(library: RecordedNccl) -> None:
    ends = connected()
    library.problem = "a remote process has ended"
    assert ends._ended.wait(MAX_SECONDS)
    ends.abort()
    assert [each[0] for each in library.calls].count("ncclCommAbort") == 2
    with pytest.raises(LinkError, match="a remote process has ended"):
        ends.check()


def test_the_path_is_that_of_the_newest_channel_in_the_log() -> None:
    assert path_of(LOG) == "NET/IB/0/GDRDMA"
    assert path_of("") == "NCCL"


def test_structures_have_the_sizes_of_nccl() -> None:
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert ctypes.sizeof(nccl.Config) == nccl.one_block_config().size == 40
