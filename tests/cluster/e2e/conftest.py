"""A resource of the installed chart, and clients that send requests to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from tests.cluster.kube import Kube, Release, image_of, sample
from tests.cluster.load import Job, Load, plain_texts

from ssd.types import TokenId


@pytest.fixture(scope="session")
def kube(release: Release) -> Kube:
    """kubectl in the namespace of the suite's resources."""
    return Kube("default")


@pytest.fixture(scope="module")
def demo(kube: Kube) -> Iterator[str]:
    """A ready resource with one linked draft."""
    kube.apply(sample("demo", drafts=1))
    kube.wait_ready("demo")
    kube.wait_linked("demo", 1)
    yield "demo"
    kube("delete", "ssd", "demo", "--wait=true", "--ignore-not-found")


@pytest.fixture(scope="session")
def expected() -> Mapping[Job, Sequence[TokenId]]:
    """Texts of the target without drafts."""
    return plain_texts()


@pytest.fixture
def load(kube: Kube, demo: str, expected: Mapping[Job, Sequence[TokenId]]) -> Iterator[Load]:
    """Eight clients on ``demo``."""
    with Load(kube.endpoint(demo), expected) as running:
        yield running


@pytest.fixture
def in_cluster(kube: Kube) -> Callable[..., str]:
    """Run a command in a pod of the target's image; returns the last line of its output.

    It is read from the log: ``kubectl run -i --rm`` may delete the pod before it has the output.
    """

    def run_in_pod(*command: str) -> str:
        kube(
            *("run", "client", "--restart=Never", f"--image={image_of('target')}"),
            *("--image-pull-policy=IfNotPresent", "--command", "--", *command),
        )
        try:
            kube.wait("pod/client", "jsonpath={.status.phase}=Succeeded", 90)
            return kube("logs", "client", "--tail=1")
        finally:
            kube("delete", "pod/client", "--now")

    return run_in_pod
