"""Children of a resource: reviewed snapshots, and properties over all specs."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_operator.resources import (
    DEMO_DRAFT,
    DEMO_TARGET,
    KEDA,
    LLAMA,
    NAMES,
    POOL,
    PREFLIGHTS,
    SAMPLES,
    SETTINGS,
    SNAPSHOTS,
    children,
    cpu_demo,
    preflight_of,
    resource,
    specs,
)

from ssd_operator.api.kubernetes_types import NetworkPeer
from ssd_operator.api.spec import (
    Accelerator,
    Autoscaling,
    Draft,
    Object,
    Observability,
    Resource,
    ScalingMode,
    Security,
    Sharing,
    Spec,
    Target,
)
from ssd_operator.children.kinds import KINDS
from ssd_operator.children.manifests import wanted
from ssd_operator.children.names import (
    HASH_ANNOTATION,
    REVISION_LABEL,
    cell_of,
    revision_of,
)
from ssd_operator.children.volumes import USER
from ssd_operator.settings import OperatorSettings

ORDER = [
    "ServiceAccount",
    "NetworkPolicy",
    "Service",
    "Deployment",
    "PodDisruptionBudget",
    "HorizontalPodAutoscaler",
    "ScaledObject",
    "PodMonitor",
]
RESTRICTED_VOLUMES = {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "projected"}


def templates(resource: Resource, settings: OperatorSettings = SETTINGS) -> dict[str, Object]:
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in children(resource, settings)
        if each["kind"] == "Deployment"
    }


def selectors(objects: list[Object]) -> list[dict[str, str]]:
    """All selectors of pods."""
    found = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            found.append(spec["selector"])
        elif each["kind"] == "NetworkPolicy":
            found.append(spec["podSelector"]["matchLabels"])
        elif "selector" in spec:
            found.append(spec["selector"]["matchLabels"])
    return found


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def gpus(resource: Resource) -> int:
    return sum(
        each["spec"]["replicas"]
        * int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        for each in children(resource)
        if each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
    )


def not_restricted(pod: Object) -> list[str]:
    """What the Pod Security level ``restricted`` rejects in a pod."""
    context, faults = pod["securityContext"], []
    if not context["runAsNonRoot"] or context["seccompProfile"]["type"] != "RuntimeDefault":
        faults.append("user or seccomp")
    faults += [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    faults += [
        volume["name"]
        for volume in pod["volumes"]
        if not (set(volume) - {"name"}) <= RESTRICTED_VOLUMES
    ]
    for container in pod["containers"] + pod.get("initContainers", []):
        own = container["securityContext"]
        if own.get("privileged") or own["allowPrivilegeEscalation"]:
            faults.append(f"{container['name']} may gain privileges")
        elif own["capabilities"] != {"drop": ["ALL"]}:
            faults.append(f"{container['name']} has {', '.join(own['capabilities']['add'])}")
        if own.get("runAsUser", USER) == 0:
            faults.append(f"{container['name']} is root")
        faults += [str(port) for port in container.get("ports", []) if "hostPort" in port]
    return faults


@pytest.mark.parametrize("name", SAMPLES)
def test_children_equal_the_reviewed_snapshot(name: str) -> None:
    reviewed = list(yaml.safe_load_all((SNAPSHOTS / f"{name}.yaml").read_text()))
    # If the difference is intended: python -m tests.unit.ssd_operator.resources, then review.
    assert children(SAMPLES[name]) == reviewed


@given(specs(), NAMES)
def test_names_fit_and_are_unique(spec: Spec, name: str) -> None:
    made = children(resource(spec, name))
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(set(names)) == len(names)
    assert max(len(each) for _, each in names) <= 63


@given(specs())
def test_children_are_in_the_order_of_their_apply(spec: Spec) -> None:
    kinds = [each["kind"] for each in children(resource(spec))]
    assert kinds == sorted(kinds, key=ORDER.index)


@given(specs(), specs(), st.lists(NAMES, min_size=2, max_size=2, unique=True))
def test_two_resources_never_select_each_others_pods(
    one: Spec, other: Spec, names: list[str]
) -> None:
    mine = selectors(children(resource(one, names[0])))
    theirs = templates(resource(other, names[1])).values()
    for template in theirs:
        assert not any(selects(each, template["metadata"]["labels"]) for each in mine)


@given(specs())
def test_a_deployment_selects_its_own_pods_and_no_others(spec: Spec) -> None:
    deployments = [each for each in children(resource(spec)) if each["kind"] == "Deployment"]
    for here in deployments:
        for there in deployments:
            matches = selects(
                here["spec"]["selector"]["matchLabels"],
                there["spec"]["template"]["metadata"]["labels"],
            )
            assert matches == (here is there)


@given(specs())
def test_selectors_contain_only_labels_that_no_version_changes(spec: Spec) -> None:
    for each in selectors(children(resource(spec))):
        assert set(each) <= {"ssd.dev/name", "ssd.dev/component", "ssd.dev/cell"}


@given(specs())
def test_a_draft_has_one_gpu_and_a_target_its_tensor_parallel_size(spec: Spec) -> None:
    wanted_gpus = spec.tensor_parallel_size * spec.num_cells + spec.draft.replicas
    assert gpus(resource(spec)) == (wanted_gpus if spec.accelerator is Accelerator.NVIDIA else 0)


@pytest.mark.parametrize("title", PREFLIGHTS)
def test_a_preflight_has_none_of_the_privileges_of_its_target(title: str) -> None:
    assert not_restricted(preflight_of(SAMPLES[title])["spec"]) == []


@given(specs())
def test_pods_pass_the_restricted_level_unless_a_host_path_is_requested(spec: Spec) -> None:
    is_on_node = spec.model_cache.type == "HostPath"
    expected = ["cache", "cache has CHOWN", "cache is root"] if is_on_node else []
    for template in templates(resource(spec)).values():
        assert not_restricted(template["spec"]) == expected


@given(specs())
def test_no_object_contains_a_secret(spec: Spec) -> None:
    made = children(resource(spec))
    assert all(each["kind"] != "Secret" for each in made)
    for template in templates(resource(spec)).values():
        for container in template["spec"]["containers"]:
            for variable in container["env"]:
                is_named_secret = any(word in variable["name"] for word in ("TOKEN", "PASSWORD"))
                assert not (is_named_secret and "value" in variable), variable["name"]
        assert template["spec"]["automountServiceAccountToken"] is False


def changes_without_a_new_pod(spec: Spec) -> dict[str, Spec]:
    """A spec for each field whose change must replace no pod."""
    draft, target = spec.draft, spec.target
    autoscaling = Autoscaling(mode=ScalingMode.HPA, max_replicas=64, target_occupancy="0.5")
    return {
        "paused": spec.changed(paused=True),
        "draft.replicas": spec.changed(draft=draft.changed(replicas=draft.replicas + 7)),
        "draft.autoscaling": spec.changed(draft=draft.changed(autoscaling=autoscaling)),
        "target.replicas": spec.changed(target=target.changed(replicas=target.replicas + 1)),
        "security.networkPolicy": spec.changed(
            security=spec.security.changed(network_policy=not spec.security.network_policy)
        ),
        "security.clients": spec.changed(
            security=spec.security.changed(clients=({"podSelector": {}},))
        ),
        "podMonitor": spec.changed(observability=Observability(pod_monitor=True)),
    }


@given(specs())
def test_scaling_and_policies_replace_no_pod(spec: Spec) -> None:
    before = templates(resource(spec))
    for field, changed in changes_without_a_new_pod(spec).items():
        after = templates(resource(changed))
        assert {name: after[name] for name in before} == before, field


def test_a_new_version_of_the_operator_writes_objects_and_replaces_no_pod() -> None:
    class NewerSettings(OperatorSettings):
        version = "9.9.9"

    newer = NewerSettings(
        target_image=SETTINGS.target_image,
        draft_image=SETTINGS.draft_image,
        pod_namespace="elsewhere",
    )
    demo = SAMPLES["cpu-demo"]
    assert templates(demo, newer) == templates(demo)
    hashes = [
        {each["metadata"]["annotations"][HASH_ANNOTATION] for each in children(demo, settings)}
        for settings in (SETTINGS, newer)
    ]
    assert hashes[0].isdisjoint(hashes[1])


def test_a_new_image_changes_the_revision_of_its_component_only() -> None:
    spec = cpu_demo()
    changed = spec.changed(draft=spec.draft.changed(image="other:1"))
    before, after = (templates(resource(each)) for each in (spec, changed))
    assert before["demo-target-0"] == after["demo-target-0"]
    revisions = [
        each["demo-draft-0"]["metadata"]["labels"][REVISION_LABEL] for each in (before, after)
    ]
    assert revisions[0] != revisions[1]


def test_the_restart_annotation_gives_all_pods_a_new_revision() -> None:
    before = templates(resource(cpu_demo()))
    after = templates(resource(cpu_demo(), restart="17"))
    for name, template in after.items():
        assert template["metadata"]["annotations"] == {"ssd.dev/restart": "17"}
        assert revision_of({"spec": {"template": template}}) != revision_of(
            {"spec": {"template": before[name]}}
        )


def test_drafts_belong_to_a_cell_or_to_the_pool() -> None:
    by_cell = {
        each["metadata"]["name"]: (cell_of(each), each["spec"]["replicas"])
        for each in children(resource(LLAMA))
        if each["metadata"]["name"].startswith("demo-draft-") and each["kind"] == "Deployment"
    }
    assert by_cell == {"demo-draft-0": (0, 2), "demo-draft-1": (1, 1)}
    assert wanted(resource(POOL), SETTINGS, {0: 4}, KINDS) == children(resource(POOL))
    dialled = {
        variable["value"]
        for name, template in templates(resource(POOL)).items()
        if "target" in name
        for variable in template["spec"]["containers"][0]["env"]
        if variable["name"] == "SSD_TARGET_DRAFTS"
    }
    assert dialled == {"demo-draft:50052"}


@pytest.mark.parametrize(
    ("sharing", "num_cells", "num_drafts", "budgets"),
    [
        (Sharing.CELL, 1, 8, set()),
        (Sharing.CELL, 2, 8, {"demo-target"}),
        (Sharing.POOL, 1, 1, set()),
        (Sharing.POOL, 1, 2, {"demo-draft"}),
        (Sharing.POOL, 2, 2, {"demo-target", "demo-draft"}),
    ],
)
def test_no_budget_blocks_a_node_drain(
    sharing: Sharing, num_cells: int, num_drafts: int, budgets: set[str]
) -> None:
    spec = cpu_demo(
        target=Target(source=DEMO_TARGET, replicas=num_cells),
        draft=Draft(source=DEMO_DRAFT, replicas=num_drafts, sharing=sharing),
    )
    made = [each for each in children(resource(spec)) if each["kind"] == "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in made} == budgets
    assert all(each["spec"]["maxUnavailable"] == 1 for each in made)


def callers(objects: list[Object], name: str) -> list[Any]:
    (policy,) = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", name)
    ]
    return list(policy["spec"]["ingress"][0]["from"])


def test_only_its_own_targets_and_the_operator_reach_a_draft() -> None:
    targets, operator = callers(children(resource(cpu_demo())), "demo-draft")
    assert targets == {
        "podSelector": {"matchLabels": {"ssd.dev/name": "demo", "ssd.dev/component": "target"}}
    }
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ssd"}}


def test_only_named_clients_and_the_operator_reach_a_target() -> None:
    client: NetworkPeer = {"podSelector": {"matchLabels": {"app": "chat"}}}
    made = children(resource(cpu_demo(security=Security(clients=(client,)))))
    first, operator = callers(made, "demo-target")
    assert first == client
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "ssd-operator"}}


@given(st.sampled_from(ScalingMode))
def test_only_modes_hpa_and_keda_have_a_scaler(mode: ScalingMode) -> None:
    spec = cpu_demo(draft=Draft(source=DEMO_DRAFT, autoscaling=Autoscaling(mode=mode, keda=KEDA)))
    kinds = ("HorizontalPodAutoscaler", "ScaledObject")
    made = [each["kind"] for each in children(resource(spec)) if each["kind"] in kinds]
    expected = {ScalingMode.HPA: ["HorizontalPodAutoscaler"], ScalingMode.KEDA: ["ScaledObject"]}
    assert made == expected.get(mode, [])
