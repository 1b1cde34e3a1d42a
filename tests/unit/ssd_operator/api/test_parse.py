"""Reading a resource of the API server: complete and typed, or refused with the field."""

import re
from copy import deepcopy
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_operator.resources import CORPUS, template_of

from ssd_operator.api import reserved
from ssd_operator.api.fields import parse_quantity
from ssd_operator.api.parse import SpecError, parse
from ssd_operator.api.pool import PoolSpec
from ssd_operator.api.schema import structural
from ssd_operator.api.spec import KIND, DraftSpec, Object, Resource, Source, Spec, TargetSpec

GOOD = sorted(CORPUS.glob("*.yaml"))
SPEC = structural(Spec)


def resource(spec: Object, **metadata: Any) -> Object:
    own = {"namespace": "here", "name": "demo", "uid": "u", "generation": 3}
    return {"kind": "SSDDeployment", "metadata": own | metadata, "spec": spec}


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


def test_absent_fields_get_their_defaults() -> None:
    assert parse(demo()) == Resource(
        namespace="here",
        name="demo",
        uid="u",
        generation=3,
        spec=Spec(
            accelerator="cpu",
            target=TargetSpec(source=Source(uri="demo://target")),
            draft=DraftSpec(source=Source(uri="demo://draft")),
        ),
    )


@pytest.mark.parametrize(
    ("accelerator", "num_gpus", "milliseconds"), [("nvidia", 4, 20), ("cpu", 1, 100)]
)
def test_some_defaults_depend_on_the_accelerator(
    accelerator: str, num_gpus: int, milliseconds: int
) -> None:
    spec = parse(demo(accelerator=accelerator)).spec
    assert spec.tensor_parallel_size == num_gpus
    assert spec.draft_deadline_milliseconds == milliseconds
    given = {"draftDeadlineMilliseconds": 7}
    set_by_user = demo({"tensorParallelSize": 2}, accelerator=accelerator, speculation=given)
    spec = parse(set_by_user).spec
    assert (spec.tensor_parallel_size, spec.draft_deadline_milliseconds) == (2, 7)


def test_every_field_of_a_full_resource_is_read() -> None:
    full = corpus("everything")
    spec = parse(resource(full)).spec
    assert spec.model_dump(mode="json", by_alias=True, exclude_unset=True) == full


def corpus(name: str) -> Object:
    found: Object = yaml.safe_load((CORPUS / f"{name}.yaml").read_text())["spec"]
    return found


@pytest.mark.parametrize("part", ["requests", "limits"])
def test_an_amount_that_is_no_quantity_is_refused(part: str) -> None:
    error = refusal(demo({"resources": {part: {"cpu": "two"}}}))
    assert str(error).startswith(f"spec.target.resources.{part}.cpu is 'two': ")


def defaulted(value: Any, schema: Object) -> Any:
    """A value as the API server stores it: without nulls, with the defaults of the schema."""
    if isinstance(value, list):
        return [defaulted(each, schema["items"]) for each in value]
    if not isinstance(value, dict):
        return value
    if "additionalProperties" in schema:
        return {name: each for name, each in value.items() if each is not None}
    found = {
        name: deepcopy(field.get("default")) if value.get(name) is None else value[name]
        for name, field in schema["properties"].items()
    }
    return {
        name: defaulted(each, schema["properties"][name])
        for name, each in found.items()
        if each is not None
    }


# The API server stores no null.
@pytest.mark.parametrize(
    "path", [each for each in GOOD if each.stem != "nulls"], ids=lambda path: path.stem
)
def test_a_resource_means_the_same_with_and_without_its_defaults(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    schema = SPEC if document["kind"] == KIND else structural(PoolSpec)
    given = document | {"metadata": resource({})["metadata"]}
    assert parse(given) == parse(given | {"spec": defaulted(document["spec"], schema)})


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (resource({}), "spec.target is missing"),
        (resource({}) | {"spec": None}, "spec is None: input should be an object"),
        (
            demo(draft={"replicas": 65}),
            "spec.draft.replicas is 65: input should be less than or equal to 64",
        ),
        (
            demo(draft={"replicas": True}),
            "spec.draft.replicas is True: input should be a valid integer",
        ),
        (
            demo(target={"tensorParallelSize": 3}),
            "spec.target.tensorParallelSize is 3: input should be 1, 2, 4 or 8",
        ),
        (demo(accelerator="tpu"), "spec.accelerator is 'tpu': input should be 'nvidia' or 'cpu'"),
        (demo(target={"source": {}}), "spec.target.source.uri is missing"),
        (
            demo(draft={"autoscaling": {"targetOccupancy": "0"}}),
            "spec.draft.autoscaling.targetOccupancy is '0': string should match pattern",
        ),
        (
            demo(target={"image": "a" * 513}),
            f"spec.target.image is '{'a' * 63}: string should have at most 512 characters",
        ),
        (
            demo(target={"podTemplate": {"env": [{"name": "A"}, 7]}}),
            "spec.target.podTemplate.env[1] is 7: input should be an object",
        ),
        (
            demo(target={"podTemplate": {"labels": {str(each): "" for each in range(33)}}}),
            "dictionary should have at most 32 items",
        ),
        (
            demo(security={"clients": [{"podSelector": {}}] * 17}),
            "tuple should have at most 16 items",
        ),
    ],
)
def test_a_forbidden_value_is_refused_with_field_value_and_bound(obj: Object, words: str) -> None:
    error = refusal(obj)
    assert words in str(error)


