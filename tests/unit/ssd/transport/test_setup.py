"""The backend of a link and the host of a peer."""

import pytest

from ssd.transport import communicator
from ssd.transport.communicator import common_backend
from ssd.transport.setup import host_of


def test_the_first_backend_of_the_target_that_a_draft_has_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert common_backend(("nccl", "gloo"), "cpu") == ("gloo", "")
    assert common_backend(("nccl",), "cpu") == (
        "",
        "the draft on cpu has gloo, the target has nccl",
    )
    monkeypatch.setattr(communicator, "available_backends", lambda _device: ("gloo", "nccl"))
    assert common_backend(("nccl", "gloo"), "cuda") == ("nccl", "")


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("10.0.0.1:50052", "10.0.0.1"),
        ("[fd00::1]:50052", "fd00::1"),
        ("ipv4:10.0.0.1:1234", "10.0.0.1"),
        ("ipv6:%5Bfd00::1%5D:1234", "fd00::1"),
        ("ipv6:[::ffff:10.0.0.1]:1234", "10.0.0.1"),
        ("localhost:50052", "localhost"),
    ],
)
def test_the_host_of_a_peer_is_read_from_its_address(peer: str, host: str) -> None:
    assert host_of(peer) == host
