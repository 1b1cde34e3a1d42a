"""Children of a resource: reviewed snapshots, and properties over all specs."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.ssd_operator.resources import (
    DEMO,
    DEMO_DRAFT,
    DEMO_TARGET,
    LLAMA,
    NAMES,
    OPERATOR_PEER,
    REVIEWED,
    SAMPLES,
    SETTINGS,
    SNAPSHOTS,
    UID,
    children,
    cpu_demo,
    deployments,
    not_restricted,
    of_kind,
    resource,
    reviewed,
    specs,
    without_hashes,
)

from ssd_operator.api.kubernetes_types import NetworkPeer
from ssd_operator.api.security import Security
from ssd_operator.api.spec import (
    Autoscaling,
    DraftSpec,
    Object,
    Resource,
    Sharing,
    Spec,
    TargetSpec,
    Transport,
)
from ssd_operator.children.objects import CELL_LABEL, HASH_ANNOTATION
from ssd_operator.observe.pod_state import cell_of, labels_of, name_of, revision_of
from ssd_operator.settings import OperatorSettings

ORDER = ["ServiceAccount", "NetworkPolicy", "Service", "Deployment", "PodDisruptionBudget"]


def templates(resource: Resource, settings: OperatorSettings = SETTINGS) -> dict[str, Object]:
    made = of_kind(resource, "Deployment", settings)
    return {name: each["spec"]["template"] for name, each in made.items()}


def selector(child: Object) -> dict[str, str] | None:
    """Labels of the pods that a child selects."""
    spec = child.get("spec", {})
    found = spec.get("podSelector") or spec.get("selector")
    return None if found is None else dict(found.get("matchLabels", found))


def selectors(objects: list[Object]) -> list[dict[str, str]]:
    return [found for each in objects if (found := selector(each)) is not None]


def selects(selector: dict[str, str], template: Object) -> bool:
    return bool(selector.items() <= template["metadata"]["labels"].items())


@pytest.mark.parametrize("name", REVIEWED)
def test_children_equal_the_reviewed_snapshot(name: str) -> None:
    snapshot = list(yaml.safe_load_all((SNAPSHOTS / f"{name}.yaml").read_text()))
    # If the difference is intended: python -m tests.unit.ssd_operator.resources, then review.
    assert reviewed(name) == snapshot


@given(specs())
def test_every_child_is_in_the_namespace_of_its_resource_and_deleted_after_it(spec: Spec) -> None:
    owner = {"kind": "SSDDeployment", "name": "demo", "uid": UID, "apiVersion": "ssd.dev/v1alpha1"}
    order = {"controller": True, "blockOwnerDeletion": True}
    for each in children(resource(spec)):
        assert each["metadata"]["namespace"] == "default"
        assert each["metadata"]["ownerReferences"] == [{**owner, **order}]


def of_cell(cell: int, objects: list[Object]) -> Iterator[str]:
    """The objects of a cell as text, with ``#`` for its number, and without their hashes."""
    number = re.compile(rf'((?:target|draft)-|{CELL_LABEL}": "|_CELL", "value": "){cell}\b')
    for each in objects:
        if labels_of(each).get(CELL_LABEL) == str(cell):
            yield number.sub(r"\1#", without_hashes(each))


@given(specs())
@example(LLAMA)
@example(SAMPLES["everything"].spec)
def test_objects_of_cells_differ_in_their_number_only(spec: Spec) -> None:
    spec = spec.changed(draft=spec.draft.changed(replicas=spec.num_cells))
    objects = children(resource(spec))
    first, *others = (list(of_cell(cell, objects)) for cell in range(spec.num_cells))
    assert others == [first] * len(others)


@given(specs(), NAMES)
def test_names_fit_and_are_unique_and_kinds_are_in_the_order_of_their_apply(
    spec: Spec, name: str
) -> None:
    made = children(resource(spec, name))
    names = [(each["kind"], name_of(each)) for each in made]
    assert len(set(names)) == len(names)
    assert max(len(each) for _, each in names) <= 63
    assert names == sorted(names, key=lambda each: ORDER.index(each[0]))


@given(specs(), specs(), st.lists(NAMES, min_size=2, max_size=2, unique=True))
def test_two_resources_never_select_each_others_pods(
    one: Spec, other: Spec, names: list[str]
) -> None:
    mine = selectors(children(resource(one, names[0])))
    for template in templates(resource(other, names[1])).values():
        assert not any(selects(each, template) for each in mine)


@given(specs())
def test_a_deployment_selects_its_own_pods_and_no_others(spec: Spec) -> None:
    own = of_kind(resource(spec), "Deployment").values()
    for here in own:
        for there in own:
            wanted = selector(here) or {}
            assert selects(wanted, there["spec"]["template"]) == (here is there)
    for each in children(resource(spec)):  # labels that no version changes
        labels = {"ssd.dev/name", "ssd.dev/component", "ssd.dev/cell"}
        labels |= {"ssd.dev/engine"} if each["kind"] == "Service" else set()
        assert set(selector(each) or {}) <= labels


@given(specs())
def test_a_draft_on_gpus_has_one_and_a_target_its_tensor_parallel_size(spec: Spec) -> None:
    gpus = 0
    for each in of_kind(resource(spec), "Deployment").values():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        limits = container["resources"].get("limits", {})
        gpus += each["spec"]["replicas"] * int(limits.get("nvidia.com/gpu", 0))
    wanted = spec.tensor_parallel_size * spec.num_cells if spec.is_gpu else 0
    assert gpus == wanted + (spec.draft.replicas if spec.draft_device == "nvidia" else 0)


