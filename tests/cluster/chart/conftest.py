"""Helm, and the rendered chart."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "ssd"
OPTIONAL_APIS = (
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "monitoring.coreos.com/v1/PodMonitor",
    "keda.sh/v1alpha1/ScaledObject",
)

Object = dict[str, Any]
Helm = Callable[..., subprocess.CompletedProcess[str]]
Kubectl = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[Object]]


@pytest.fixture(scope="session")
def chart() -> Path:
    """The chart's folder."""
    return CHART


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Run helm; the test is skipped without helm and without the cluster tool."""
    program = shutil.which("helm") or helm_of_the_cluster_tool()

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False
        )

    return run


def cluster_tool() -> Path:
    beside = ROOT.parent / "shared" / "k8s" / "cluster"
    tool = Path(os.environ.get("SSD_CLUSTER_TOOL", beside))
    if not tool.is_file():
        pytest.skip(f"helm is not on PATH, and no cluster tool is at {tool} (SSD_CLUSTER_TOOL)")
    return tool


def exports_of(tool: Path) -> dict[str, str]:
    """Variables that ``cluster env`` sets."""
    output = subprocess.run([tool, "env"], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^export (\w+)=(.+)$", output, re.MULTILINE))


def helm_of_the_cluster_tool() -> str:
    tool = cluster_tool()
    subprocess.run([tool, "install"], check=True)
    return exports_of(tool)["PATH"].partition(":")[0] + "/helm"


@pytest.fixture(scope="session")
def kubectl(api_environment: dict[str, str]) -> Iterator[Kubectl]:
    """Run kubectl on the cluster of the tests."""

    def run(*arguments: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", *map(str, arguments)],
            input=given,
            env=api_environment,
            capture_output=True,
            text=True,
            check=False,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", api_environment["KUBECONFIG"])  # helm reads it
        yield run


@pytest.fixture(scope="session")
def render(helm: Helm, chart: Path) -> Render:
    """The objects of release ``ssd`` in namespace ``here``, or an assertion with helm's error."""

    def objects(*arguments: str | Path) -> list[Object]:
        done = template(helm, chart, *arguments)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each is not None]

    return objects


def template(helm: Helm, chart: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return helm(
        *("template", "ssd", chart, "--namespace", "here", "--kube-version", "1.34.0"), *arguments
    )


@pytest.fixture(scope="session")
def refusal(helm: Helm, chart: Path) -> Callable[..., str]:
    """Helm's error for some values; fails the test if helm accepts them."""

    def error_of(*arguments: str | Path) -> str:
        done = template(helm, chart, *arguments)
        assert done.returncode != 0, f"accepted: {arguments}"
        return done.stderr

    return error_of
