"""The cluster of the tests, and the chart's release in it."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from tests.cluster.kube import (
    CHART,
    CRD,
    CRDS,
    EVERYWHERE,
    KEEPS_IMAGES,
    REGISTRY,
    ROOT,
    Kube,
    Release,
    dump_cluster_state,
    image_of,
    install,
    inventory,
    run,
    take_over_crd,
)
from tests.cluster.operators import Operator, ReleasedOperator, operator_process

TOOL = Path(os.environ.get("SSD_CLUSTER_TOOL", ROOT.parent / "shared" / "k8s" / "cluster"))
NEEDS_NODE = tuple(Path(__file__).parent / each for each in ("e2e", "placement", "scale"))
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
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the cluster state dump to the report of a failed test."""
    report = yield
    if report.failed and call.when == "call" and "cluster" in getattr(item, "fixturenames", ()):
        report.sections.append(("cluster", dump_cluster_state()))
    return report


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, object]:
    """Measured values; printed at the end."""
    return request.config.stash[FIGURES]


def tool_environment() -> dict[str, str]:
    """Variables that ``cluster env`` sets, with its programs first on PATH."""
    exports = re.findall(r"^export (\w+)=(.+)$", run(str(TOOL), "env"), re.MULTILINE)
    return {name: value.replace("$PATH", os.environ["PATH"]) for name, value in exports}


@pytest.fixture(scope="session")
def api_environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Environment in which kubectl and helm reach a cluster, one for all tests of a run.

    It is that of KUBECONFIG, or a new one for this run (SSD_CLUSTER_KEEP: it stays). The new one
    has a node if a selected test installs the chart; all other tests need only an API server.
    """
    if os.environ.get("KUBECONFIG"):
        yield dict(os.environ)
        return
    if not TOOL.is_file():
        pytest.skip(f"no KUBECONFIG, and no cluster tool at {TOOL} (SSD_CLUSTER_TOOL)")
    needs_node = any(
        item.path.is_relative_to(each) for item in request.session.items for each in NEEDS_NODE
    )
    subprocess.run([TOOL, "up", *([] if needs_node else ["--control-plane"])], check=True)
    try:
        yield {**os.environ, **tool_environment()}
    finally:
        if not os.environ.get("SSD_CLUSTER_KEEP"):
            subprocess.run([TOOL, "down"], check=True)


@pytest.fixture(scope="session")
def cluster(api_environment: dict[str, str]) -> Iterator[None]:
    """A cluster that kubectl and helm reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "KUBECONFIG"):
            patch.setenv(name, api_environment[name])
        yield


@pytest.fixture(scope="module")
def api_server(cluster: None) -> Iterator[Kube]:
    """A namespace of an API server that has this checkout's CRDs.

    It is deleted before the chart is installed, whose operator would create pods for its resources.
    CRDs that existed before are replaced and stay, because other resources depend on them.
    """
    everywhere, own = Kube(), Kube(f"crd-{os.getpid()}")
    existed = everywhere.attempt("get", CRD).returncode == 0
    file = CHART / "files" / "crd.yaml"
    everywhere("apply", "--server-side", "--force-conflicts", f"--filename={file}")
    # kubectl wait fails at once without any condition; the first is set with the names.
    for sign in ("jsonpath={.status.acceptedNames.kind}", "condition=Established"):
        everywhere("wait", f"--for={sign}", *CRDS, "--timeout=30s")
    everywhere("create", "namespace", own.namespace)
    yield own
    # Before the namespace, which would wait for half the grace period of pods of an operator.
    own("delete", "ssddeployments,ssddraftpools", "--all", "--timeout=50s")
    own("wait", "--for=delete", "pods", "--all", "--timeout=50s")
    everywhere("delete", "namespace", own.namespace, "--timeout=50s")
    if not existed:
        everywhere.delete_crds()


def build(target: str, *arguments: str, timeout: float) -> None:
    """Build images by a target of the Makefile; a second time if the first one fails.

    The builder sometimes cannot start a step ("Device or resource busy"). It keeps complete steps.
    """
    command = ("make", "-C", str(ROOT), target, f"IMAGE_REGISTRY={REGISTRY}", *arguments)
    try:
        run(*command, timeout=timeout)
    except AssertionError:
        run(*command, timeout=timeout)


@pytest.fixture(scope="session")
def load_image(cluster: None) -> Callable[[str], object] | None:
    """Loads a built image into the cluster; None if all images are there already.

    SSD_E2E_LOAD is the command that loads an image; empty for None.
    """
    if KEEPS_IMAGES:
        return None
    load = shlex.split(os.environ.get("SSD_E2E_LOAD", f"{TOOL} load"))
    return lambda name: run(*load, name, timeout=600)


@pytest.fixture(scope="session")
def images(load_image: Callable[[str], object] | None) -> None:
    """The images of this checkout, in the cluster."""
    if load_image is None:
        return
    build("images", timeout=1500)
    for part in ("target", "draft", "gateway", "operator"):
        load_image(image_of(part))


@pytest.fixture(scope="session")
def before(images: None) -> set[str]:
    """Objects of the cluster before the chart was installed."""
    return inventory()


@pytest.fixture(scope="session")
def release(before: set[str]) -> Iterator[Release]:
    """The release of the whole suite."""
    # The release of an aborted run has pods of older images under the same names.
    run("helm", "uninstall", "ssd", "-n", "ssd-system", "--ignore-not-found", "--wait")
    take_over_crd("ssd", "ssd-system")
    release = install("ssd", "ssd-system", *EVERYWHERE)
    yield release
    release.uninstall()


@pytest.fixture(scope="module")
def operator(
    request: pytest.FixtureRequest,
    cluster: None,
    namespaces: Sequence[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Operator]:
    """The operator of the suite's ``namespaces``, which exist as long as this fixture.

    It is that of the release. With SSD_E2E_OPERATOR=process it is a process of this machine, so
    that the suite needs no images; an existing CRD is used unchanged.
    """
    is_process = os.environ.get("SSD_E2E_OPERATOR") == "process"
    if is_process and not run("kubectl", "get", CRD, "--ignore-not-found"):
        request.getfixturevalue("api_server")
    release = None if is_process else request.getfixturevalue("release")
    for name in namespaces:
        run("kubectl", "create", "namespace", name)
    try:
        if release is not None:
            yield ReleasedOperator(release)
        else:
            with operator_process(namespaces, tmp_path_factory.mktemp("operator") / "log") as found:
                yield found
    finally:
        run("kubectl", "delete", "namespace", *namespaces, "--timeout=280s", timeout=300)
