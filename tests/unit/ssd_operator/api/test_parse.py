"""A resource of the API server, read: complete, typed, or refused with its field."""

import re
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.api import reserved, schema
from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.spec import (
    Accelerator,
    Autoscaling,
    Draft,
    Object,
    Resource,
    ScalingMode,
    SecretKey,
    Sharing,
    Source,
    Spec,
    Speculation,
    Target,
)
from ssd_operator.api.structural import Schema, problems, stored
from ssd_operator.children.config import OperatorConfig
from ssd_operator.children.pods import target_template

CORPUS = Path(__file__).resolve().parents[3] / "cluster" / "crd"
GOOD = sorted((CORPUS / "good").glob("*.yaml"))
SPEC = schema.spec()


def resource(spec: Object, **metadata: Any) -> Object:
    own = {"namespace": "here", "name": "demo", "uid": "u", "generation": 3}
    return {"metadata": own | metadata, "spec": spec}


def demo(target: Object | None = None, draft: Object | None = None, **spec: Any) -> Object:
    return resource(
        {
            "accelerator": "cpu",
            "target": {"source": {"uri": "demo://target"}} | (target or {}),
            "draft": {"source": {"uri": "demo://draft"}} | (draft or {}),
        }
        | spec
    )


def refusal(obj: Object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(obj)
    return caught.value


def test_what_is_left_out_gets_the_defaults_of_the_dataclasses() -> None:
    assert parse(demo()) == Resource(
        namespace="here",
        name="demo",
        uid="u",
        generation=3,
        spec=Spec(
            accelerator=Accelerator.CPU,
            target=Target(source=Source(uri="demo://target")),
            draft=Draft(source=Source(uri="demo://draft")),
            speculation=Speculation(draft_deadline_milliseconds=100),
        ),
    )


def test_autoscaling_gets_the_defaults_of_its_dataclass() -> None:
    assert parse(demo(draft={"autoscaling": {}})).spec.draft.autoscaling == Autoscaling()


def test_a_target_has_four_gpus_unless_it_says_otherwise() -> None:
    found = parse(demo(accelerator="nvidia")).spec
    assert found.accelerator is Accelerator.NVIDIA
    assert found.target.tensor_parallel_size == 4
    two = parse(demo(accelerator="nvidia", target={"tensorParallelSize": 2}))
    assert two.spec.target.tensor_parallel_size == 2


@pytest.mark.parametrize(("accelerator", "milliseconds"), [("nvidia", 20), ("cpu", 100)])
def test_processes_that_share_cores_wait_longer_for_a_table(
    accelerator: str, milliseconds: int
) -> None:
    spec = parse(demo(accelerator=accelerator)).spec
    assert spec.speculation.draft_deadline_milliseconds == milliseconds
    given = parse(demo(accelerator=accelerator, speculation={"draftDeadlineMilliseconds": 7}))
    assert given.spec.speculation.draft_deadline_milliseconds == 7


def test_metadata_tells_of_annotations_and_of_deletion() -> None:
    spec = demo()["spec"]
    found = parse(resource(spec, annotations={"a": "b"}, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert found.annotations == {"a": "b"}
    assert found.is_deleting
    assert not parse(resource(spec)).is_deleting


def test_every_field_of_a_full_resource_arrives() -> None:
    spec = parse(resource(corpus("everything"))).spec
    assert spec.paused
    assert spec.model.name == "org/model-1"
    assert spec.model.max_model_len == 1 << 20
    target, draft = spec.target, spec.draft
    assert target.source.token_secret == SecretKey(name="hf", key="token")
    assert (target.engine.max_num_seqs, target.engine.max_queue) == (256, 0)
    assert target.resources["requests"] == {"cpu": 2, "memory": "16Gi"}
    assert spec.pod_template.priority_class_name == "high"
    assert spec.pod_template.image_pull_secrets == ({"name": "registry"},)
    assert [each["name"] for each in spec.pod_template.volumes] == [
        *("scratch", "config", "secret", "claim", "host"),
    ]
    assert len(spec.pod_template.volume_mounts) == 3
    assert target.pod_template == draft.pod_template
    assert target.pod_template.node_selector == {"pool": "own"}
    assert draft.sharing is Sharing.POOL
    assert draft.autoscaling == Autoscaling(
        mode=ScalingMode.EXTERNAL,
        min_replicas=0,
        max_replicas=64,
        target_occupancy=0.85,
        scale_down_stabilization_seconds=0,
        cooldown_seconds=600,
        keda_server_address="https://prometheus:9090/x",
        keda_fallback_replicas=0,
    )
    assert spec.placement.gpu_products == ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
    assert spec.model_cache.size_limit == "200Gi"
    assert spec.security.clients[1] == {"namespaceSelector": {}}
    assert spec.observability.pod_monitor
    unset = [
        each.name for each in fields(Spec) if getattr(spec, each.name) == default_of(each.name)
    ]
    assert unset == ["accelerator"]


def corpus(name: str) -> Object:
    found: Object = yaml.safe_load((CORPUS / "good" / f"{name}.yaml").read_text())["spec"]
    return found


def default_of(name: str) -> Any:
    return getattr(parse(demo(accelerator="nvidia")).spec, name)


def test_a_size_may_be_a_number() -> None:
    cache = parse(demo(modelCache={"sizeLimit": 1000})).spec.model_cache
    assert cache.size_limit == "1000"


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_resource_means_the_same_with_and_without_its_defaults(path: Path) -> None:
    spec = yaml.safe_load(path.read_text())["spec"]
    assert parse(resource(spec)) == parse(resource(stored(spec, SPEC)))


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (resource({}), "spec.target is missing"),
        ({"metadata": resource({})["metadata"]}, "spec is None, which is no object"),
        (demo(draft={"replicas": 65}), "spec.draft.replicas is 65; it may be 0 to 64"),
        (demo(draft={"replicas": True}), "spec.draft.replicas is True, which is no integer"),
        (
            demo(target={"tensorParallelSize": 3}),
            "spec.target.tensorParallelSize is 3; it may be one of",
        ),
        (demo(accelerator="tpu"), "spec.accelerator is 'tpu'; it may be one of nvidia, cpu"),
        (demo(target={"source": {}}), "spec.target.source.uri is missing"),
        (
            demo(draft={"autoscaling": {"targetOccupancy": "0"}}),
            "spec.draft.autoscaling.targetOccupancy is '0', which does not match",
        ),
        (demo(target={"image": "a" * 513}), "spec.target.image has 513 characters; it may have 0"),
        (
            demo(placement={"gpuProducts": ["A", "A"]}),
            "spec.placement.gpuProducts holds 'A' twice",
        ),
        (
            demo(target={"podTemplate": {"env": [{"name": "A"}, {"name": "A"}]}}),
            "spec.target.podTemplate.env holds ['A'] twice",
        ),
        (
            demo(target={"podTemplate": {"labels": {str(each): "" for each in range(33)}}}),
            "spec.target.podTemplate.labels has 33 entries; at most 32 are allowed",
        ),
        (
            demo(security={"clients": [{"podSelector": {}}] * 17}),
            "spec.security.clients has 17 items; at most 16 are allowed",
        ),
        (
            demo(target={"resources": {"requests": {"cpu": "much"}}}),
            "spec.target.resources.requests.cpu is 'much', which does not match",
        ),
    ],
)
def test_what_the_schema_forbids_is_refused_with_field_and_bound(obj: Object, words: str) -> None:
    error = refusal(obj)
    assert error.reason == "SpecInvalid"
    assert words in error.message


def test_a_refusal_stays_short() -> None:
    engine = {"maxNumSeqs": 0, "maxQueue": -1}
    error = refusal(demo(target={"replicas": 0, "engine": engine}, draft={"replicas": -1}))
    assert error.message.count("it may be") == 3
    assert error.message.endswith("; and 1 more")


def test_a_field_of_a_newer_definition_is_ignored() -> None:
    newer = demo(target={"colour": "red"}, tier={"new": True})
    assert parse(newer) == parse(demo())


@pytest.mark.parametrize("name", ["SSD_TARGET_POD_NAME", "SSD_DRAFT_CELL"])
@pytest.mark.parametrize("part", ["", "target.", "draft."])
def test_who_a_pod_is_cannot_be_said_by_users(part: str, name: str) -> None:
    template = {"podTemplate": {"env": [{"name": "FINE"}, {"name": name, "value": "x"}]}}
    error = refusal(demo(**({part.rstrip("."): template} if part else template)))
    assert error.reason == "ReservedEnv"
    assert f"spec.{part}podTemplate.env sets {name}" in error.message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"volumes": [{"name": "cache", "emptyDir": {}}]}, "volumes: cache"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/tmp"}]}, "volumeMounts: /tmp"),
        ({"volumeMounts": [{"name": "a", "mountPath": "/models/"}]}, "volumeMounts: /models"),
    ],
)
def test_a_volume_of_the_operators_is_not_replaced(template: Object, words: str) -> None:
    error = refusal(demo(podTemplate=template))
    assert error.reason == "PodTemplateInvalid"
    assert f"spec.podTemplate.{words} is there already" in error.message


