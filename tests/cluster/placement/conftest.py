"""Pretend nodes with GPUs, and resources that request them."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.cluster.conftest import TOOL
from tests.cluster.kube import Kube, Object, eventually, run
from tests.cluster.operators import Operator

NUM_NODES = 4
NODE_GPUS = 8
PRODUCT = "NVIDIA-H100-80GB-HBM3"
NAMESPACE = "placement"


@pytest.fixture(scope="module")
def namespaces() -> Sequence[str]:
    return (NAMESPACE,)


@pytest.fixture(scope="module")
def nodes(cluster: None) -> Iterator[Sequence[str]]:
    """Nodes whose pods report Running without running; only the cluster tool can create them."""
    if not TOOL.is_file() or not _is_the_tools_own():
        pytest.skip(f"pretend nodes need the cluster of {TOOL} (SSD_CLUSTER_TOOL)")
    run(str(TOOL), "fake-nodes", str(NUM_NODES))
    names = tuple(f"fake-{number}" for number in range(1, NUM_NODES + 1))
    # These nodes report no disk, unlike every kubelet.
    disk = {"ephemeral-storage": "1Ti"}
    patch = json.dumps({"status": {"allocatable": disk, "capacity": disk}})
    for name in names:
        run("kubectl", "patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
    yield names
    run("kubectl", "delete", "node", *names)


@pytest.fixture
def kube(nodes: Sequence[str], operator: Operator) -> Iterator[Kube]:
    """kubectl in a namespace that is emptied after each test, on nodes that are reset."""
    kube = Kube(NAMESPACE)
    yield kube
    kube("delete", "ssd", "--all", "--wait=true")
    run("kubectl", "uncordon", *nodes)
    run("kubectl", "label", "node", *nodes, f"nvidia.com/gpu.product={PRODUCT}", "--overwrite")
    eventually(lambda: kube.items("pods") == [], "no pod is left", 90)


def gpu_cell(name: str, *, drafts: int, **placement: object) -> Object:
    """A target on four GPUs and drafts on one each, only on the pretend nodes."""
    template = {
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    }
    return {
        "apiVersion": "ssd.dev/v1alpha1",
        "kind": "SSDDeployment",
        "metadata": {"name": name},
        "spec": {
            "podTemplate": template,
            "target": {"source": {"uri": "demo://target"}},
            "draft": {
                "source": {"uri": "demo://draft"},
                "replicas": drafts,
                "drainSeconds": 1,
            },
            "placement": {"exclusiveNode": True, "gpuProducts": [PRODUCT], **placement},
        },
    }


def _is_the_tools_own() -> bool:
    output = run(str(TOOL), "env")
    return f"KUBECONFIG={Path(os.environ['KUBECONFIG'])}\n" in output
