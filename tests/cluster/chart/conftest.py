"""Helm, and the chart as it renders it."""

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
    """Run helm and return what it said; the test is skipped where there is no helm."""
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
        pytest.skip(f"no program for it on PATH, and no cluster tool at {tool} (SSD_CLUSTER_TOOL)")
    return tool


def exports_of(tool: Path) -> dict[str, str]:
    """What ``cluster env`` sets."""
    said = subprocess.run([tool, "env"], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^export (\w+)=(.+)$", said, re.MULTILINE))


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
    """The objects of release ``ssd`` in namespace ``here``, or an assertion with helm's words."""

    def objects(*arguments: str | Path) -> list[Object]:
        said = template(helm, chart, *arguments)
        assert said.returncode == 0, said.stderr
        return [each for each in yaml.safe_load_all(said.stdout) if each is not None]

    return objects


def template(helm: Helm, chart: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return helm(
        *("template", "ssd", chart, "--namespace", "here", "--kube-version", "1.34.0"), *arguments
    )


@pytest.fixture(scope="session")
def refusal(helm: Helm, chart: Path) -> Callable[..., str]:
    """What helm says against some values; fails the test if it takes them."""

    def said(*arguments: str | Path) -> str:
        answer = template(helm, chart, *arguments)
        assert answer.returncode != 0, f"taken: {arguments}"
        return answer.stderr

    return said
