"""Resources whose pods get no node: the operator is the only program that acts on them."""

from collections.abc import Iterator, Sequence

import pytest
from tests.cluster.kube import Kube, eventually
from tests.cluster.operators import Operator

NAMESPACE = "passes"


@pytest.fixture(scope="module")
def namespaces() -> Sequence[str]:
    return (NAMESPACE,)


@pytest.fixture
def kube(cluster: None, operator: Operator) -> Iterator[Kube]:
    """kubectl in a namespace that is emptied after each test."""
    kube = Kube(NAMESPACE)
    yield kube
    kube("delete", "ssd", "--all", "--wait=true")
    kube("delete", "pods", "--all", "--grace-period=0", "--force", "--ignore-not-found")
    eventually(lambda: kube.items("deployments,services,pods") == [], "nothing is left", 90)