def test_the_reserved_volumes_are_those_that_pods_have() -> None:
    config = OperatorConfig(target_image="t", draft_image="d", operator_namespace="ssd")
    names, paths = set[str](), set[str]()
    for source in ({"uri": "pvc://w/m"}, {"uri": "hf://org/m", "revision": "0" * 40}):
        obj = resource({part: {"source": source} for part in ("target", "draft")})
        spec = target_template(parse(obj), config, 0)["spec"]
        names |= {each["name"] for each in spec["volumes"]}
        paths |= {each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert names == reserved.VOLUMES
    assert paths == reserved.PATHS


def texts(field: Schema) -> st.SearchStrategy[str]:
    most = field["maxLength"]
    if "pattern" in field:
        made = st.from_regex(re.compile(field["pattern"], re.ASCII), fullmatch=True)
        return made.filter(lambda text: field.get("minLength", 0) <= len(text) <= most)
    return st.text(min_size=field.get("minLength", 0), max_size=min(most, 8))


def values(field: Schema) -> st.SearchStrategy[Any]:
    """Whatever a schema takes."""
    if "enum" in field:
        return st.sampled_from(field["enum"])
    match field.get("type"):
        case "integer":
            return st.integers(field["minimum"], field["maximum"])
        case "boolean":
            return st.booleans()
        case "array":
            made = st.lists(values(field["items"]), max_size=2)
            return made.filter(lambda found: list(problems(found, field, "")) == [])
        case "object":
            return objects(field)
        case _:
            return texts(field)


def objects(field: Schema) -> st.SearchStrategy[Object]:
    if "additionalProperties" in field:
        names = st.text(min_size=1, max_size=4)
        return st.dictionaries(names, values(field["additionalProperties"]), max_size=2)
    required = set(field.get("required", ()))
    made = {name: values(each) for name, each in field["properties"].items()}
    return st.fixed_dictionaries(
        {name: each for name, each in made.items() if name in required},
        optional={name: each for name, each in made.items() if name not in required},
    )


SMALLEST = {part: {"source": {"uri": f"demo://{part}"}} for part in ("target", "draft")}
SPECS = st.sampled_from(sorted(SPEC["properties"])).flatmap(
    lambda name: st.builds(lambda found: SMALLEST | {name: found}, values(SPEC["properties"][name]))
)
"""One block of a spec at a time: all together are slow to make."""


@given(SPECS)
def test_whatever_the_schema_takes_is_read_and_its_defaults_change_nothing(spec: Object) -> None:
    before = deepcopy(spec)
    complete = stored(spec, SPEC)
    assert spec == before
    assert list(problems(complete, SPEC, "spec")) == []
    assert stored(complete, SPEC) == complete
    assert outcome(spec) == outcome(complete)


def outcome(spec: Object) -> Spec | str:
    """What a spec means, or why it is refused."""
    try:
        return parse(resource(spec)).spec
    except SpecError as error:
        return error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_whatever_stands_in_a_field_is_read_or_refused(data: st.DataObject) -> None:
    spec = deepcopy(corpus("everything"))
    inside: Any = spec
    first = key = data.draw(st.sampled_from(sorted(spec)))
    for _ in range(data.draw(st.integers(0, 8))):
        if below := keys_of(inside[key]):
            inside, key = inside[key], data.draw(st.sampled_from(below))
    inside[key] = data.draw(JSON)
    found = outcome(spec)
    assert isinstance(found, Spec) or first in found


def keys_of(node: Any) -> list[Any]:
    if isinstance(node, list):
        return list(range(len(node)))
    return list(node) if isinstance(node, dict) else []
