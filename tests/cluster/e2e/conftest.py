"""A resource of the installed chart, and clients that keep it busy."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from tests.cluster.kube import Kube, Release, sample
from tests.cluster.load import Job, Load, texts_of_the_target_alone

from ssd import __version__
from ssd.types import TokenId


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
