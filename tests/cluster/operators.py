"""Operators under test: a release's pod, or a process of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.cluster.kube import ROOT, Kube, Release, eventually
from tests.ports import free_port

_METRICS_PORT = 9090


@dataclass(frozen=True)
class Reading:
    """An operator's metrics at one time."""

    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric over all samples with these labels."""
        return sum(
            each.value
            for each in self.samples
            if each.name == name and labels.items() <= each.labels.items()
        )

    def by_labels(self, name: str) -> dict[str, float]:
        """Values of a metric by its labels' values."""
        found = (each for each in self.samples if each.name == name)
        return {" ".join(each.labels.values()): each.value for each in found}

    def bound_of(self, histogram: str, part: float, since: "Reading") -> float:
        """Upper bound of the first bucket that contains this part of the observations."""
        bounds = [each.labels["le"] for each in self.samples if each.name == f"{histogram}_bucket"]
        counts = {
            float(bound): self.total(f"{histogram}_bucket", le=bound)
            - since.total(f"{histogram}_bucket", le=bound)
            for bound in bounds
        }
        return min(bound for bound, count in counts.items() if count >= part * max(counts.values()))


class Operator(Protocol):
    """A running operator."""

    def read(self) -> Reading:
        """Its metrics."""
        ...

    def restart(self) -> None:
        """Stop it as a node's upgrade would, and wait for the next one."""
        ...


@dataclass
class ReleasedOperator:
    """The pod of a release."""

    release: Release

    def read(self) -> Reading:
        return _read(f"{self.release.operator()['status']['podIP']}:{_METRICS_PORT}")

    def restart(self) -> None:
        kube = Kube(self.release.namespace)
        name = self.release.operator()["metadata"]["name"]
        kube("delete", "pod", name, "--wait=true")
        selector = f"app.kubernetes.io/instance={self.release.name}"
        kube("wait", "pods", "-l", selector, "--for=condition=Ready", "--timeout=240s", timeout=270)


@dataclass
class OperatorProcess:
    """``python -m ssd_operator`` of this checkout, bound to namespaces."""

    namespaces: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides its settings."""
    _port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    def read(self) -> Reading:
        return _read(f"127.0.0.1:{self._port}")

    def restart(self) -> None:
        self.stop()
        self.start()

    def start(self) -> None:
        settings = {
            "SSD_OPERATOR_WATCH_NAMESPACES": ",".join(self.namespaces),
            "SSD_OPERATOR_HTTP_PORT": str(self._port),
            "PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT / 'operator'}",
        }
        with self.log.open("ab") as log:
            command = (sys.executable, "-m", "ssd_operator")
            self._process = subprocess.Popen(
                command, env={**os.environ, **settings, **self.environment}, stdout=log, stderr=log
            )
        eventually(self._is_up, f"the operator runs: {self.log}", 60)

    def is_ready(self) -> bool:
        """Whether its readiness probe succeeds."""
        with contextlib.suppress(OSError):
            address = f"http://127.0.0.1:{self._port}/readyz"
            with urllib.request.urlopen(address, timeout=5) as answer:
                return bool(answer.read().strip() == b"ok")
        return False

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        finally:
            process.kill()

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            self.read()
            return True
        return False


@contextlib.contextmanager
def operator_process(
    namespaces: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[OperatorProcess]:
    """A process that ends with the context."""
    operator = OperatorProcess(namespaces, log, environment or {})
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


def _read(address: str) -> Reading:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return Reading(tuple(each for family in families for each in family.samples))
