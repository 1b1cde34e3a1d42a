"""The operator as a process with the account and exactly the rights that the chart grants.

No node is needed: the node selector of the engines' pods matches none.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.cluster.conftest import ROOT, ApiServer, Object, defining
from tests.cluster.kube import CHART, eventually, sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NOWHERE: Object = {"podTemplate": {"nodeSelector": {"ssd.dev/nowhere": "true"}}}
UNTESTED = {
    # Required by an admission plugin that is off in most clusters.
    "ssddeployments/finalizers",
    # The cluster of the tests does not serve them.
    "scaledobjects",
    "podmonitors",
}


@dataclass(frozen=True)
class Operator:
    """A running process of the operator."""

    probes: int
    metrics: int
    log: Path

    def count(self, name: str, **labels: str) -> float:
        """Sum of a metric over all samples that have these labels."""
        text = self._get(self.metrics, "/metrics")
        found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for given, value in found if wanted <= set(given.split(",")))

    def forbidden(self, resource: str) -> float:
        """Calls about a resource that were answered with 403."""
        return self.count("ssd_operator_api_requests_total", resource=resource, code="403")

    def lacks(self, name: str, provoke: Callable[[], object]) -> None:
        """Make it need a right and wait for the 403; a subresource counts with its resource."""
        counted = name.partition("/")[0]
        before = self.forbidden(counted)
        provoke()
        eventually(
            lambda: self.forbidden(counted) > before,
            f"{name} is forbidden: {self.log}",
            timeout=20,
        )

    def passes(self, wake: Callable[[], object]) -> None:
        """Trigger a pass and wait until one has succeeded."""
        before = self.count("ssd_operator_reconcile_total", result="ok")
        wake()
        eventually(
            lambda: self.count("ssd_operator_reconcile_total", result="ok") > before,
            f"a pass succeeds: {self.log}",
            timeout=20,
        )

    def is_ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        with contextlib.suppress(AssertionError):
            return self._get(self.probes, "/readyz") == "ok"
        return False

    def _get(self, port: int, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError as error:
            raise AssertionError(f"{path}: {error}; {self.log.read_text()[-500:]}") from error


@dataclass
class Rights:
    """The account's Role, complete and without one rule."""

    api: ApiServer
    account: str
    role: Object

    def write(self, rules: list[Object]) -> None:
        """Replace the rules."""
        done = self.api.send("replace", self.role | {"rules": rules})
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def without(self, resource: str) -> Iterator[None]:
        """Remove the rule of a resource inside the block; both changes wait for the API server."""
        rules = [rule for rule in self.role["rules"] if resource not in rule["resources"]]
        (rule,) = [rule for rule in self.role["rules"] if resource in rule["resources"]]
        self.write(rules)
        eventually(lambda: not self.may(rule), f"{resource} is forbidden", timeout=10)
        try:
            yield
        finally:
            self.write(self.role["rules"])
            eventually(lambda: self.may(rule), f"{resource} is allowed", timeout=10)

    def may(self, rule: Object) -> bool:
        """Whether the account has the first verb of a rule."""
        resource, _, subresource = rule["resources"][0].partition("/")
        group = rule["apiGroups"][0]
        arguments = [f"{resource}.{group}".rstrip("."), f"--subresource={subresource}"]
        user = f"system:serviceaccount:{self.api.namespace}:{self.account}"
        done = self.api.attempt("auth", "can-i", rule["verbs"][0], *arguments, "--as", user)
        return done.stdout.strip() == "yes"


@pytest.fixture(scope="module")
def api_server(api_environment: dict[str, str]) -> Iterator[ApiServer]:
    """A namespace that no operator watches: two operators overwrite each other."""
    bindings = ("get", "clusterrolebindings", "--selector=ssd.dev/binds=operator")
    if others := ApiServer(api_environment).kubectl(*bindings, "--output=name"):
        pytest.skip(f"an operator watches all namespaces of this cluster: {others.strip()}")
    with defining(api_environment) as found:
        yield found


