import select
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ssd.errors import AddressError
from ssd.rpc.http import MAX_CONNECTIONS, ProbeServer, _Server


class Process:
    def __init__(self) -> None:
        self.is_live = True
        self.readiness = (False, "loading")


@pytest.fixture
def process() -> Process:
    return Process()


@contextmanager
def serving(host: str, port: int = 0, process: Process | None = None) -> Iterator[ProbeServer]:
    found = process or Process()
    server = ProbeServer(host, port, lambda: found.is_live, lambda: found.readiness)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def probes(process: Process) -> Iterator[ProbeServer]:
    with serving("127.0.0.1", process=process) as server:
        yield server


def get(server: ProbeServer, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_readyz_returns_the_reason(probes: ProbeServer, process: Process) -> None:
    assert get(probes, "/readyz") == (503, "loading\n")
    process.readiness = (True, "ready")
    assert get(probes, "/readyz") == (200, "ready\n")


def test_livez_returns_the_liveness(probes: ProbeServer, process: Process) -> None:
    assert get(probes, "/livez") == (200, "live\n")
    process.is_live = False
    assert get(probes, "/livez")[0] == 503


def test_metrics_have_the_prometheus_format(probes: ProbeServer) -> None:
    status, text = get(probes, "/metrics")
    assert status == 200
    assert "# TYPE" in text


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/nothing"])
def test_other_paths_are_not_found(probes: ProbeServer, path: str) -> None:
    assert get(probes, path)[0] == 404


def test_no_access_log_is_kept(probes: ProbeServer, capfd: pytest.CaptureFixture[str]) -> None:
    get(probes, "/livez")
    assert capfd.readouterr() == ("", "")


def test_slow_connections_use_a_bounded_number_of_threads_and_delay_no_probe(
    probes: ProbeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    slow = [
        socket.create_connection(("127.0.0.1", probes.port), 5) for _ in range(3 * MAX_CONNECTIONS)
    ]
    for each in slow:
        each.sendall(b"GET /livez")
    assert get(probes, "/livez")[0] == 200
    assert threading.active_count() - before <= MAX_CONNECTIONS + 1
    for each in slow[:MAX_CONNECTIONS]:
        assert each.recv(1) == b"", "the oldest are closed"
    for each in slow:
        each.close()
    assert capfd.readouterr() == ("", "")


def test_a_hundred_connections_can_wait_to_be_accepted() -> None:
    server = _Server("127.0.0.1", 0)
    waiting = [socket.socket() for _ in range(100)]
    for each in waiting:
        each.settimeout(0)
        each.connect_ex(("127.0.0.1", server.server_port))
    _, connected, _ = select.select([], waiting, [], 0.5)
    assert len(connected) == 100
    for each in waiting:
        each.close()
    server.server_close()


def test_a_disconnecting_caller_logs_nothing(
    probes: ProbeServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", probes.port), 5) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.sendall(b"GET /livez HTTP/1.0\r\nHost")
    assert get(probes, "/livez")[0] == 200
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_port_in_use_is_an_error_that_names_the_address(probes: ProbeServer) -> None:
    with (
        pytest.raises(AddressError, match=f"127.0.0.1:{probes.port}"),
        serving("127.0.0.1", probes.port),
    ):
        pass


def test_close_is_idempotent_and_frees_the_port(probes: ProbeServer) -> None:
    port = probes.port
    probes.close()
    probes.close()
    with serving("127.0.0.1", port) as again:
        assert get(again, "/livez")[0] == 200


def answers(host: str, port: int) -> bool:
    name = f"[{host}]" if ":" in host else host
    with urllib.request.urlopen(f"http://{name}:{port}/livez", timeout=60) as answer:
        return bool(answer.status == 200)


def is_there(host: str) -> bool:
    """Whether this machine has the address."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


has_ipv6 = pytest.mark.skipif(not is_there("::1"), reason="this machine has no IPv6")


@has_ipv6
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_means_both_address_families(host: str) -> None:
    with serving(host) as server:
        assert answers("127.0.0.1", server.port)
        assert answers("::1", server.port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_means_ipv4_if_ipv6_is_disabled(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *args: int, **kwargs: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *args, **kwargs)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with serving(host) as server:
        assert answers("127.0.0.1", server.port)


@has_ipv6
def test_one_ipv6_address_can_be_listened_on() -> None:
    with serving("::1") as server:
        assert answers("::1", server.port)
        address = rf"\[::1\]:{server.port}"
        with pytest.raises(AddressError, match=address), serving("::1", server.port):
            pass
