"""The API server that tests talk to."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("SSD_CLUSTER_TOOL", ROOT.parent / "shared" / "k8s" / "cluster"))
E2E = Path(__file__).parent / "e2e"
CRD = ROOT / "charts" / "ssd" / "files" / "crd.yaml"
CRD_NAME = "crd/ssddeployments.ssd.dev"
Object = dict[str, Any]


@dataclass(frozen=True)
class ApiServer:
    """kubectl on one cluster, in one namespace."""

    environment: dict[str, str]
    namespace: str = "default"

    def ask(self, *arguments: str, given: Object | None = None) -> subprocess.CompletedProcess[str]:
        """What kubectl did; ``given`` is its standard input."""
        return subprocess.run(
            ["kubectl", "--namespace", self.namespace, *arguments],
            input=None if given is None else json.dumps(given),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def tell(self, *arguments: str, given: Object | None = None) -> str:
        """What kubectl wrote, which must succeed."""
        done = self.ask(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def send(self, verb: str, given: Object, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Create, replace or apply an object; what the API server made of it, as JSON."""
        return self.ask(verb, "--filename=-", "--output=json", *arguments, given=given)


@pytest.fixture(scope="session")
def api_environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Environment in which kubectl and helm reach a cluster, the only one of this session.

    It is KUBECONFIG's, or one that lives this long (SSD_CLUSTER_KEEP: longer). That one has a node
    if a test of ``e2e`` was chosen: all others need no more than an API server.
    """
    if os.environ.get("KUBECONFIG"):
        yield dict(os.environ)
        return
    if not TOOL.is_file():
        pytest.skip(f"no KUBECONFIG, and no cluster tool at {TOOL} (SSD_CLUSTER_TOOL)")
    needs_node = any(item.path.is_relative_to(E2E) for item in request.session.items)
    subprocess.run([TOOL, "up", *([] if needs_node else ["--control-plane"])], check=True)
    try:
        said = subprocess.run([TOOL, "env"], capture_output=True, text=True, check=True).stdout
        exports = dict(re.findall(r"^export (\w+)=(.+)$", said, re.MULTILINE))
        path = exports["PATH"].replace("$PATH", os.environ["PATH"])
        yield {**os.environ, **exports, "PATH": path}
    finally:
        if not os.environ.get("SSD_CLUSTER_KEEP"):
            subprocess.run([TOOL, "down"], check=True)


@pytest.fixture(scope="session")
def api_server(api_environment: dict[str, str]) -> Iterator[ApiServer]:
    """A namespace of an API server that has this checkout's definition.

    A definition that was there before is replaced and stays: others' resources hang on it.
    """
    everywhere = ApiServer(api_environment)
    was_there = everywhere.ask("get", CRD_NAME).returncode == 0
    everywhere.tell("apply", "--server-side", "--force-conflicts", f"--filename={CRD}")
    # Without any condition yet, waiting for one fails at once; the first comes with the names.
    for sign in ("jsonpath={.status.acceptedNames.kind}=SSDDeployment", "condition=Established"):
        everywhere.tell("wait", f"--for={sign}", CRD_NAME, "--timeout=30s")
    namespace = f"crd-{os.getpid()}"
    everywhere.tell("create", "namespace", namespace)
    yield ApiServer(api_environment, namespace)
    everywhere.tell("delete", "namespace", namespace, "--timeout=50s")
    if not was_there:
        everywhere.tell("delete", CRD_NAME, "--timeout=50s", "--ignore-not-found")
