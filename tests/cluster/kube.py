"""kubectl and helm, and how tests wait for a state of the cluster."""

import contextlib
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.time_limit import ENDS_AT

from ssd import __version__

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "ssd"
CRD = "crd/ssddeployments.ssd.dev"
CRDS = (CRD, "crd/ssddraftpools.ssd.dev")
OURS = "app.kubernetes.io/name in (ssd, ssd-operator)"
"""Selects the pods of engines and of operators."""
EVERYWHERE = ("--set", "operator.watchAllNamespaces=true")
"""The suite's resources are in other namespaces than its release."""
KEEPS_IMAGES = os.environ.get("SSD_E2E_LOAD") == ""
"""The images are in the cluster already, under the names of ``make images``."""
REGISTRY = (
    "localhost"
    if KEEPS_IMAGES
    else f"localhost/{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
)
"""One for each checkout: images of another one, with the same version, replaced those of this suite
while it ran."""
PATIENCE = 4.0
"""A wait may take so many times its limit. Limits fit a quiet machine, and only end a test that
hangs: how long something takes is a figure of the run."""
LAST_SECONDS = 300.0
"""After ``ENDS_AT``, in which a test waits with patience."""
Object = dict[str, Any]


def image_of(part: str) -> str:
    """This checkout's image of ``target``, ``draft``, ``gateway``, ``operator`` or ``vllm``."""
    return f"{REGISTRY}/ssd-{part}:{__version__}"