def test_a_refusal_names_three_problems_and_counts_the_others() -> None:
    ssd = {"maxNumSeqs": 0, "maxQueue": -1}
    error = refusal(demo(target={"replicas": 0, "ssd": ssd}, draft={"replicas": -1}))
    assert str(error).count("should be greater") == 3
    assert str(error).endswith("; and 1 more")


def test_a_field_of_a_newer_definition_is_ignored() -> None:
    newer = demo(target={"colour": "red"}, tier={"new": True})
    assert parse(newer) == parse(demo())


def test_the_reserved_volumes_are_those_that_pods_have() -> None:
    names, paths = set[str](), set[str]()
    for source in ({"uri": "pvc://w/m"}, {"uri": "hf://org/m", "revision": "0" * 40}):
        secrets = {"tls": {"targetSecretName": "t", "draftSecretName": "d"}, "tokenSecretName": "k"}
        parts = {part: {"source": source} for part in ("target", "draft")}
        obj = resource(parts | {"security": secrets})
        spec = template_of(parse(obj))["spec"]
        names |= {each["name"] for each in spec["volumes"]}
        paths |= {each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert names == reserved.VOLUMES
    assert paths == reserved.PATHS


def texts(field: Object) -> st.SearchStrategy[str]:
    most = field["maxLength"]
    if "pattern" in field:
        made = st.from_regex(re.compile(field["pattern"], re.ASCII), fullmatch=True)
        return made.filter(lambda text: field.get("minLength", 0) <= len(text) <= most)
    return st.text(min_size=field.get("minLength", 0), max_size=min(most, 8))


def values(field: Object) -> st.SearchStrategy[Any]:
    """Any value that a schema accepts."""
    if "enum" in field:
        return st.sampled_from(field["enum"])
    match field.get("type"):
        case "integer":
            return st.integers(field["minimum"], field["maximum"])
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(values(field["items"]), max_size=2)
        case "object":
            return objects(field)
        case _:
            return texts(field)


def objects(field: Object) -> st.SearchStrategy[Object]:
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
"""One block of a spec at a time: all together are slow to generate."""


@given(SPECS)
def test_what_the_definition_accepts_is_read_and_its_defaults_change_nothing(spec: Object) -> None:
    found = outcome(spec)
    assert isinstance(found, Spec) or "SpecInvalid" not in found
    assert found == outcome(defaulted(spec, SPEC))


def outcome(spec: Object) -> Spec | str:
    """What a spec means, or why it is refused."""
    try:
        return parse(resource(spec)).spec
    except SpecError as error:
        return str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_any_value_of_a_field_is_read_or_refused(data: st.DataObject) -> None:
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (2, "2"),
        (-1, "-1"),
        ("-1n", "-0.000000001"),
        ("0.8", "0.8"),
        (".5", "0.5"),
        ("1.", "1"),
        ("2Gi", "2147483648"),
        ("1500k", "1500000"),
        ("12e6", "12000000"),
        ("1E3", "1000"),
        ("1E", "1000000000000000000"),
        ("100u", "0.0001"),
    ],
)
def test_a_quantity_is_a_number(text: str | int, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "Gi", "2gi", "1e3m", "1 Gi", "two", "0x10", "1K", "-", "--1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@given(st.integers(1, 1 << 20))
def test_one_amount_has_several_spellings(number: int) -> None:
    assert parse_quantity(f"{number * 1024}Mi") == parse_quantity(f"{number}Gi")
    assert parse_quantity(f"{number * 1000}m") == parse_quantity(number)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1n", "0.001"), ("2.0005", "2.001"), ("2.5", "2.5"), ("2Gi", "2147483648")],
)
def test_a_server_keeps_whole_thousandths_of_a_request(text: str, number: str) -> None:
    assert parse_quantity(text, is_rounded=True) == Decimal(number)
