"""Placement of cells on GPU nodes, and the operator's reports and actions."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import pytest
from tests.cluster.kube import Kube, Object, eventually, run
from tests.cluster.placement.conftest import NODE_GPUS, NUM_NODES, gpu_cell

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

OTHER_PRODUCT = "NVIDIA-A100-SXM4-80GB"
ABSENT_PRODUCT = "NVIDIA-L40S"


def node_of(pod: Object) -> str:
    """Name of its node; empty without one."""
    return str(pod["spec"].get("nodeName", ""))


def condition_of(pod: Object, kind: str) -> Object:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def nodes_of(kube: Kube, name: str) -> tuple[set[str], list[str]]:
    """Nodes of a resource's target pods, and of each of its draft pods."""
    targets, drafts = kube.pods(name, "target"), kube.pods(name, "draft")
    return {node_of(pod) for pod in targets}, sorted(node_of(pod) for pod in drafts)


def is_together(kube: Kube, name: str, num_drafts: int) -> bool:
    """Whether target and drafts are all on one node."""
    targets, drafts = nodes_of(kube, name)
    return len(targets) == 1 and "" not in targets and drafts == sorted(targets) * num_drafts


def test_each_cell_has_its_own_node_and_cells_without_one_report_it(kube: Kube) -> None:
    names = [f"cell-{number}" for number in range(NUM_NODES + 2)]
    for name in names:
        kube.apply(gpu_cell(name, drafts=4))

    def placed() -> list[str]:
        return [name for name in names if is_together(kube, name, 4)]

    eventually(lambda: len(placed()) == NUM_NODES, "as many cells as nodes are together", 120)
    for name in set(names) - set(placed()):
        no_gpu = "Insufficient nvidia.com/gpu"
        kube.wait_for(name, "TargetReady", "False", "Unschedulable", no_gpu)
        assert kube.has(name, "Ready", "False", "Unschedulable")
        targets, drafts = nodes_of(kube, name)
        assert targets == {""}
        assert drafts == [""] * 4  # none without its target
    requested: Counter[str] = Counter()
    for pod in kube.items("pods"):
        (container,) = pod["spec"]["containers"]
        requested[node_of(pod)] += int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert [gpus for node, gpus in requested.items() if node] == [NODE_GPUS] * NUM_NODES


def test_a_draft_too_many_for_the_node_is_reported_and_not_counted(
    kube: Kube, figures: dict[str, object]
) -> None:
    kube.apply(gpu_cell("crowd", drafts=5))

    def rejections() -> list[str]:
        drafts = kube.pods("crowd", "draft")
        messages = [str(condition_of(pod, "PodScheduled").get("message", "")) for pod in drafts]
        assert len(drafts) == 5
        return [each for each in messages if "Insufficient nvidia.com/gpu" in each]

    eventually(lambda: len(rejections()) == 1, "the scheduler finds no GPU for one draft", 60)
    figures["a draft too many, reported after the scheduler's decision, s"] = round(
        kube.wait_for("crowd", "DraftCapacity", "False", "InsufficientLocalGPUs", timeout=5), 1
    )
    eventually(
        lambda: kube.get("ssd", "crowd")["status"]["draft"].get("readyReplicas") == 4,
        "the others are ready",
    )
    draft = kube.get("ssd", "crowd")["status"]["draft"]
    assert (draft["replicas"], draft["pendingReplicas"], draft["desiredReplicas"]) == (5, 1, 5)
    assert kube.condition("crowd", "Ready")["status"] == "True"
    kube("scale", "ssd/crowd", "--replicas=4")
    eventually(lambda: is_together(kube, "crowd", 4), "the draft without a node is removed", 60)
    kube.wait_for("crowd", "DraftCapacity", "True")


def test_drafts_on_cpus_have_those_of_their_targets_node_and_leave_its_gpus(kube: Kube) -> None:
    document = gpu_cell("sockets", drafts=3, exclusiveNode=False)
    # Of 96 CPUs, the target has 8: two drafts fit, as on two sockets.
    resources = {"requests": {"cpu": 40, "memory": "8Gi"}}
    document["spec"]["draft"] |= {"device": "cpu", "resources": resources}
    kube.apply(document)
    missing = "lower draft.replicas or the CPUs of draft.resources"
    kube.wait_for("sockets", "DraftCapacity", "False", "InsufficientLocalCPUs", missing)
    (target,) = kube.pods("sockets", "target")
    drafts = kube.pods("sockets", "draft")
    assert sorted(map(node_of, drafts)) == ["", node_of(target), node_of(target)]
    for pod in drafts:
        assert pod["status"]["qosClass"] == "Guaranteed"
    kube("scale", "ssd/sockets", "--replicas=2")
    kube.wait_for("sockets", "DraftCapacity", "True")
    # A second target has the other GPUs of the node, which no draft requests.
    document = gpu_cell("neighbour", drafts=0, exclusiveNode=False)
    document["spec"]["podTemplate"]["nodeSelector"]["kubernetes.io/hostname"] = node_of(target)
    document["spec"]["target"]["resources"] = {"requests": {"cpu": 1}}
    kube.apply(document)
    eventually(
        lambda: nodes_of(kube, "neighbour")[0] == {node_of(target)}, "both have one node", 30
    )


