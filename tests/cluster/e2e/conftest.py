"""A real cluster with the chart installed, and clients that keep it busy."""

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ssd import __version__
from ssd.errors import SSDError
from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import Mode, SamplingParams, TokenId

ROOT = Path(__file__).resolve().parents[3]
TOOL = Path(os.environ.get("SSD_CLUSTER_TOOL", ROOT.parent / "shared" / "k8s" / "cluster"))
Object = dict[str, Any]
FIGURES = pytest.StashKey[dict[str, object]]()
NUM_CLIENTS = 8
TEMPERATURES = (0.0, 1.0)
PROMPTS = tuple(
    f"def {name}(values):\n    " for name in ("mean", "median", "merge", "split", "scan", "pad")
)
NUM_TOKENS = 96


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash[FIGURES]
    if figures:
        terminalreporter.section("figures")
        for name, value in figures.items():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, object]:
    """What was measured; printed at the end."""
    return request.config.stash[FIGURES]


def run(*command: str, stdin: str | None = None, timeout: float = 120.0) -> str:
    """Run a command; what it wrote. A failure is raised with what it said."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Kube:
    """kubectl in one namespace."""

    namespace: str = "default"

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        return run("kubectl", "-n", self.namespace, *arguments, stdin=stdin, timeout=timeout)

    def get(self, kind: str, *name: str) -> Object:
        """One object, or a list of them."""
        found: Object = json.loads(self("get", kind, *name, "-o", "json"))
        return found

    def items(self, kind: str, *arguments: str) -> list[Object]:
        return list(self.get(kind, *arguments)["items"])

    def apply(self, document: Object | str) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        self("apply", "-f", "-", stdin=text)

    def refuses(self, document: Object) -> str:
        """The API server's words on an object that it must not take."""
        done = subprocess.run(
            ("kubectl", "-n", self.namespace, "apply", "-f", "-"),
            input=json.dumps(document),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode, "the API server took it"
        return done.stderr

    def pods(self, name: str, component: str) -> list[Object]:
        """Pods of a resource that are not on their way out."""
        selector = f"ssd.dev/name={name},ssd.dev/component={component}"
        return [
            pod
            for pod in self.items("pods", "-l", selector)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def condition(self, name: str, kind: str) -> Object:
        """A condition of an SSDDeployment; empty while it is not there."""
        conditions = self.get("ssd", name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_ready(self, name: str, drafts: int, timeout: float = 120.0) -> None:
        """Wait until a resource serves and so many drafts are linked."""
        self("wait", f"ssd/{name}", "--for=condition=Ready", f"--timeout={timeout:.0f}s")
        eventually(
            lambda: self.get("ssd", name)["status"]["draft"].get("activeReplicas", 0) == drafts,
            f"{drafts} drafts of {name} are linked",
            timeout,
        )

    def endpoint(self, name: str) -> str:
        """Where this machine reaches the Service."""
        service = self.get("service", name)
        return f"{service['spec']['clusterIP']}:50051"


def eventually(is_true: Callable[[], bool], what: str, timeout: float = 60.0) -> float:
    """Wait for something; returns the seconds it took."""
    started = time.monotonic()
    error: Exception | None = None
    while time.monotonic() - started < timeout:
        try:
            if is_true():
                return time.monotonic() - started
        except (AssertionError, KeyError, IndexError) as each:
            error = each
        threading.Event().wait(0.25)
    raise AssertionError(f"after {timeout:.0f} s it is not so that {what} ({error!r})")


@pytest.fixture(scope="session")
def cluster(api_environment: dict[str, str]) -> Iterator[None]:
    """A cluster that kubectl and helm reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "KUBECONFIG"):
            patch.setenv(name, api_environment[name])
        yield


@pytest.fixture(scope="session")
def images(cluster: None, figures: dict[str, object]) -> None:
    """The images of this checkout, in the cluster."""
    names = [f"localhost/ssd-{part}:{__version__}" for part in ("target", "draft", "operator")]
    if not os.environ.get("SSD_E2E_IMAGES_READY"):
        run("make", "-C", str(ROOT), "images", timeout=1500)
        for name in names:
            run(str(TOOL), "load", name, timeout=300)


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


def install(name: str, namespace: str, *arguments: str) -> Release:
    run(
        *("helm", "upgrade", "--install", name, str(ROOT / "charts" / "ssd")),
        *("-n", namespace, "--create-namespace", "--wait", "--timeout", "120s", *arguments),
        timeout=180,
    )
    return Release(name, namespace)


@pytest.fixture(scope="session")
def release(images: None) -> Iterator[Release]:
    """The release of the whole suite."""
    release = install("ssd", "ssd-system")
    yield release
    run("helm", "uninstall", release.name, "-n", release.namespace, "--wait", timeout=120)


@pytest.fixture(scope="session")
def kube(release: Release) -> Kube:
    return Kube("default")


def sample(name: str, drafts: int, **spec: object) -> Object:
    """The embedded pair on CPUs."""
    return {
        "apiVersion": "ssd.dev/v1alpha1",
        "kind": "SSDDeployment",
        "metadata": {"name": name},
        "spec": {
            "accelerator": "cpu",
            "target": {"source": {"uri": "demo://target"}, **spec},
            "draft": {"source": {"uri": "demo://draft"}, "replicas": drafts},
        },
    }


@pytest.fixture(scope="session")
def demo(kube: Kube) -> Iterator[str]:
    """A resource that serves, with one draft."""
    kube.apply(sample("demo", drafts=1))
    kube.wait_ready("demo", drafts=1)
    yield "demo"
    kube("delete", "ssd", "demo", "--wait=true")


Job = tuple[str, float, int]
"""Prompt, temperature, seed."""
JOBS: tuple[Job, ...] = tuple(
    (prompt, temperature, seed)
    for seed, prompt in enumerate(PROMPTS)
    for temperature in TEMPERATURES
)


async def generate(client: TargetClient, job: Job, mode: Mode) -> tuple[TokenId, ...]:
    prompt, temperature, seed = job
    call = GenerateCall(
        prompt=prompt,
        sampling=SamplingParams(temperature=temperature, ignore_eos=True),
        seed=seed,
        max_tokens=NUM_TOKENS,
        mode=mode,
    )
    return tuple([token async for chunk in client.generate(call) for token in chunk.token_ids])


@dataclass
class Tally:
    """What clients met."""

    num_finished: int = 0
    num_different: int = 0
    failures: list[SSDError] = field(default_factory=list)


class Load:
    """Clients that ask one after another, and compare each text. Use as a context."""

    def __init__(self, endpoint: str, expected: Mapping[Job, Sequence[TokenId]]) -> None:
        self.tally = Tally()
        self._endpoint = endpoint
        self._expected = expected
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        eventually(lambda: self.tally.num_finished > 0, "the first text is there", 120)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "a request never ended"
        self._done.result(timeout=0)

    def go_on(self, num_texts: int) -> None:
        """Wait until so many more texts are there."""
        goal = self.tally.num_finished + num_texts
        eventually(lambda: self.tally.num_finished >= goal, f"{num_texts} more texts", 180)

    def _run(self) -> None:
        try:
            asyncio.run(self._ask_all())
        except BaseException as error:
            self._done.set_exception(error)
            raise
        self._done.set_result(None)

    async def _ask_all(self) -> None:
        async with TargetClient(self._endpoint) as client:
            await asyncio.gather(*(self._ask(client, first) for first in range(NUM_CLIENTS)))

    async def _ask(self, client: TargetClient, first: int) -> None:
        number = first
        while not self._stop.is_set():
            job = JOBS[number % len(JOBS)]
            number += 1
            try:
                async with asyncio.timeout(90):
                    found = await generate(client, job, Mode.SPECULATIVE)
            except SSDError as error:
                self.tally.failures.append(error)
                await asyncio.sleep(0.2)
                continue
            self.tally.num_finished += 1
            self.tally.num_different += found != tuple(self._expected[job])


@pytest.fixture(scope="session")
def expected() -> dict[Job, tuple[TokenId, ...]]:
    """What the target writes alone: plain decoding on this machine, without a cluster."""

    async def decode() -> dict[Job, tuple[TokenId, ...]]:
        async with (
            deployed(Deployment(num_drafts=0)) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            return {job: await generate(client, job, Mode.AUTOREGRESSIVE) for job in JOBS}

    return asyncio.run(decode())


@pytest.fixture
def load(kube: Kube, demo: str, expected: Mapping[Job, Sequence[TokenId]]) -> Iterator[Load]:
    """Eight clients on ``demo``."""
    with Load(kube.endpoint(demo), expected) as running:
        yield running


def processes(module: str) -> list[int]:
    """Ids of the processes of this machine that run a module in a container, oldest first."""
    found = subprocess.run(
        ("pgrep", "-f", f"python -m {module}"), capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


@pytest.fixture
def wait() -> Callable[..., float]:
    """``eventually``."""
    return eventually


@pytest.fixture
def pids() -> Callable[[str], list[int]]:
    """``processes``."""
    return processes


@pytest.fixture(name="sample")
def sample_fixture() -> Callable[..., Object]:
    """``sample``."""
    return sample


@pytest.fixture
def in_cluster(kube: Kube) -> Callable[..., str]:
    """Runs a command in a pod of the target's image; what it wrote."""

    def ask(*command: str) -> str:
        image = f"localhost/ssd-target:{__version__}"
        return kube(
            *("run", "client", "--rm", "-i", "--quiet", "--restart=Never", f"--image={image}"),
            *("--image-pull-policy=Never", "--command", "--", *command),
        )

    return ask


@dataclass(frozen=True)
class SecondRelease:
    """A release that watches a namespace of its own."""

    kube: Kube


@pytest.fixture
def second_release(release: Release) -> Iterator[SecondRelease]:
    """The first release keeps to ``default`` meanwhile."""
    install("ssd", "ssd-system", "--set", "operator.watchNamespaces={default}")
    run("kubectl", "create", "namespace", "other")
    install("ssd-two", "other", "--set", "operator.watchNamespaces={other}")
    yield SecondRelease(Kube("other"))
    run("helm", "uninstall", "ssd-two", "-n", "other", "--wait")
    run("kubectl", "delete", "namespace", "other", "--timeout=90s", timeout=120)
    install("ssd", "ssd-system")
