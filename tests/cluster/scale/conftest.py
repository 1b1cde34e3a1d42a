"""The number of resources that one operator must support."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from tests.cluster.kube import Kube, all_of, eventually, pending, run
from tests.cluster.operators import Operator, Reading

NUM_RESOURCES = int(os.environ.get("SSD_SCALE_RESOURCES", "200"))
NUM_NAMESPACES = min(10, NUM_RESOURCES)
REQUESTS = "ssd_operator_api_requests_total"
QUIET_SECONDS = 5.0
"""An operator without a call for this long has nothing left to do."""


@pytest.fixture(scope="module")
def namespaces() -> Sequence[str]:
    return [f"scale-{number}" for number in range(NUM_NAMESPACES)]


@dataclass(frozen=True)
class Converged:
    """The operator's metrics before and after the creation of all resources."""

    before: Reading
    after: Reading
    seconds: float


@pytest.fixture(scope="module")
def converged(operator: Operator, namespaces: Sequence[str]) -> Iterator[Converged]:
    """All resources, created together; their pods stay Pending."""
    before = operator.read()
    documents = [pending(f"r{number}") for number in range(NUM_RESOURCES)]
    for number, document in enumerate(documents):
        document["metadata"]["namespace"] = namespaces[number % len(namespaces)]
    Kube("")("create", "-f", "-", given=all_of(documents), timeout=300)
    waited = eventually(partial(all_are_reported, namespaces), "each status reports its pods", 300)
    after = operator.read()
    settle(operator)
    yield Converged(before, after, waited)
    for name in namespaces:
        run("kubectl", "delete", "ssd", "--all", "-n", name, timeout=300)


def all_are_reported(namespaces: Sequence[str]) -> bool:
    """Whether each resource has its pods, and a status that reports that they have no node."""
    path = (
        "{range .items[*]}"
        '{.status.conditions[?(@.type=="TargetReady")].reason}/'
        '{.status.draft.pendingReplicas}{"\\n"}{end}'
    )
    output = "".join(
        run("kubectl", "get", "ssd", "-n", name, "-o", f"jsonpath={path}") for name in namespaces
    )
    return output.split() == ["Unschedulable/1"] * NUM_RESOURCES


def settle(operator: Operator) -> None:
    """Wait until the operator makes no more calls."""
    calls = [operator.read().total(REQUESTS)]

    def is_quiet() -> bool:
        calls.append(operator.read().total(REQUESTS))
        return len(calls) > 4 * QUIET_SECONDS and len(set(calls[-int(4 * QUIET_SECONDS) :])) == 1

    eventually(is_quiet, "the operator is idle", 120)
