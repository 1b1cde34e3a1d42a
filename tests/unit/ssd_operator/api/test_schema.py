"""The definition, without an API server: complete, bounded, and the same everywhere."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from ssd.launch import LOCAL_DEADLINE_MS
from ssd_draft.settings import DraftSettings
from ssd_operator.api import schema
from ssd_operator.api.parse import DRAFT_DEADLINES
from ssd_operator.api.pod_schema import network_peer, pod_template
from ssd_operator.api.spec import Accelerator, Autoscaling, Draft, Engine, Source, Spec, Target
from ssd_operator.api.status_schema import status
from ssd_operator.api.structural import Schema, problems, stored
from ssd_target.settings import TargetSettings

ROOT = Path(__file__).resolve().parents[4]
LARGEST_BYTES = 200 * 1024
MOST_FIELDS = 110
"""Of the spec. A new field needs a user who sets it."""
SPEC = schema.spec()
Fields = Iterator[tuple[str, Schema]]


def walk(field: Schema, path: str) -> Fields:
    """A field and all below it."""
    yield path, field
    for name, each in field.get("properties", {}).items():
        yield from walk(each, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if below in field:
            yield from walk(field[below], f"{path}[]")


ALL = dict([*walk(SPEC, "spec"), *walk(status(), "status")])


def test_the_charts_file_is_what_the_tables_say() -> None:
    committed = (ROOT / "charts" / "ssd" / "files" / "crd.yaml").read_text()
    assert committed == schema.crd_yaml(), "run: python -m ssd_operator.api.schema"


def test_the_definition_leaves_room_in_an_object() -> None:
    assert len(schema.crd_yaml()) < LARGEST_BYTES


def test_every_field_has_a_sentence() -> None:
    assert [path for path, field in ALL.items() if not field["description"].endswith(".")] == []


def test_kubectl_explain_shows_every_default() -> None:
    for path, field in ALL.items():
        default = field.get("default")
        if default is not None and not isinstance(default, dict):
            word = json.dumps(default) if isinstance(default, bool) else default
            assert field["description"].endswith(f" Default: {word}."), path


def test_a_user_has_few_fields_to_read() -> None:
    parents = {path.rpartition(".")[0].removesuffix("[]") for path in ALL}
    leaves = [
        path
        for path in ALL
        if path.startswith("spec.") and path not in parents and not path.endswith("[]")
    ]
    assert len(leaves) <= MOST_FIELDS


def test_everything_that_can_grow_has_a_bound() -> None:
    bounds = {
        "string": {"maxLength"},
        "integer": {"minimum", "maximum"},
        "array": {"maxItems", "x-kubernetes-list-type"},
        "boolean": set(),
        None: {"maxLength", "pattern"},
    }
    for path, field in ALL.items():
        kind = field.get("type")
        if kind == "object":
            wanted = {"properties"} if "properties" in field else {"maxProperties"}
        else:
            wanted = bounds[kind]
        assert wanted <= set(field), path


def test_patterns_mean_the_same_to_go_and_to_python() -> None:
    for path, field in ALL.items():
        pattern = field.get("pattern", "^$")
        # Go searches, Python matches; and \s, \w and \d are not the same classes.
        assert re.fullmatch(r"\^.*\$", pattern), path
        assert not re.search(r"\\[a-zA-Z]", pattern), path


def test_defaults_are_valid_and_complete_once_stored() -> None:
    for path, field in ALL.items():
        if "default" in field:
            assert list(problems(stored(field["default"], field), field, path)) == []


def test_a_block_whose_rules_read_fields_spells_them_in_its_default() -> None:
    # The API server validates a block's default as written; has(...) guards what may be absent.
    for path, field in ALL.items():
        if field.get("default") == {}:
            assert "x-kubernetes-validations" not in field, path


def test_numbers_are_no_fractions() -> None:
    assert {field.get("type") for field in ALL.values()} <= {
        *("string", "integer", "boolean", "array", "object", None)
    }


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


NAMED_OTHERWISE = {
    (Source, "token_secret"): "tokenSecretRef",
    (Autoscaling, "keda_server_address"): "keda",
    (Autoscaling, "keda_fallback_replicas"): "keda",
}


OPTIONAL: dict[str, Any] = {"autoscaling": Autoscaling}
"""Blocks that may be absent."""


def blocks_of(kind: Any, field: Schema) -> Iterator[tuple[Any, Schema]]:
    """Dataclasses and the schemas of their blocks."""
    yield kind, field
    for each in fields(kind):
        of = OPTIONAL.get(each.name, each.type)
        if is_dataclass(of) and each.name != "token_secret":
            yield from blocks_of(of, field["properties"][camel(each.name)])


BLOCKS = list(blocks_of(Spec, SPEC))


def test_all_blocks_are_compared() -> None:
    assert {kind for kind, _ in BLOCKS} > {Spec, Target, Draft, Engine, Autoscaling, Source}
    assert len({kind for kind, _ in BLOCKS}) == 15


@pytest.mark.parametrize(("kind", "field"), BLOCKS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_block_and_its_dataclass_have_the_same_fields(kind: Any, field: Schema) -> None:
    names = {NAMED_OTHERWISE.get((kind, each.name), camel(each.name)) for each in fields(kind)}
    assert names == set(field["properties"])


def test_what_one_process_must_agree_on_has_its_default() -> None:
    target = TargetSettings()
    speculation = SPEC["properties"]["speculation"]["properties"]
    assert speculation["lookahead"]["default"] == target.lookahead == DraftSettings().lookahead
    assert speculation["branches"]["default"] == target.branches == DraftSettings().branches
    assert speculation["fanOut"]["default"].lower() == target.fan_out
    assert speculation["backup"]["default"].lower() == target.backup
    assert DRAFT_DEADLINES[Accelerator.NVIDIA] == target.draft_deadline_ms
    assert DRAFT_DEADLINES[Accelerator.CPU] == LOCAL_DEADLINE_MS
    assert SPEC["properties"]["model"]["properties"]["dtype"]["default"] == target.dtype


def within(path: str, kind: Any, name: str) -> None:
    bounds = next(each.metadata for each in fields(kind) if each.name == name)
    assert ALL[path]["minimum"] >= bounds["min"], path
    assert ALL[path]["maximum"] <= bounds["max"], path


def test_no_number_gets_in_that_a_process_refuses() -> None:
    for name, of in (
        ("speculation.lookahead", "lookahead"),
        ("speculation.branches", "branches"),
        ("speculation.draftDeadlineMilliseconds", "draft_deadline_ms"),
        ("model.maxModelLen", "max_model_len"),
        ("target.engine.maxNumSeqs", "max_num_seqs"),
        ("target.engine.maxQueue", "max_queue"),
        ("target.drainSeconds", "drain_seconds"),
        ("transport.maxRoundTripMicroseconds", "max_round_trip_us"),
    ):
        within(f"spec.{name}", TargetSettings, of)
    within("spec.draft.sequencesPerReplica", DraftSettings, "max_sessions")
    within("spec.draft.drainSeconds", DraftSettings, "drain_seconds")


def test_builders_return_a_fresh_schema_each_time() -> None:
    assert pod_template() is not pod_template()
    assert network_peer()["properties"] is not network_peer()["properties"]


def test_the_scale_path_has_a_number_before_anyone_wrote_one() -> None:
    (version,) = schema.crd()["spec"]["versions"]
    path = version["subresources"]["scale"]["specReplicasPath"]
    assert "default" in ALL[path.removeprefix(".")]
