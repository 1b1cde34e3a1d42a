"""Resources whose pods get no node: the operator is the only program that acts on them."""

from collections.abc import Iterator, Sequence

import pytest
from tests.cluster.kube import Kube, Object, eventually, sample
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


def pending(name: str, drafts: int = 1) -> Object:
    """A resource whose pods get no node."""
    document = sample(name, drafts=drafts)
    document["spec"]["podTemplate"] = {"nodeSelector": {"example.com/nowhere": "true"}}
    return document


def all_of(documents: Sequence[Object]) -> Object:
    """One list of these documents."""
    return {"apiVersion": "v1", "kind": "List", "items": list(documents)}
