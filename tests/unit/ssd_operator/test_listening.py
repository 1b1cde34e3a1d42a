"""The operator's own two ports."""

import socket
import urllib.request
from collections.abc import Iterator

import pytest

from ssd.errors import AddressError
from ssd_operator.runtime import metrics
from ssd_operator.runtime.probes import serve_probes


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another socket has, until the test is over."""
    with socket.create_server(("", 0)) as other:
        yield int(other.getsockname()[1])


def test_a_metrics_port_in_use_is_named(taken: int) -> None:
    with (
        pytest.raises(AddressError, match=rf"port {taken} for metrics: Address already in use"),
        metrics.served(taken),
    ):
        pass


async def test_a_probe_port_in_use_is_named(taken: int) -> None:
    with pytest.raises(AddressError, match=rf"port {taken} for probes: Address already in use"):
        async with serve_probes(taken, {}):
            pass


def test_metrics_are_served_until_the_block_ends() -> None:
    with (
        metrics.served(0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        assert b"ssd_operator_reconcile_seconds" in answer.read()
    with metrics.served(port) as again:
        assert again == port
