"""Objects as they are stored are no difference; every edit by hand is one."""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.ssd_operator.resources import SAMPLES, children, resource, specs

from ssd_operator.api.spec import Object, Spec
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.diff import differences, matches, removal

ANSWERS = list(yaml.safe_load_all((Path(__file__).parents[1] / "answers.yaml").read_text()))
IDENTITY = ("apiVersion", "kind")
DEFAULTED = ("paused", "publishNotReadyAddresses", "readOnly", "protocol")
"""Fields whose absence means the wanted value: false, and TCP as part of a merge key."""
OBJECTS = st.sampled_from([each for sample in SAMPLES.values() for each in children(sample)])
Step = str | int


def leaves(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """Paths to all leaves except those of the object's kind."""
    if isinstance(value, dict | list) and value:
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        for step, each in steps:
            if path or step not in IDENTITY:
                yield from leaves(each, (*path, step))
    else:
        yield path


def at(value: Any, path: tuple[Step, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def changed(value: Any) -> Any:
    """Something else of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}9"
        case _:
            return "something"


def stored(wanted: Object) -> Object:
    """An object as an API server keeps it, with the defaults and spellings of the server."""
    kept = copy.deepcopy(wanted)
    kept["metadata"] |= {"uid": "1", "resourceVersion": "7", "creationTimestamp": "now"}
    kept["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    kept["status"] = {"observedGeneration": 1}
    spec = kept.get("spec", {})
    if kept["kind"] == "Service":
        del spec["publishNotReadyAddresses"]
        spec |= {"sessionAffinity": "None", "ipFamilies": ["IPv4"]}
    if kept["kind"] == "Deployment":
        pod = spec["template"]["spec"]
        pod |= {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}
        pod.setdefault("schedulerName", "default-scheduler")
        pod["volumes"].append({"name": "injected", "emptyDir": {}})
        for container in pod["containers"]:
            container["livenessProbe"]["httpGet"]["scheme"] = "HTTP"
            limits = container["resources"].get("limits", {})
            if limits.get("memory") == "2Gi":
                limits["memory"] = "2048Mi"
            container["resources"].setdefault("requests", {}).update(
                {key: value for key, value in limits.items() if key.endswith("/gpu")}
            )
    return kept


def part(value: Any, step: str) -> Any:
    """A field by its name, or an item of a list by its field ``name``."""
    if isinstance(value, list):
        return next(each for each in value if each["name"] == step)
    return value[step]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer["object"])
def test_what_an_api_server_makes_of_our_objects_covers_them(answer: dict[str, Any]) -> None:
    made = children(SAMPLES[answer["sample"]])
    (wanted,) = [each for each in made if str(ref_of(each)) == answer["object"]]
    live = copy.deepcopy(wanted)
    for path, value in answer["changed"].items():
        *way, last = path.split()
        owner = functools.reduce(part, way, live)
        if value is None:
            del owner[last]
        else:
            owner[last] = value
    assert matches(live, wanted)


@given(specs())
def test_an_object_covers_itself_and_what_a_server_stores_of_it(spec: Spec) -> None:
    for each in children(resource(spec)):
        assert matches(each, each)
        assert matches(stored(each), each)


def place_of(live: Object, wanted: Object, path: tuple[Step, ...]) -> tuple[Step, ...]:
    """Where a wanted leaf lies in the stored object: items of others may stand before it."""
    here: tuple[Step, ...] = ()
    for depth, step in enumerate(path):
        ours = at(wanted, path[: depth + 1])
        if isinstance(step, int) and isinstance(ours, dict) and "name" in ours:
            key = "mountPath" if "mountPath" in ours else "name"
            step = [each[key] for each in at(live, here)].index(ours[key])  # noqa: PLW2901
        here = (*here, step)
    return here


@given(OBJECTS, st.data())
def test_a_leaf_that_was_edited_by_hand_is_seen(wanted: Object, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(leaves(wanted))))
    live = stored(wanted)
    *way, last = place_of(live, wanted, path)
    owner = at(live, tuple(way))
    owner[last] = changed(at(wanted, path))
    assert not matches(live, wanted)


@given(OBJECTS, st.data())
def test_a_leaf_that_was_removed_is_seen(wanted: Object, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(leaves(wanted))))
    assume(path[-1] not in DEFAULTED)
    live = copy.deepcopy(wanted)
    del at(live, path[:-1])[path[-1]]
    assert not matches(live, wanted)


def spec(**fields: Any) -> Object:
    return {"spec": fields}


def pod(**fields: Any) -> Object:
    """A Deployment of this pod."""
    return spec(template=spec(**fields))


def container(**fields: Any) -> Object:
    """A Deployment of this container."""
    return pod(containers=[{"name": "target", **fields}])


def requests(cpu: Any) -> Object:
    return container(resources={"requests": {"cpu": cpu}})


def memory(limit: str) -> Object:
    return container(resources={"limits": {"memory": limit}})


def env(*variables: Object) -> Object:
    return container(env=list(variables))


A, B = ({"name": name, "value": "1"} for name in "AB")
NAME: Object = {"fieldRef": {"fieldPath": "metadata.name"}}
DEFAULTED_NAME: Object = {"fieldRef": {"fieldPath": "metadata.name", "apiVersion": "v1"}}
TCP, UDP = ({"containerPort": 53, "protocol": protocol} for protocol in ("TCP", "UDP"))
PORT = container(ports=[{"containerPort": 53}])
PEER: Object = {"from": [{"podSelector": {}}]}
SAME = [
    (memory("2Gi"), memory("2048Mi")),
    (requests("500m"), requests("0.5")),
    (requests("2"), requests(2)),
    (requests("1m"), requests("0.0005")),
    (requests("1m"), requests("1n")),
    (requests("2001m"), requests("2.0005")),
    (container(resources={}), container(resources={"requests": {}})),
    (env(A), env(A)),
    (env({"name": "A"}), env({"name": "A", "value": ""})),
    (env({"name": "A", "valueFrom": DEFAULTED_NAME}), env({"name": "A", "valueFrom": NAME})),
    (container(ports=[UDP, TCP]), PORT),
    (spec(), spec(paused=False)),
    (spec(), spec(publishNotReadyAddresses=False)),
    (spec(podSelector={}), spec(podSelector={"matchLabels": {}})),
]
OTHER = [
    (requests("2"), requests("2m")),
    (requests("2m"), requests("1n")),
    (memory("?"), memory("2Gi")),
    (requests("1"), container(resources={"limits": {"cpu": "1"}})),
    (env({"name": "A", "value": "1000m"}), env(A)),  # text that looks like a quantity
    (env({"name": "B"}, A), env(A)),
    (env(A), env({"name": "A"})),
    (env({"name": "A", "value": "2"}), env({"name": "A", "value": ""})),
    (env({"name": "A", "valueFrom": {}}), env(A)),
    (env(), env(A)),
    (container(env="A=1"), env(A)),
    (container(ports=[UDP]), PORT),
    (spec(ingress=[PEER, {"from": []}]), spec(ingress=[PEER])),
    (spec(ingress=[PEER]), spec(ingress=[PEER, {"from": []}])),
    (spec(paused=True), spec(paused=False)),
    (spec(publishNotReadyAddresses=True), spec(publishNotReadyAddresses=False)),
    (spec(), spec(enableServiceLinks=False)),
    (
        spec(volumes=[{"name": "tmp", "hostPath": {"path": "/"}}]),
        spec(volumes=[{"name": "tmp", "emptyDir": {}}]),
    ),
    (spec(a=1), spec(a=True)),
    ({}, spec(a=1)),
    ({"metadata": {}}, spec(a=1)),
]


@pytest.mark.parametrize(("live", "wanted"), SAME)
def test_another_spelling_or_a_default_of_the_server_is_no_difference(
    live: Object, wanted: Object
) -> None:
    assert matches(live, wanted)


@pytest.mark.parametrize(("live", "wanted"), OTHER)
def test_another_meaning_is_a_difference(live: Object, wanted: Object) -> None:
    assert not matches(live, wanted)


ONE, TWO = {"a": "1"}, {"a": "1", "b": "2"}
ADDED: list[tuple[Object, Object, bool]] = [
    (spec(selector=TWO), spec(selector=ONE), True),
    (
        spec(podSelector={"matchLabels": {}, "matchExpressions": [{"key": "x"}]}),
        spec(podSelector={"matchLabels": {}}),
        True,
    ),
    (
        spec(ingress=[{"from": [{"podSelector": {}, "namespaceSelector": {}}]}]),
        spec(ingress=[PEER]),
        True,
    ),
    (pod(nodeSelector=TWO), pod(nodeSelector=ONE), True),
    (
        spec(template={"metadata": {"annotations": TWO}}),
        spec(template={"metadata": {"annotations": ONE}}),
        False,
    ),
    (env(B, A, {"name": "C"}), env(A), True),
    (container(env=[A], envFrom=[{}]), env(A), True),
    (container(args=["--debug"]), container(), True),
    (container(args=[]), container(), False),
    (container(resources={"limits": {"memory": "1Gi", "cpu": "1m"}}), memory("1Gi"), True),
    (requests("1"), container(resources={"requests": {}}), False),
]


@pytest.mark.parametrize(("live", "wanted", "is_found"), ADDED)
def test_what_is_added_to_a_field_that_is_ours_as_a_whole_is_found(
    live: Object, wanted: Object, *, is_found: bool
) -> None:
    assert bool(removal(live, wanted)) is is_found
    assert matches(live, wanted) is not is_found


@given(OBJECTS)
def test_a_stored_object_without_additions_has_an_empty_patch(wanted: Object) -> None:
    assert removal(stored(wanted), wanted) == {}


def test_a_patch_removes_additions_and_keeps_items_of_other_writers() -> None:
    container = {"name": "ours", "image": "i", "env": [{"name": "OURS", "value": "1"}]}
    wanted = {
        "metadata": {"name": "x"},
        "spec": {"selector": {"a": "b"}, "containers": [container]},
    }
    mount = {"name": "theirs", "mountPath": "/theirs"}
    kept = container | {"volumeMounts": [mount]}
    live = {
        "metadata": {"name": "x", "ownerReferences": [{"uid": "theirs"}]},
        "spec": {
            "selector": {"a": "b", "extra": "x"},
            "containers": [
                {"name": "sidecar"},
                kept | {"args": ["--theirs"], "env": [*container["env"], {"name": "THEIRS"}]},
            ],
            "volumes": [{"name": "theirs"}],
        },
    }
    assert removal(live, wanted) == {
        "spec": {"selector": {"extra": None}, "containers": [{"name": "sidecar"}, kept]}
    }


@pytest.mark.parametrize(
    ("kind", "live", "is_equal"),
    [
        ("Pod", ["ours", "theirs"], True),
        ("Pod", ["theirs", "ours"], True),
        ("Pod", ["theirs"], False),
        ("Deployment", ["ours", "theirs"], False),
    ],
)
def test_tolerations_that_admission_adds_to_a_pod_are_no_difference(
    kind: str, live: list[str], *, is_equal: bool
) -> None:
    wanted, found = ({"tolerations": [{"key": key} for key in keys]} for keys in (["ours"], live))
    assert (not differences({"spec": found}, {"kind": kind, "spec": wanted})) is is_equal
