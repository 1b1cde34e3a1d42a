"""A real cluster with the chart installed, and clients that keep it busy."""

import os
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.cluster.kube import (
    ROOT,
    Kube,
    Release,
    install,
    inventory,
    portrait,
    run,
    sample,
    take_over_definition,
)
from tests.cluster.load import Job, Load, texts_of_the_target_alone

from ssd import __version__
from ssd.types import TokenId

TOOL = Path(os.environ.get("SSD_CLUSTER_TOOL", ROOT.parent / "shared" / "k8s" / "cluster"))
FIGURES = pytest.StashKey[dict[str, object]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash[FIGURES]
    if figures:
        terminalreporter.section("figures")
        for name, value in figures.items():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test tells what the cluster looked like, while it still looks so."""
    report = yield
    if report.failed and call.when == "call":
        report.sections.append(("cluster", portrait()))
    return report


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, object]:
    """What was measured; printed at the end."""
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def cluster(api_environment: dict[str, str]) -> Iterator[None]:
    """A cluster that kubectl and helm reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "KUBECONFIG"):
            patch.setenv(name, api_environment[name])
        yield


@pytest.fixture(scope="session")
def images(cluster: None) -> None:
    """The images of this checkout, in the cluster.

    SSD_E2E_LOAD is the command that brings an image there; empty if that was done before.
    """
    load = shlex.split(os.environ.get("SSD_E2E_LOAD", f"{TOOL} load"))
    if not load:
        return
    run("make", "-C", str(ROOT), "images", timeout=1500)
    for part in ("target", "draft", "operator"):
        run(*load, f"localhost/ssd-{part}:{__version__}", timeout=300)


@pytest.fixture(scope="session")
def before(images: None) -> set[str]:
    """What the cluster held before the chart came."""
    return inventory()


@pytest.fixture(scope="session")
def release(before: set[str]) -> Iterator[Release]:
    """The release of the whole suite."""
    take_over_definition("ssd", "ssd-system")
    release = install("ssd", "ssd-system")
    yield release
    release.uninstall()


@pytest.fixture(scope="session")
def kube(release: Release) -> Kube:
    """kubectl where the suite's resources are."""
    return Kube("default")


@pytest.fixture(scope="module")
def demo(kube: Kube) -> Iterator[str]:
    """A resource that serves, with one draft."""
    kube.apply(sample("demo", drafts=1))
    kube.wait_ready("demo")
    kube.wait_linked("demo", 1)
    yield "demo"
    kube("delete", "ssd", "demo", "--wait=true", "--ignore-not-found")


@pytest.fixture(scope="session")
def expected() -> Mapping[Job, Sequence[TokenId]]:
    """What the target writes alone."""
    return texts_of_the_target_alone()


@pytest.fixture
def load(kube: Kube, demo: str, expected: Mapping[Job, Sequence[TokenId]]) -> Iterator[Load]:
    """Eight clients on ``demo``."""
    with Load(kube.endpoint(demo), expected) as running:
        yield running


@pytest.fixture
def in_cluster(kube: Kube) -> Callable[..., str]:
    """Runs a command in a pod of the target's image; what it wrote."""

    def ask(*command: str) -> str:
        image = f"localhost/ssd-target:{__version__}"
        return kube(
            *("run", "client", "--rm", "-i", "--quiet", "--restart=Never", f"--image={image}"),
            *("--image-pull-policy=IfNotPresent", "--command", "--", *command),
        )

    return ask