def test_targets_run_only_on_listed_products(kube: Kube, nodes: Sequence[str]) -> None:
    other = nodes[-1]
    run("kubectl", "label", "node", other, f"nvidia.com/gpu.product={OTHER_PRODUCT}", "--overwrite")
    kube.apply(gpu_cell("either", drafts=1, gpuProducts=[ABSENT_PRODUCT, OTHER_PRODUCT]))
    kube.apply(gpu_cell("neither", drafts=1, gpuProducts=[ABSENT_PRODUCT]))
    eventually(lambda: is_together(kube, "either", 1), "a cell is together", 60)
    assert nodes_of(kube, "either") == ({other}, [other])
    kube.wait_for("neither", "TargetReady", "False", "Unschedulable")


def test_drafts_use_all_nodes_of_the_nvlink_domain_of_their_target(
    kube: Kube, nodes: Sequence[str]
) -> None:
    domains = dict(zip(nodes, "aabb", strict=True))
    for node, domain in domains.items():
        run("kubectl", "label", "node", node, f"nvidia.com/gpu.clique={domain}", "--overwrite")
    kube.apply(gpu_cell("domain", drafts=5, topologyKey="nvidia.com/gpu.clique"))

    def placed() -> set[str]:
        targets, drafts = nodes_of(kube, "domain")
        assert len(drafts) == 5
        return targets | set(drafts)

    # Four and five GPUs do not fit on one node.
    eventually(lambda: len(placed()) == 2 and "" not in placed(), "all pods have a node", 60)
    assert len({domains[node] for node in placed()}) == 1
    kube.wait_for("domain", "DraftCapacity", "True")


def test_drafts_follow_a_moved_target_one_at_a_time(kube: Kube, figures: dict[str, object]) -> None:
    kube.apply(gpu_cell("mover", drafts=3))
    eventually(lambda: is_together(kube, "mover", 3), "the cell is together", 60)
    eventually(
        lambda: kube.get("ssd", "mover")["status"]["draft"].get("readyReplicas") == 3,
        "its drafts are ready",
    )
    (target,) = kube.pods("mover", "target")
    old = {pod["metadata"]["name"] for pod in kube.pods("mover", "draft")}
    run("kubectl", "cordon", node_of(target))
    kube("delete", "pod", target["metadata"]["name"], "--wait=false")

    def has_followed() -> bool:
        return is_together(kube, "mover", 3) and nodes_of(kube, "mover")[0] != {node_of(target)}

    seconds = eventually(has_followed, "target and drafts are together on another node", 120)
    figures["target moved, its 3 drafts (drain 1 s) beside it, s"] = round(seconds, 1)
    fresh = kube.pods("mover", "draft")
    assert old.isdisjoint(pod["metadata"]["name"] for pod in fresh)
    made = sorted(moment(pod["metadata"]["creationTimestamp"]) for pod in fresh)
    serves = sorted(moment(condition_of(pod, "Ready")["lastTransitionTime"]) for pod in fresh)
    # A drain takes its whole second: these drafts have no process that reports its end.
    assert all(before < after for before, after in zip(serves, made[1:], strict=False))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_only_one_of_several_targets_can_be_evicted_at_a_time(
    kube: Kube, nodes: Sequence[str]
) -> None:
    document = gpu_cell("twins", drafts=4)
    document["spec"]["target"]["replicas"] = 2
    kube.apply(document)
    budget = ("poddisruptionbudget", "twins-target")
    eventually(
        lambda: kube.get(*budget)["status"]["disruptionsAllowed"] == 1, "one may be evicted", 60
    )
    assert len(kube.items("poddisruptionbudgets")) == 1  # no budget for a cell's drafts
    eventually(lambda: len(ready_targets(kube)) == 2, "both serve")
    run("kubectl", "cordon", *nodes)  # an evicted pod gets no new node
    first, second = ready_targets(kube)
    assert evict(kube, first) == ""
    eventually(lambda: kube.get(*budget)["status"]["currentHealthy"] == 1, "one is left")
    assert "disruption budget" in evict(kube, second)
    assert ready_targets(kube) == [second]


def ready_targets(kube: Kube) -> list[str]:
    pods = kube.pods("twins", "target")
    return [
        str(pod["metadata"]["name"])
        for pod in pods
        if condition_of(pod, "Ready").get("status") == "True"
    ]


def evict(kube: Kube, pod: str) -> str:
    """Evict a pod; returns the API server's error, empty without one."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": kube.namespace},
    }
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{pod}/eviction"
    done = kube.attempt("create", "--raw", path, "-f", "-", given=eviction)
    return done.stderr if done.returncode else ""
