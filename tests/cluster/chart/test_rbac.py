"""The operator as a process with the account and exactly the rights that the chart grants.

No node is needed: the node selector of the engines' pods matches none.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.chart.conftest import Render
from tests.cluster.kube import Kube, Object, eventually, pending
from tests.cluster.operators import OperatorProcess, operator_process

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

UNTESTED = {"ssddeployments/finalizers", "ssddraftpools/finalizers"}
"""Required by an admission plugin that is off in most clusters."""


def forbidden(operator: OperatorProcess, resource: str) -> float:
    """Calls about a resource that were answered with 403."""
    name = resource.partition("/")[0]  # a subresource counts with its resource
    return operator.read().total("ssd_operator_api_requests_total", resource=name, code="403")


def wait_for_more(read: Callable[[], float], act: Callable[[], object], what: str) -> None:
    """Act, and wait until a count has grown."""
    before = read()
    act()
    eventually(lambda: read() > before, what, timeout=20)


@dataclass
class Rights:
    """The account's Role, complete and without one rule."""

    api: Kube
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
def alone(cluster: None) -> None:
    """No other operator is there: two of them overwrite each other."""
    if others := Kube()(
        *("get", "clusterrolebindings", "--selector=ssd.dev/binds=operator", "--output=name")
    ):
        pytest.skip(f"an operator watches all namespaces of this cluster: {others.strip()}")


@pytest.fixture(scope="module")
def rights(alone: None, api_server: Kube, render: Render) -> Rights:
    """The rights that the chart grants to an operator of one namespace."""
    rendered = render(
        "--set=crds.install=false,rbac.aggregate=false",
        "--show-only=templates/rbac.yaml",
        "--show-only=templates/serviceaccount.yaml",
        namespace=api_server.namespace,
    )
    objects = {each["kind"]: each for each in rendered}
    for each in objects.values():
        api_server.apply(each)
    return Rights(api_server, objects["ServiceAccount"]["metadata"]["name"], objects["Role"])


@pytest.fixture
def start(rights: Rights, tmp_path: Path) -> Iterator[Callable[[], OperatorProcess]]:
    """Start operators with the account's token."""
    namespace = rights.api.namespace
    shown = rights.api("config", "view", "--raw", "--minify", "--flatten", "--output=json")
    config = json.loads(shown)
    token = rights.api("create", "token", rights.account).strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    config["contexts"][0]["context"]["namespace"] = namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    own = {
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "SSD_OPERATOR_POD_NAMESPACE": namespace,
    }
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(operator_process([namespace], tmp_path / "log", own))


def resource(**blocks: Object) -> Object:
    """A resource whose pods get no node."""
    found = pending("demo", 2)
    for name, block in blocks.items():
        found["spec"][name] |= block
    return found


@pytest.fixture(scope="module")
def demo(rights: Rights) -> Iterator[Kube]:
    """A resource with a child of each kind that needs no autoscaling, and a pool."""
    rights.api.apply(pool())
    with rights.api.applied(resource(target={"replicas": 2})):
        yield rights.api


def pool(**spec: object) -> Object:
    """A pool whose pods get no node."""
    nowhere = {"nodeSelector": {"example.com/nowhere": "true"}}
    common = {"device": "cpu", "source": {"uri": "demo://draft"}, "podTemplate": nowhere}
    about = {"apiVersion": "ssd.dev/v1alpha1", "kind": "SSDDraftPool", "metadata": {"name": "demo"}}
    return about | {"spec": common | spec}


def relabel(api: Kube, kind: str, name: str) -> None:
    """Edit a child, so that the operator must repair it."""
    api("label", kind, name, "app.kubernetes.io/part-of=theirs", "--overwrite")


def scaled_by_the_operator(minimum: int) -> Object:
    autoscaling = {"minReplicas": minimum, "maxReplicas": 8}
    return resource(target={"replicas": 2}, draft={"autoscaling": autoscaling})


NEEDED: dict[str, Callable[[Kube], object]] = {
    "serviceaccounts": lambda api: relabel(api, "serviceaccount", "demo-target"),
    "networkpolicies": lambda api: relabel(api, "networkpolicy", "demo-target"),
    "services": lambda api: relabel(api, "service", "demo"),
    "deployments": lambda api: relabel(api, "deployment", "demo-draft-0"),
    "poddisruptionbudgets": lambda api: relabel(api, "poddisruptionbudget", "demo-target"),
    "ssddeployments/status": lambda api: api("scale", "ssd/demo", "--replicas=3"),
    "pods": lambda api: api("scale", "ssd/demo", "--replicas=2"),
    "events": lambda api: api("scale", "ssd/demo", "--replicas=4"),
    "ssddeployments/scale": lambda api: api.apply(scaled_by_the_operator(5)),
    "ssddraftpools/status": lambda api: api("scale", "ssddp/demo", "--replicas=2"),
    "ssddraftpools/scale": lambda api: api.apply(pool(autoscaling={"minReplicas": 3})),
}
"""Resource of each rule, and an action that makes the operator need it."""


READ = ("ssddeployments", "ssddraftpools", "endpointslices")
"""Resources that the operator only reads; without them it does not become ready."""


def test_the_charts_rights_suffice_to_create_all_children(
    rights: Rights, start: Callable[[], OperatorProcess], demo: Kube
) -> None:
    operator = start()
    eventually(operator.is_ready, "the operator is ready", timeout=30)
    children = (
        *("serviceaccount/demo-draft", "networkpolicy/demo-draft", "service/demo-targets"),
        *("deployment/demo-draft-1", "poddisruptionbudget/demo-target"),
    )
    eventually(lambda: demo.attempt("get", *children).returncode == 0, "all children exist")
    eventually(lambda: bool(demo.condition("demo", "Ready")), "the status is written")
    assert operator.read().total("ssd_operator_api_requests_total", code="403") == 0, operator.log


def test_every_right_is_needed(
    rights: Rights, start: Callable[[], OperatorProcess], demo: Kube
) -> None:
    named = {name for rule in rights.role["rules"] for name in rule["resources"]}
    assert named - UNTESTED == {*NEEDED, *READ}
    for name in READ:
        with rights.without(name):
            unready = start()
            eventually(partial(is_forbidden, unready, name), f"{name} are forbidden", timeout=20)
            assert not unready.is_ready()
    operator = start()
    eventually(operator.is_ready, "the operator is ready", timeout=30)
    for name, provoke in NEEDED.items():
        with rights.without(name):
            count = partial(forbidden, operator, name)
            wait_for_more(count, partial(provoke, demo), f"{name} is forbidden: {operator.log}")
        # After a lost Event alone the operator would not begin another pass.
        wake = partial(demo, "annotate", "ssd/demo", f"has={name}", "--overwrite")
        wait_for_more(partial(good_passes, operator), wake, f"a pass succeeds: {operator.log}")


def is_forbidden(operator: OperatorProcess, resource: str) -> bool:
    return forbidden(operator, resource) > 0


def good_passes(operator: OperatorProcess) -> float:
    return operator.read().total("ssd_operator_reconcile_total", result="ok")
