import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from ssd.errors import AddressError
from ssd.rpc.http import ProbeServer


class Process:
    def __init__(self) -> None:
        self.is_live = True
        self.readiness = (False, "loading")


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def probes(process: Process) -> Iterator[ProbeServer]:
    server = ProbeServer("127.0.0.1", 0, lambda: process.is_live, lambda: process.readiness)
    server.start()
    yield server
    server.close()


def ask(server: ProbeServer, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_readiness_is_told_with_its_reason(probes: ProbeServer, process: Process) -> None:
    assert ask(probes, "/readyz") == (503, "loading\n")
    process.readiness = (True, "ready")
    assert ask(probes, "/readyz") == (200, "ready\n")


def test_liveness_is_told(probes: ProbeServer, process: Process) -> None:
    assert ask(probes, "/livez") == (200, "live\n")
    process.is_live = False
    assert ask(probes, "/livez")[0] == 503


def test_metrics_are_in_the_format_of_prometheus(probes: ProbeServer) -> None:
    status, text = ask(probes, "/metrics")
    assert status == 200
    assert "# TYPE" in text


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/nothing"])
def test_everything_else_is_not_found(probes: ProbeServer, path: str) -> None:
    assert ask(probes, path)[0] == 404


def test_no_access_log_is_kept(probes: ProbeServer, capfd: pytest.CaptureFixture[str]) -> None:
    ask(probes, "/livez")
    assert capfd.readouterr() == ("", "")


def test_a_port_in_use_is_an_error_that_names_the_address(probes: ProbeServer) -> None:
    second = ProbeServer("127.0.0.1", probes.port, lambda: True, lambda: (True, ""))
    with pytest.raises(AddressError, match=f"127.0.0.1:{probes.port}"):
        second.start()


def test_closing_twice_is_fine_and_the_port_is_free_again(probes: ProbeServer) -> None:
    port = probes.port
    probes.close()
    probes.close()
    again = ProbeServer("127.0.0.1", port, lambda: True, lambda: (True, ""))
    again.start()
    assert ask(again, "/livez")[0] == 200
    again.close()
