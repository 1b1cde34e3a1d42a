"""Helm, promtool, and the rendered chart."""

import fcntl
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.cluster.conftest import TOOL, tool_environment
from tests.cluster.kube import CHART, Kube, Object

FETCH_SECONDS = 40.0
"""Maximum time of a fetch."""
RETRY_SECONDS = 3600.0
"""A fetch that has failed is not repeated for so long."""
Completed = subprocess.CompletedProcess[str]
Helm = Callable[..., Completed]
Render = Callable[..., list[Object]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Run helm; the test is skipped without helm and without the cluster tool."""
    program = shutil.which("helm") or helm_of_the_cluster_tool()

    def run(*arguments: str | Path) -> Completed:
        return subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False
        )

    return run


def helm_of_the_cluster_tool() -> str:
    if not TOOL.is_file():
        pytest.skip(f"helm is not on PATH, and no cluster tool is at {TOOL} (SSD_CLUSTER_TOOL)")
    # The workers of a test run start at the same time, and the tool unpacks into one folder.
    with (Path(tempfile.gettempdir()) / "ssd-cluster-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([TOOL, "install"], check=True)
    return tool_environment()["PATH"].partition(":")[0] + "/helm"


@pytest.fixture(scope="session")
def promtool(request: pytest.FixtureRequest) -> str:
    """Path of promtool; it is fetched once, and the test is skipped where that is impossible."""
    if (program := shutil.which("promtool")) is not None:
        return program
    kept = request.config.rootpath / ".pytest_cache/promtool/promtool"
    failed = kept.with_name("failed")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        if not failed.exists() or time.time() - failed.stat().st_mtime > RETRY_SECONDS:
            try:
                fetch_promtool(kept)
            except (OSError, subprocess.SubprocessError) as error:
                failed.write_text(str(getattr(error, "stderr", None) or error))
    if not kept.exists():
        reason = failed.read_text()
        pytest.skip(f"promtool is not on PATH, and apt-get could not fetch it: {reason}")
    return str(kept)


def fetch_promtool(program: Path) -> None:
    """Take the program from Debian's package; nothing is installed, and root is not needed.

    The lists of packages are fetched too: the machine's own may be missing or old. The program
    gets its name after it has run once, so another worker finds all of it or nothing.
    """
    ends_at = time.monotonic() + FETCH_SECONDS
    with tempfile.TemporaryDirectory(dir=program.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for each in ("lists/partial", "archives/partial"):
            (folder / each).mkdir(parents=True)
        apt = ("apt-get", "-qq", "-o", f"Dir::State::Lists={folder}/lists", "-o")
        for command in (
            (*apt, f"Dir::Cache={folder}", "update"),
            (*apt, f"Dir::Cache={folder}", "download", "prometheus"),
            ("sh", "-c", "dpkg-deb -x prometheus_*.deb ."),
            ("usr/bin/promtool", "--version"),
        ):
            seconds = ends_at - time.monotonic()
            subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=True, timeout=seconds
            )
        (folder / "usr/bin/promtool").replace(program)


@pytest.fixture(scope="session")
def kubectl(cluster: None) -> Callable[..., Completed]:
    """Run kubectl, which may fail, on the cluster of the tests."""
    return Kube("").attempt


@cache
def template(helm: Helm, *arguments: str | Path, namespace: str = "here") -> Completed:
    return helm(
        *("template", "ssd", CHART, "--namespace", namespace, "--kube-version", "1.34.0"),
        *arguments,
    )


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """The objects of release ``ssd`` in namespace ``here``, or an assertion with helm's error."""

    def objects(*arguments: str | Path, namespace: str = "here") -> list[Object]:
        done = template(helm, *arguments, namespace=namespace)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each is not None]

    return objects


@pytest.fixture(scope="session")
def refusal(helm: Helm) -> Callable[..., str]:
    """Helm's error for some values; fails the test if helm accepts them."""

    def error_of(*arguments: str | Path, namespace: str = "here") -> str:
        done = template(helm, *arguments, namespace=namespace)
        assert done.returncode != 0, f"accepted: {arguments}"
        return done.stderr

    return error_of