@given(specs())
def test_pods_are_restricted_unless_a_host_path_is_requested_and_contain_no_secret(
    spec: Spec,
) -> None:
    is_on_node = spec.model_cache.type == "HostPath"
    expected = ["cache", "cache has CHOWN", "cache is root"] if is_on_node else []
    made = resource(spec)
    assert all(each["kind"] != "Secret" for each in children(made))
    for name, template in templates(made).items():
        is_gateway = name.endswith("-gateway")
        assert not_restricted(template["spec"]) == ([] if is_gateway else expected)
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in template["spec"]["containers"]:
            for variable in container["env"]:
                is_named_secret = any(word in variable["name"] for word in ("TOKEN", "PASSWORD"))
                assert not (is_named_secret and "value" in variable), variable["name"]


def changes_without_a_new_pod(spec: Spec) -> dict[str, Spec]:
    """A spec for each field whose change must replace no pod."""
    draft, target, security = spec.draft, spec.target, spec.security
    autoscaling = Autoscaling(max_replicas=64, target_occupancy="0.5")
    is_closed = security.network_policy
    return {
        "paused": spec.changed(paused=True),
        "draft.replicas": spec.changed(draft=draft.changed(replicas=draft.replicas + 7)),
        "draft.autoscaling": spec.changed(draft=draft.changed(autoscaling=autoscaling)),
        "target.replicas": spec.changed(target=target.changed(replicas=target.replicas + 1)),
        "networkPolicy": spec.changed(security=security.changed(network_policy=not is_closed)),
        "clients": spec.changed(security=security.changed(clients=({"podSelector": {}},))),
        "gateway": spec.changed(
            gateway=spec.gateway.changed(enabled=True, replicas=spec.gateway.replicas + 1)
        ),
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

    newer = NewerSettings(**asdict(SETTINGS) | {"pod_namespace": "elsewhere"})
    assert templates(DEMO, newer) == templates(DEMO)
    hashes = [
        {each["metadata"]["annotations"][HASH_ANNOTATION] for each in children(DEMO, settings)}
        for settings in (SETTINGS, newer)
    ]
    assert hashes[0].isdisjoint(hashes[1])


def test_an_image_is_a_new_revision_of_its_component_and_a_restart_one_of_all() -> None:
    demo = resource(cpu_demo())
    spec = demo.spec.changed(draft=demo.spec.draft.changed(image="other:1"))

    def revisions(resource: Resource) -> list[str]:
        return [revision_of(*deployments(resource, part)) for part in ("target", "draft")]

    before, image, restart = map(
        revisions, (demo, resource(spec), resource(demo.spec, restart="7"))
    )
    assert before[0] == image[0] != restart[0]
    assert len({before[1], image[1], restart[1]}) == 3
    for template in templates(resource(demo.spec, restart="7")).values():
        assert template["metadata"]["annotations"] == {"ssd.dev/restart": "7"}


def test_drafts_are_spread_evenly_over_cells() -> None:
    spec = LLAMA.changed(draft=LLAMA.draft.changed(replicas=3))
    by_cell = [
        (cell_of(each), each["spec"]["replicas"]) for each in deployments(resource(spec), "draft")
    ]
    assert by_cell == [(0, 2), (1, 1)]


@pytest.mark.parametrize(
    ("sharing", "num_cells", "num_drafts", "budgets"),
    [
        ("Cell", 1, 8, set()),
        ("Cell", 2, 8, {"demo-target"}),
        ("Pool", 1, 1, set()),
        ("Pool", 1, 2, {"demo-draft"}),
        ("Pool", 2, 2, {"demo-target", "demo-draft"}),
    ],
)
def test_no_budget_blocks_a_node_drain(
    sharing: Sharing, num_cells: int, num_drafts: int, budgets: set[str]
) -> None:
    spec = cpu_demo(
        target=TargetSpec(source=DEMO_TARGET, replicas=num_cells),
        draft=DraftSpec(source=DEMO_DRAFT, replicas=num_drafts, sharing=sharing),
    )
    made = of_kind(resource(spec), "PodDisruptionBudget")
    assert made.keys() == budgets
    assert all(each["spec"]["maxUnavailable"] == 1 for each in made.values())


def test_only_named_clients_its_targets_and_the_operator_reach_an_engine() -> None:
    client: NetworkPeer = {"podSelector": {"matchLabels": {"app": "chat"}}}
    policies = of_kind(resource(cpu_demo(security=Security(clients=(client,)))), "NetworkPolicy")
    callers = [each["spec"]["ingress"][0]["from"] for each in policies.values()]
    labels = {"ssd.dev/name": "demo", "ssd.dev/component": "target"}
    targets = {"podSelector": {"matchLabels": labels}}
    assert callers == [[client, OPERATOR_PEER], [targets, OPERATOR_PEER]]


def test_only_a_collective_channel_opens_all_ports_between_targets_and_drafts() -> None:
    def opened(channel: Literal["Grpc", "Collective"]) -> list[list[Any]]:
        demo = resource(cpu_demo().changed(transport=Transport(channel=channel)))
        rules = [each["spec"]["ingress"] for each in of_kind(demo, "NetworkPolicy").values()]
        any_port = {"protocol": "TCP"}
        return [[rule["from"] for rule in each if any_port in rule["ports"]] for each in rules]

    def peer(component: str) -> list[Any]:
        labels = {"ssd.dev/name": "demo", "ssd.dev/component": component}
        return [{"podSelector": {"matchLabels": labels}}]

    assert opened("Grpc") == [[], []]
    assert opened("Collective") == [[peer("draft")], [peer("target")]]