def run(*command: str, timeout: float = 120.0) -> str:
    """Run a command and return its standard output.

    Raises:
        AssertionError: it failed; with its output.
    """
    return output_of(
        subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    )


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Output of a command that must have succeeded."""
    if done.returncode:
        command = " ".join(done.args)
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def patient(timeout: float) -> float:
    """Return the longest time of a wait with this limit."""
    left = ENDS_AT + LAST_SECONDS - time.monotonic()
    return min(PATIENCE * timeout, max(timeout, left))


def eventually(is_true: Callable[[], bool], what: str, timeout: float = 60.0) -> float:
    """Wait until a condition is true; returns the seconds it took.

    Raises:
        AssertionError: it was still false after ``patient(timeout)`` seconds.
    """
    started = time.monotonic()
    error: Exception | None = None
    longest = patient(timeout)
    while time.monotonic() - started < longest:
        try:
            if is_true():
                return time.monotonic() - started
        except (AssertionError, KeyError, IndexError) as each:
            error = each
        threading.Event().wait(0.25)
    raise AssertionError(f"after {longest:.0f} s this is still false: {what} ({error!r})")


@dataclass(frozen=True)
class Kube:
    """kubectl in one namespace, or without any."""

    namespace: str = "default"

    def attempt(
        self, *arguments: str, given: Object | str | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, which may fail; ``given`` is its standard input."""
        text = given if given is None or isinstance(given, str) else json.dumps(given)
        return subprocess.run(
            ("kubectl", *(("-n", self.namespace) if self.namespace else ()), *arguments),
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def __call__(
        self, *arguments: str, given: Object | str | None = None, timeout: float = 120.0
    ) -> str:
        """Run kubectl, which must succeed, and return its output."""
        return output_of(self.attempt(*arguments, given=given, timeout=timeout))

    def send(self, verb: str, given: Object, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Create, replace or apply an object; the output is the stored object as JSON."""
        return self.attempt(verb, "--filename=-", "--output=json", *arguments, given=given)

    def delete_crds(self) -> None:
        """Delete the CRDs that exist, and wait until they are gone.

        Their resources are read first. The API server (1.34) deletes the resources of a CRD before
        the CRD. If nothing has read them yet, this fails ("storage is (re)initializing"), and a
        retry that conflicts with the status of the failure is forgotten for some minutes.
        """
        for crd in CRDS:
            self.attempt("get", crd.partition("/")[2], "--all-namespaces")
        self("delete", *CRDS, "--ignore-not-found", "--timeout=50s")

    def get(self, kind: str, *name: str) -> Object:
        """One object, or a list of them."""
        found: Object = json.loads(self("get", kind, *name, "-o", "json"))
        return found

    def items(self, kind: str, *arguments: str) -> list[Object]:
        """Objects of a kind."""
        return list(self.get(kind, *arguments)["items"])

    def apply(self, document: Object | str) -> None:
        """Apply an object, or a text of several."""
        self("apply", "-f", "-", given=document)

    @contextlib.contextmanager
    def applied(self, document: Object) -> Iterator[str]:
        """A resource that is deleted at the end; its name."""
        name = str(document["metadata"]["name"])
        self.apply(document)
        try:
            yield name
        finally:
            self("delete", "ssd", name, "--ignore-not-found")

    def edit_spec(self, name: str, **spec: object) -> None:
        """Change fields of a resource; null removes one."""
        self("patch", "ssd", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def pods(self, name: str, component: str) -> list[Object]:
        """Pods of a resource that are not being deleted."""
        selector = f"ssd.dev/name={name},ssd.dev/component={component}"
        return [
            pod
            for pod in self.items("pods", "-l", selector)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def condition(self, name: str, kind: str) -> Object:
        """A condition of an SSDDeployment; empty while it does not exist."""
        conditions = self.get("ssd", name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def has(self, name: str, kind: str, status: str, reason: str = "", words: str = "") -> bool:
        """Whether a condition has this status, begins with this reason and contains these words."""
        found = self.condition(name, kind)
        return bool(
            found.get("status") == status
            and found["reason"].startswith(reason)
            and words in found["message"]
        )

    def wait_for(
        self,
        name: str,
        kind: str,
        status: str,
        reason: str = "",
        words: str = "",
        timeout: float = 60,
    ) -> float:
        """Wait for a condition; returns the seconds."""
        what = f"{kind} of {name} is {status} {reason} {words}"
        return eventually(lambda: self.has(name, kind, status, reason, words), what, timeout)

    def num_ready(self, name: str, component: str) -> int:
        """Number of pods of a resource that are ready."""
        states = [
            each["status"]
            for pod in self.pods(name, component)
            for each in pod["status"].get("conditions", [])
            if each["type"] == "Ready"
        ]
        return states.count("True")

    def uids(self, name: str, *components: str) -> set[str]:
        """Uids of the pods of a resource."""
        return {pod["metadata"]["uid"] for each in components for pod in self.pods(name, each)}

    def linked(self, name: str) -> set[str]:
        """Names of the draft pods with a link, active or suspended: a busy node has late tables."""
        links = self.get("ssd", name).get("status", {}).get("links", [])
        return {each["draft"] for each in links if each["state"] in ("Active", "Quarantined")}

    def wait_ready(self, name: str, timeout: float = 120.0) -> None:
        """Wait until a resource is Ready."""
        self.wait(f"ssd/{name}", "condition=Ready", timeout)

    def wait(self, name: str, condition: str, timeout: float = 60.0) -> None:
        """Wait with kubectl for a condition of an object."""
        longest = patient(timeout)
        self("wait", name, f"--for={condition}", f"--timeout={longest:.0f}s", timeout=longest + 30)

    def wait_linked(self, name: str, num_drafts: int, timeout: float = 120.0) -> float:
        """Wait for exactly this number of draft pods, all linked; returns the seconds."""

        def is_so() -> bool:
            selector = f"ssd.dev/name={name},ssd.dev/component=draft"
            pods = {each["metadata"]["name"] for each in self.items("pods", "-l", selector)}
            return len(pods) == num_drafts and self.linked(name) == pods

        return eventually(is_so, f"exactly {num_drafts} drafts of {name} are linked", timeout)

    def endpoint(self, name: str) -> str:
        """Address of the Service for this machine."""
        service = self.get("service", name)
        return f"{service['spec']['clusterIP']}:50051"


@dataclass(frozen=True)
class Release:
    """The chart, installed."""

    name: str
    namespace: str

    def operator(self) -> Object:
        """The pod that runs the operator."""
        kube = Kube(self.namespace)
        pods = kube.items("pods", "-l", f"app.kubernetes.io/instance={self.name}")
        (pod,) = [each for each in pods if "deletionTimestamp" not in each["metadata"]]
        return pod

    def uninstall(self) -> None:
        """Uninstall as a user does; the CRD stays."""
        run("helm", "uninstall", self.name, "-n", self.namespace, "--wait", timeout=120)


def install(name: str, namespace: str, *arguments: str, chart: Path = CHART) -> Release:
    """Install or upgrade a release, and wait until its operator is ready."""
    run(
        *("helm", "upgrade", "--install", name, str(chart), f"--set=imageRegistry={REGISTRY}"),
        *("-n", namespace, "--create-namespace", "--wait", "--timeout", "120s", *arguments),
        timeout=180,
    )
    return Release(name, namespace)


def take_over_crd(name: str, namespace: str) -> None:
    """Assign the CRDs of another release to this one, as the chart's notes describe."""
    for crd in CRDS:
        if not run("kubectl", "get", crd, "--ignore-not-found"):
            continue
        run("kubectl", "label", crd, "--overwrite", "app.kubernetes.io/managed-by=Helm")
        run(
            *("kubectl", "annotate", crd, "--overwrite", f"meta.helm.sh/release-name={name}"),
            f"meta.helm.sh/release-namespace={namespace}",
        )


def sample(name: str, drafts: int, **target: object) -> Object:
    """The embedded pair on CPUs; ``target`` are fields of the target."""
    return {
        "apiVersion": "ssd.dev/v1alpha1",
        "kind": "SSDDeployment",
        "metadata": {"name": name},
        "spec": {
            "accelerator": "cpu",
            "target": {"source": {"uri": "demo://target"}, **target},
            "draft": {"source": {"uri": "demo://draft"}, "replicas": drafts},
        },
    }


def pending(name: str, drafts: int = 1) -> Object:
    """A resource whose pods get no node: only the operator acts on it."""
    document = sample(name, drafts=drafts)
    document["spec"]["podTemplate"] = {"nodeSelector": {"example.com/nowhere": "true"}}
    return document


def all_of(documents: Sequence[Object]) -> Object:
    """One list of these documents."""
    return {"apiVersion": "v1", "kind": "List", "items": list(documents)}


def inventory() -> set[str]:
    """Every object of the cluster except short-lived ones, as kind, namespace, name."""
    kinds = run("kubectl", "api-resources", "--verbs=list", "-o", "name").split()
    short_lived = ("events", "leases", "componentstatuses", "nodes", "csinodes", "ipaddresses")
    listed = ",".join(kind for kind in kinds if kind.split(".")[0] not in short_lived)
    columns = "custom-columns=K:.kind,NS:.metadata.namespace,N:.metadata.name"
    found = run("kubectl", "get", listed, "-A", "--no-headers", "--ignore-not-found", "-o", columns)
    return {" ".join(line.split()) for line in found.splitlines()}


def process_of(pod: Object) -> int:
    """Process id of a pod's engine or operator on this machine: its first process.

    Raises:
        AssertionError: the pod does not run on this machine.
    """
    uid = pod["metadata"]["uid"]
    for status in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        try:
            groups = (status / "cgroup").read_text()
            command = (status / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if uid in groups.replace("_", "-") and "\0-m\0ssd_" in command:
            return int(status.name)
    raise AssertionError(f"no process of pod {pod['metadata']['name']} on this machine")


def dump_cluster_state() -> str:
    """Objects, Events and logs for the analysis of a failed test."""
    names = ("get", "pods", "-A", "-l", OURS, "-o")
    namespaces = run("kubectl", *names, "jsonpath={.items[*].metadata.namespace}").split()
    of_ours = ("-l", OURS, "--prefix", "--all-containers", "--tail=40")
    commands = (
        ("get", "ssd", "-A", "-o", "yaml"),
        ("get", "pods,deployments", "-A", "-o", "wide"),
        ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        *(("logs", "-n", each, *of_ours) for each in sorted(set(namespaces))),
    )
    outputs = []
    for command in commands:
        done = Kube().attempt(*command)
        outputs.append(f"$ kubectl {' '.join(command)}\n{done.stdout}{done.stderr}")
    return "\n".join(outputs)
