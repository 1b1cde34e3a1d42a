"""Objects as they are stored are no difference; every edit by hand is one."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.ssd_operator.resources import DEMO, SAMPLES, children, resource, specs

from ssd_operator.api.spec import Object, Spec
from ssd_operator.observe.diff import additions, matches, removal

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
    """An object as an API server keeps it: the defaults and spellings seen in ``answers.yaml``."""
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


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer["applied"]["kind"])
def test_what_an_api_server_made_of_our_objects_covers_them(answer: dict[str, Object]) -> None:
    assert answer["answered"] != answer["applied"]
    assert matches(answer["answered"], answer["applied"])


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


def deployment(**container: Any) -> Object:
    name = {"name": "target"}
    return {"spec": {"template": {"spec": {"containers": [name | container]}}}}


@pytest.mark.parametrize(
    ("live", "wanted", "is_match"),
    [
        ({"limits": {"memory": "2Gi"}}, {"limits": {"memory": "2048Mi"}}, True),
        ({"requests": {"cpu": "500m"}}, {"requests": {"cpu": "0.5"}}, True),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": 2}}, True),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2m"}}, False),
        ({"requests": {"cpu": "1m"}}, {"requests": {"cpu": "0.0005"}}, True),
        ({"requests": {"cpu": "1m"}}, {"requests": {"cpu": "1n"}}, True),
        ({"requests": {"cpu": "2001m"}}, {"requests": {"cpu": "2.0005"}}, True),
        ({"requests": {"cpu": "2m"}}, {"requests": {"cpu": "1n"}}, False),
        ({"limits": {"memory": "?"}}, {"limits": {"memory": "2Gi"}}, False),
        ({}, {"requests": {}}, True),
        ({"requests": {"cpu": "1"}}, {"limits": {"cpu": "1"}}, False),
    ],
)
def test_quantities_are_numbers(live: Object, wanted: Object, *, is_match: bool) -> None:
    assert matches(deployment(resources=live), deployment(resources=wanted)) is is_match


def test_text_that_looks_like_a_quantity_is_text() -> None:
    live, wanted = ([{"name": "A", "value": value}] for value in ("1000m", "1"))
    assert not matches(deployment(env=live), deployment(env=wanted))


@pytest.mark.parametrize(
    ("live", "wanted", "is_match"),
    [
        ([{"name": "A", "value": "1"}], [{"name": "A", "value": "1"}], True),
        ([{"name": "B"}, {"name": "A", "value": "1"}], [{"name": "A", "value": "1"}], False),
        ([{"name": "A", "value": "1"}], [{"name": "A"}], False),
        ([{"name": "A"}], [{"name": "A", "value": ""}], True),
        ([{"name": "A", "value": "2"}], [{"name": "A", "value": ""}], False),
        ([{"name": "A", "valueFrom": {}}], [{"name": "A", "value": "1"}], False),
        ([], [{"name": "A", "value": "1"}], False),
        ("A=1", [{"name": "A", "value": "1"}], False),
    ],
)
def test_a_list_with_a_merge_key_is_compared_by_it(
    live: Any, wanted: list[Object], *, is_match: bool
) -> None:
    assert matches(deployment(env=live), deployment(env=wanted)) is is_match


def test_a_port_without_a_protocol_is_tcp() -> None:
    udp, tcp = ({"containerPort": 53, "protocol": protocol} for protocol in ("UDP", "TCP"))
    wanted = deployment(ports=[{"containerPort": 53}])
    assert matches(deployment(ports=[udp, tcp]), wanted)
    assert not matches(deployment(ports=[udp]), wanted)


def test_a_list_without_a_merge_key_is_one_value() -> None:
    one: Object = {"spec": {"ingress": [{"from": [{"podSelector": {}}]}]}}
    more: Object = {"spec": {"ingress": [*one["spec"]["ingress"], {"from": []}]}}
    assert not matches(more, one)
    assert not matches(one, more)


ADDED: list[tuple[Object, Object, list[tuple[str | int, ...]]]] = [
    (
        {"spec": {"selector": {"a": "1", "b": "2"}}},
        {"spec": {"selector": {"a": "1"}}},
        [("spec", "selector", "b")],
    ),
    (
        {"spec": {"podSelector": {"matchLabels": {}, "matchExpressions": [{"key": "x"}]}}},
        {"spec": {"podSelector": {"matchLabels": {}}}},
        [("spec", "podSelector", "matchExpressions")],
    ),
    (
        {"spec": {"ingress": [{"from": [{"podSelector": {}, "namespaceSelector": {}}]}]}},
        {"spec": {"ingress": [{"from": [{"podSelector": {}}]}]}},
        [("spec", "ingress", 0, "from", 0, "namespaceSelector")],
    ),
    (
        {"spec": {"template": {"spec": {"nodeSelector": {"a": "1", "b": "2"}}}}},
        {"spec": {"template": {"spec": {"nodeSelector": {"a": "1"}}}}},
        [("spec", "template", "spec", "nodeSelector", "b")],
    ),
    (
        {"spec": {"template": {"metadata": {"annotations": {"a": "1", "kubectl": "2"}}}}},
        {"spec": {"template": {"metadata": {"annotations": {"a": "1"}}}}},
        [],
    ),
]


@pytest.mark.parametrize(("live", "wanted", "places"), ADDED)
def test_what_is_added_to_a_field_that_is_ours_as_a_whole_is_found(
    live: Object, wanted: Object, places: list[tuple[str | int, ...]]
) -> None:
    assert additions(live, wanted) == places
    assert matches(live, wanted) is not bool(places)


CONTAINER = ("spec", "template", "spec", "containers", 0)
A, B = ({"name": name, "value": "1"} for name in "AB")


@pytest.mark.parametrize(
    ("live", "wanted", "places"),
    [
        ({"env": [B, A, {"name": "C"}]}, {"env": [A]}, [("env", 2), ("env", 0)]),
        ({"env": [A], "envFrom": [{}]}, {"env": [A]}, [("envFrom",)]),
        ({"args": ["--debug"]}, {}, [("args",)]),
        ({"args": []}, {}, []),
        (
            {"resources": {"limits": {"memory": "1Gi", "cpu": "1m"}}},
            {"resources": {"limits": {"memory": "1Gi"}}},
            [("resources", "limits", "cpu")],
        ),
        ({"resources": {"requests": {"cpu": "1"}}}, {"resources": {"requests": {}}}, []),
    ],
)
def test_what_is_added_to_a_container_is_found_with_its_place(
    live: Object, wanted: Object, places: list[tuple[str | int, ...]]
) -> None:
    found = additions(deployment(**live), deployment(**wanted))
    assert found == [(*CONTAINER, *place) for place in places]
    assert matches(deployment(**live), deployment(**wanted)) is not bool(places)


def test_defaults_of_the_api_server_in_a_variable_are_no_addition() -> None:
    field = {"fieldRef": {"fieldPath": "metadata.name"}}
    stored = {"fieldRef": {"fieldPath": "metadata.name", "apiVersion": "v1"}}
    live, wanted = ([{"name": "A", "valueFrom": each}] for each in (stored, field))
    assert matches(deployment(env=live), deployment(env=wanted))


def test_a_rollout_that_is_paused_is_seen_and_one_that_is_not_has_no_such_field() -> None:
    wanted: Object = {"spec": {"paused": False}}
    assert matches({"spec": {}}, wanted)
    assert not matches({"spec": {"paused": True}}, wanted)


def test_a_field_that_a_server_drops_when_false_is_wanted_false() -> None:
    wanted: Object = {"spec": {"publishNotReadyAddresses": False}}
    assert matches({"spec": {}}, wanted)
    assert not matches({"spec": {"publishNotReadyAddresses": True}}, wanted)
    assert not matches({"spec": {}}, {"spec": {"enableServiceLinks": False}})


def test_an_empty_object_that_means_something_is_missed() -> None:
    wanted: Object = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}]}}
    live: Object = {"spec": {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]}}
    assert not matches(live, wanted)
    assert matches({"spec": {"podSelector": {}}}, {"spec": {"podSelector": {"matchLabels": {}}}})


@pytest.mark.parametrize("edit", [lambda live: live.pop("spec"), lambda live: live.clear()])
def test_half_an_object_covers_nothing(edit: Callable[[Object], Any]) -> None:
    wanted = next(each for each in children(DEMO) if each["kind"] == "Service")
    live = copy.deepcopy(wanted)
    edit(live)
    assert not matches(live, wanted)


def test_true_is_not_one() -> None:
    assert not matches({"spec": {"a": 1}}, {"spec": {"a": True}})


def test_additions_are_removed_by_a_merge_patch_of_this_object() -> None:
    containers = [{"name": "target", "env": [A, B]}, {"name": "sidecar"}]
    live: Object = {
        "metadata": {"name": "demo", "uid": "uid-1", "resourceVersion": "7"},
        "spec": {"selector": {"a": "1", "b": "2"}, "template": {"containers": containers}},
    }
    assert removal(live, [("spec", "template", "containers", 0, "env", 1)]) == {
        "metadata": {"uid": "uid-1"},
        "spec": {
            "selector": {"a": "1", "b": "2"},
            "template": {"containers": [{"name": "target", "env": [A]}, {"name": "sidecar"}]},
        },
    }
