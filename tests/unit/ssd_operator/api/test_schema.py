"""The definition, without an API server: bounded, explained and what the processes accept."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from tests.unit.ssd_operator.resources import ROOT
from tests.unit.ssd_operator.scenes import (
    NOW,
    Scene,
    answer,
    decided,
    draft,
    link,
    target,
    unscheduled,
)

from ssd.runtime.launch import LOCAL_DEADLINE_MS
from ssd_draft.settings import DraftSettings
from ssd_operator.api import schema
from ssd_operator.api.spec import KIND, POOL_KIND, DraftSpec, Object, Source, Spec, TargetSpec
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import PassPlan
from ssd_operator.status.status import status_of, status_of_invalid
from ssd_target.settings import TargetSettings

LARGEST_BYTES = 200 * 1024
MOST_FIELDS = 125
"""Of the spec. A new field needs a user who sets it."""
PARTS, POOL_PARTS = (
    schema.crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for kind in (KIND, POOL_KIND)
)
SPEC = PARTS["spec"]


def walk(field: Object, path: str) -> Iterator[tuple[str, Object]]:
    """A field and all below it."""
    yield path, field
    for name, each in field.get("properties", {}).items():
        yield from walk(each, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if below in field:
            yield from walk(field[below], f"{path}[]")


ALL = dict(
    [
        *walk(SPEC, "spec"),
        *walk(PARTS["status"], "status"),
        *walk(POOL_PARTS["spec"], "pool.spec"),
        *walk(POOL_PARTS["status"], "pool.status"),
    ]
)


def test_the_file_of_the_chart_is_generated_from_the_models() -> None:
    committed = (ROOT / "charts" / "ssd" / "files" / "crd.yaml").read_text()
    assert committed == schema.crd_yaml(), "run: python -m ssd_operator.api.schema"


def test_the_definition_is_small_enough() -> None:
    assert len(schema.crd_yaml()) < LARGEST_BYTES
    parents = {path.rpartition(".")[0].removesuffix("[]") for path in ALL}
    leaves = [
        path
        for path in ALL
        if path.startswith("spec.") and path not in parents and not path.endswith("[]")
    ]
    assert len(leaves) <= MOST_FIELDS


def test_every_field_has_a_description_with_its_default() -> None:
    # `kubectl explain` shows a default nowhere else, and it does not describe scalar items.
    for path, field in ALL.items():
        if not path.endswith("[]"):
            assert field["description"].endswith("."), path
        default = field.get("default")
        if default is not None and not isinstance(default, dict):
            word = json.dumps(default) if isinstance(default, bool) else default
            assert field["description"].endswith(f" Default: {word}."), path


def test_every_field_has_bounds_and_a_structural_type() -> None:
    bounds = {
        "string": {"maxLength"},
        "integer": {"minimum", "maximum", "format"},
        "array": {"maxItems", "x-kubernetes-list-type"},
        "boolean": set(),
        None: {"maxLength", "pattern", "x-kubernetes-int-or-string"},
    }
    for path, field in ALL.items():
        kind = field.get("type")
        if kind == "object":
            wanted = {"properties"} if "properties" in field else {"maxProperties"}
        else:
            wanted = bounds[kind]
        assert wanted <= set(field), path
        assert not {"$ref", "anyOf", "allOf", "title"} & set(field), path


def test_patterns_mean_the_same_to_go_and_to_rust() -> None:
    for path, field in ALL.items():
        pattern = field.get("pattern", "^$")
        # \s, \w and \d are not the same classes.
        assert re.fullmatch(r"\^.*\$", pattern), path
        assert not re.search(r"\\[a-zA-Z]", pattern), path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("spec.draft.autoscaling.targetOccupancy", "1.01"),
        ("spec.draft.autoscaling.targetOccupancy", "0.00"),
        ("spec.draft.gpuResource", "gpu"),
        ("spec.target.image", "a b"),
        ("spec.target.podTemplate.labels[]", "a b"),
        ("spec.target.resources.requests[]", "much"),
        ("spec.podTemplate.volumeMounts[].mountPath", "etc"),
    ],
)
def test_a_pattern_refuses_a_wrong_text(path: str, text: str) -> None:
    assert not re.fullmatch(ALL[path]["pattern"], text)


def test_the_default_of_a_block_contains_the_fields_that_its_rules_read() -> None:
    # The API server validates the default of a block before it adds the defaults of its fields.
    assert ALL["spec.modelCache"]["default"] == {"type": "EmptyDir"}
    for path, field in ALL.items():
        if field.get("default") == {}:
            assert "x-kubernetes-validations" not in field, path


def test_defaults_are_those_of_the_processes() -> None:
    settings = TargetSettings()
    speculation = SPEC["properties"]["speculation"]["properties"]
    assert speculation["lookahead"]["default"] == settings.lookahead == DraftSettings().lookahead
    assert speculation["branches"]["default"] == settings.branches == DraftSettings().branches
    assert speculation["fanOut"]["default"].lower() == settings.fan_out
    assert speculation["backup"]["default"].lower() == settings.backup
    transport = SPEC["properties"]["transport"]["properties"]
    assert transport["channel"]["default"].lower() == settings.channel
    assert SPEC["properties"]["model"]["properties"]["dtype"]["default"] == settings.dtype
    source = Source(uri="demo://target")
    spec = Spec(target=TargetSpec(source=source), draft=DraftSpec(source=source))
    assert spec.draft_deadline_milliseconds == settings.draft_deadline_ms
    spec = spec.changed(accelerator="cpu")
    assert spec.draft_deadline_milliseconds == LOCAL_DEADLINE_MS


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("speculation.lookahead", TargetSettings, "lookahead"),
        ("speculation.branches", TargetSettings, "branches"),
        ("speculation.draftDeadlineMilliseconds", TargetSettings, "draft_deadline_ms"),
        ("model.maxModelLen", TargetSettings, "max_model_len"),
        ("target.ssd.maxNumSeqs", TargetSettings, "max_num_seqs"),
        ("target.ssd.maxQueue", TargetSettings, "max_queue"),
        ("target.drainSeconds", TargetSettings, "drain_seconds"),
        ("transport.maxRoundTripMicroseconds", TargetSettings, "max_round_trip_us"),
        ("draft.sequencesPerReplica", DraftSettings, "max_sessions"),
        ("draft.drainSeconds", DraftSettings, "drain_seconds"),
    ],
)
def test_a_process_accepts_every_number_that_the_definition_accepts(
    path: str, kind: Any, name: str
) -> None:
    bounds = next(each.metadata for each in fields(kind) if each.name == name)
    assert ALL[f"spec.{path}"]["minimum"] >= bounds["min"]
    assert ALL[f"spec.{path}"]["maximum"] <= bounds["max"]


HEALTHY = answer(
    "t0", link("d0", round_trip_seconds=120e-6), link("d1"), tokens_per_round=3.1, hit_rate=0.8
)
SCENES = {
    "nothing yet": Scene(pods=(), deployments=(), pools=(), plan=PassPlan()),
    "healthy": Scene(pools=(HEALTHY,)),
    "links without names": Scene(
        pools=(answer("t0", link("", address="10.0.0.1:50052"), link("", address="10.0.0.2:1")),)
    ),
    "no room": Scene(
        pods=(unscheduled(target(ready=False)), unscheduled(draft("d0", ready=False)))
    ),
    "scaling": Scene(pools=(HEALTHY,), plan=decided(3, "ScaleUp"), results=Results(is_scaled=True)),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=list(SCENES))
def test_the_definition_has_a_place_for_every_written_status(scene: Scene) -> None:
    for found in (status_of(scene.result), status_of_invalid({}, 2, "spec.target is missing", NOW)):
        check(found, PARTS["status"])


def check(value: Any, schema: Object) -> None:
    """Fail if an API server would drop a part of a value, or refuse it."""
    if isinstance(value, dict):
        assert value.keys() <= schema["properties"].keys()
        assert value.keys() >= set(schema.get("required", ()))
        for name, each in value.items():
            check(each, schema["properties"][name])
    elif isinstance(value, list):
        assert len(value) <= schema["maxItems"]
        for each in value:
            check(each, schema["items"])
    elif isinstance(value, str):
        assert schema["type"] == "string"
        assert schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 64)
        assert value in schema.get("enum", [value])
        assert re.fullmatch(schema.get("pattern", ".*"), value, re.ASCII)
    else:
        assert (type(value), schema["type"]) == (int, "integer")
        assert schema["minimum"] <= value <= schema["maximum"]