@pytest.fixture(scope="module")
def rights(api_server: ApiServer) -> Rights:
    """The rights that the chart grants to an operator of one namespace."""
    helm = shutil.which("helm", path=api_server.environment["PATH"])
    if helm is None:
        pytest.skip("helm is not on PATH")
    rendered = subprocess.run(
        [
            *(helm, "template", "ssd", CHART, "--namespace", api_server.namespace),
            *("--kube-version", "1.34.0", "--set=crds.install=false,rbac.aggregate=false"),
            f"--set=operator.watchNamespaces={{{api_server.namespace}}}",
            "--show-only=templates/rbac.yaml",
            "--show-only=templates/serviceaccount.yaml",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(rendered) if each is not None}
    for each in objects.values():
        done = api_server.send("apply", each)
        assert done.returncode == 0, done.stderr
    return Rights(api_server, objects["ServiceAccount"]["metadata"]["name"], objects["Role"])


@pytest.fixture
def start(rights: Rights, tmp_path: Path) -> Iterator[Callable[[], Operator]]:
    """Start operators with the account's token."""
    environment = rights.api.environment
    shown = rights.api.kubectl("config", "view", "--raw", "--minify", "--flatten", "--output=json")
    config = json.loads(shown)
    token = rights.api.kubectl("create", "token", rights.account).strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    config["contexts"][0]["context"]["namespace"] = rights.api.namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    processes: list[subprocess.Popen[bytes]] = []

    def begin() -> Operator:
        operator = Operator(free_port(), free_port(), tmp_path / f"{len(processes)}.log")
        own = {
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
            "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("services", "operator")),
            "SSD_OPERATOR_WATCH_NAMESPACES": rights.api.namespace,
            "SSD_OPERATOR_POD_NAMESPACE": rights.api.namespace,
            "SSD_OPERATOR_PROBE_PORT": str(operator.probes),
            "SSD_OPERATOR_METRICS_PORT": str(operator.metrics),
        }
        with operator.log.open("wb") as log:
            command = [sys.executable, "-m", "ssd_operator"]
            processes.append(subprocess.Popen(command, env={**environment, **own}, stderr=log))
        return operator

    yield begin
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def resource(**blocks: Object) -> Object:
    """A resource whose pods get no node."""
    found = sample("demo", 2, **NOWHERE)
    found["spec"]["draft"] |= NOWHERE
    for name, block in blocks.items():
        found["spec"][name] |= block
    return found


@pytest.fixture(scope="module")
def demo(rights: Rights) -> Iterator[ApiServer]:
    """A resource with a child of each kind that needs no autoscaling."""
    done = rights.api.send("apply", resource(target={"replicas": 2}))
    assert done.returncode == 0, done.stderr
    yield rights.api
    rights.api.kubectl("delete", "ssd", "demo", "--ignore-not-found")


def relabel(api: ApiServer, kind: str, name: str) -> None:
    """Edit a child, so that the operator must repair it."""
    api.kubectl("label", kind, name, "app.kubernetes.io/part-of=theirs", "--overwrite")


def scaled_by(mode: str, minimum: int) -> Object:
    autoscaling = {"mode": mode, "minReplicas": minimum, "maxReplicas": 8}
    return resource(target={"replicas": 2}, draft={"autoscaling": autoscaling})


def apply(api: ApiServer, document: Object) -> None:
    done = api.send("apply", document)
    assert done.returncode == 0, done.stderr


NEEDED: dict[str, Callable[[ApiServer], object]] = {
    "serviceaccounts": lambda api: relabel(api, "serviceaccount", "demo-target"),
    "networkpolicies": lambda api: relabel(api, "networkpolicy", "demo-target"),
    "services": lambda api: relabel(api, "service", "demo"),
    "deployments": lambda api: relabel(api, "deployment", "demo-draft-0"),
    "poddisruptionbudgets": lambda api: relabel(api, "poddisruptionbudget", "demo-target"),
    "ssddeployments/status": lambda api: api.kubectl("scale", "ssd/demo", "--replicas=3"),
    "pods": lambda api: api.kubectl("scale", "ssd/demo", "--replicas=2"),
    "events": lambda api: api.kubectl("scale", "ssd/demo", "--replicas=4"),
    "horizontalpodautoscalers": lambda api: apply(api, scaled_by("HPA", 1)),
    "ssddeployments/scale": lambda api: apply(api, scaled_by("Internal", 5)),
}
"""Resource of each rule, and an action that makes the operator need it."""


READ = ("ssddeployments", "endpointslices")
"""Resources that the operator only reads; without them it does not become ready."""


def is_missing(operator: Operator, resource: str) -> bool:
    return operator.forbidden(resource) > 0


def test_the_charts_rights_suffice_to_create_all_children(
    rights: Rights, start: Callable[[], Operator], demo: ApiServer
) -> None:
    operator = start()
    eventually(operator.is_ready, "the operator is ready", timeout=30)
    children = (
        *("serviceaccount/demo-draft", "networkpolicy/demo-draft", "service/demo-targets"),
        *("deployment/demo-draft-1", "poddisruptionbudget/demo-target"),
    )
    eventually(lambda: demo.attempt("get", *children).returncode == 0, "all children exist")
    status = ("get", "ssd", "demo", "--output=jsonpath={.status.conditions[0].type}")
    eventually(lambda: demo.kubectl(*status) == "Ready", "the status is written")
    assert operator.count("ssd_operator_api_requests_total", code="403") == 0, operator.log


def test_every_right_is_needed(
    rights: Rights, start: Callable[[], Operator], demo: ApiServer
) -> None:
    named = {name for rule in rights.role["rules"] for name in rule["resources"]}
    assert named - UNTESTED == {*NEEDED, *READ}
    for name in READ:
        with rights.without(name):
            operator = start()
            eventually(partial(is_missing, operator, name), f"{name} are forbidden", timeout=20)
            assert not operator.is_ready()
    operator = start()
    eventually(operator.is_ready, "the operator is ready", timeout=30)
    for name, provoke in NEEDED.items():
        with rights.without(name):
            operator.lacks(name, partial(provoke, demo))
        # After a lost Event alone the operator would not begin another pass.
        operator.passes(partial(demo.kubectl, "annotate", "ssd/demo", f"has={name}", "--overwrite"))
