"""The definition on a real API server: what it accepts and rejects, and what kubectl shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kube import CRDS, Kube
from tests.unit.ssd_operator.memory_cluster import patched

from ssd_operator.api.parse import parse
from ssd_operator.api.schema import crd
from ssd_operator.api.spec import API_VERSION, KIND, POOL_KIND, RESOURCE_KINDS
from ssd_operator.settings import UNTOUCHED_NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
SAMPLES = HERE.parents[2] / "charts" / "ssd" / "samples"
GOOD = sorted([*(HERE / "good").glob("*.yaml"), *SAMPLES.glob("*.yaml")])
BAD = yaml.safe_load((HERE / "bad.yaml").read_text())
DRY_RUN = "--dry-run=server"
STATUS = ("--server-side", "--subresource=status")
DEMO = yaml.safe_load((SAMPLES / "demo-cpu.yaml").read_text())
# An operator of the cluster creates no pods for it, for which the end of the namespace would wait.
DEMO["spec"]["paused"] = True

Object = dict[str, Any]


def named(path: Path) -> str:
    return path.stem


def named_demo(name: str) -> Object:
    return {**DEMO, "metadata": {"name": name}}


def with_status(name: str, status: Object) -> Object:
    return {**named_demo(name), "status": status}


@pytest.fixture(scope="module")
def unwatched(api_server: Kube) -> Iterator[Kube]:
    """A namespace in which no operator of the cluster writes: it would replace the status."""
    kube = Kube(UNTOUCHED_NAMESPACE)
    kube("delete", "ssd", "shown", "--ignore-not-found")
    yield kube
    kube("delete", "ssd", "shown", "--ignore-not-found")


@pytest.fixture(scope="module")
def shown(unwatched: Kube) -> Object:
    """A resource as it is stored, with a status that the operator would write."""
    made = unwatched.send("create", named_demo("shown"))
    assert made.returncode == 0, made.stderr
    now = "2026-01-01T00:00:00Z"
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": "Well.",
            "lastTransitionTime": now,
            "observedGeneration": 1,
        }
        for kind, reason in (("Ready", "Serving"), ("SpeculationActive", "Active"))
    ]
    status = {
        "observedGeneration": 1,
        "conditions": conditions,
        "endpoint": {"grpc": "shown.here.svc:50051"},
        "model": {"name": "tiny"},
        "target": {"summary": "1/1"},
        "speculation": {"state": "Slower"},
        "draft": {"replicas": 2, "summary": "2/2", "selector": "ssd.dev/name=shown"},
        "transport": {"effective": "TCP"},
        "links": [{"target": "t", "draft": "d", "roundTripMicroseconds": 120}],
    }
    written = unwatched.send("apply", with_status("shown", status), *STATUS)
    assert written.returncode == 0, written.stderr
    found: Object = json.loads(unwatched("get", "ssd", "shown", "--output=json"))
    return found


@pytest.mark.parametrize("path", GOOD, ids=named)
def test_a_good_resource_means_the_same_with_and_without_its_defaults(
    api_server: Kube, path: Path
) -> None:
    given = yaml.safe_load(path.read_text())
    answer = api_server.send("create", given, DRY_RUN)
    assert answer.returncode == 0, answer.stderr
    defaulted = json.loads(answer.stdout)
    facts = {name: defaulted["metadata"][name] for name in ("namespace", "uid", "generation")}
    plain = given | {"metadata": given["metadata"] | facts, "spec": without_nulls(given["spec"])}
    assert parse(defaulted) == parse(plain)


def without_nulls(spec: Object) -> Object:
    """What the API server stores: it drops a field that is null, and fills in its default."""
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in spec.items()
        if value is not None
    }


def bad_resource(name: str) -> list[Object]:
    """The resource of a case of ``bad.yaml``, after the one that it replaces if there is one."""
    case, resources = BAD["cases"][name], BAD["resources"]
    (changed,) = resources.keys() & case.keys()
    kind = POOL_KIND if changed == "pool" else KIND
    about = {"kind": kind, "apiVersion": API_VERSION, "metadata": {"name": case.get("name", name)}}
    changes = [case[each] for each in ("before", changed) if each in case]
    return [about | {"spec": patched(resources[changed], each)} for each in changes]


@pytest.mark.parametrize("name", BAD["cases"])
def test_a_bad_resource_is_rejected_with_the_fix(api_server: Kube, name: str) -> None:
    *before, refused = bad_resource(name)
    for each in before:
        made = api_server.send("create", each)
        assert made.returncode == 0, made.stderr
    answer = api_server.send("replace" if before else "create", refused, DRY_RUN)
    assert answer.returncode != 0, "the API server accepted it"
    assert BAD["cases"][name]["message"] in answer.stderr


@pytest.mark.parametrize("is_first", [False, True])
def test_the_default_number_of_gpus_may_be_written_or_left_out(
    api_server: Kube, *, is_first: bool
) -> None:
    about = {"kind": KIND, "apiVersion": API_VERSION, "metadata": {"name": f"four-{is_first:d}"}}
    plain = about | {"spec": patched(BAD["resources"]["gpu"], {"paused": True})}
    written = patched(plain, {"spec": {"target": {"tensorParallelSize": 4}}})
    before, after = (written, plain) if is_first else (plain, written)
    made = api_server.send("create", before)
    assert made.returncode == 0, made.stderr
    answer = api_server.send("replace", after, DRY_RUN)
    assert answer.returncode == 0, answer.stderr


def test_each_rule_of_the_definition_has_a_resource_that_breaks_it() -> None:
    expected = [case["message"] for case in BAD["cases"].values()]
    messages = {each for kind in RESOURCE_KINDS for each in messages_of(crd(kind))}
    assert [each for each in messages if not any(fragment in each for fragment in expected)] == []


def messages_of(node: Any) -> list[str]:
    if isinstance(node, list):
        return [message for each in node for message in messages_of(each)]
    if not isinstance(node, dict):
        return []
    own = [each["message"] for each in node.get("x-kubernetes-validations", [])]
    return own + [message for each in node.values() for message in messages_of(each)]


@pytest.mark.parametrize("definition", CRDS)
def test_the_definition_is_established_without_complaint(api_server: Kube, definition: str) -> None:
    found = json.loads(api_server("get", definition, "--output=json"))
    conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_every_field_has_an_explanation(api_server: Kube) -> None:
    for kind in ("ssd", "ssddp"):
        assert "<no description>" not in api_server("explain", kind, "--recursive")


def test_columns_show_the_state(unwatched: Kube, shown: Object) -> None:
    head, row = unwatched("get", "ssd", "shown").splitlines()
    assert head.split() == [
        *("NAME", "READY", "TARGETS", "DRAFTS", "SPECULATION", "TRANSPORT", "AGE"),
    ]
    assert row.split()[:-1] == ["shown", "True", "1/1", "2/2", "Slower", "TCP"]


def test_wide_columns_show_reason_and_endpoint(unwatched: Kube, shown: Object) -> None:
    head, row = unwatched("get", "ssd", "shown", "--output=wide").splitlines()
    assert head.split()[-3:] == ["MODEL", "REASON", "ENDPOINT"]
    assert row.split()[-3:] == ["tiny", "Serving", "shown.here.svc:50051"]


def test_the_endpoint_column_shows_the_url_of_vllm(api_server: Kube) -> None:
    given = named_demo("openai")
    assert api_server.send("create", given).returncode == 0
    url = "http://openai.here.svc:8000/v1"
    given["status"] = {"endpoint": {"http": url}}
    assert api_server.send("apply", given, *STATUS).returncode == 0
    _, row = api_server("get", "ssd", "openai", "--output=wide").splitlines()
    assert row.split()[-1] == url


def test_the_category_lists_it(unwatched: Kube, shown: Object) -> None:
    assert "shown" in unwatched("get", "inference")


def test_the_scale_subresource_counts_drafts(unwatched: Kube, shown: Object) -> None:
    path = f"/apis/ssd.dev/v1alpha1/namespaces/{unwatched.namespace}/ssddeployments/shown/scale"
    scale = json.loads(unwatched("get", "--raw", path))
    assert scale["spec"]["replicas"] == 2
    assert scale["status"] == {"replicas": 2, "selector": "ssd.dev/name=shown"}


def test_the_scale_has_a_default(api_server: Kube) -> None:
    given = named_demo("unscaled")
    given["spec"] = {**DEMO["spec"], "draft": {"source": {"uri": "demo://draft"}}}
    assert api_server.send("create", given).returncode == 0
    path = f"/apis/ssd.dev/v1alpha1/namespaces/{api_server.namespace}/ssddeployments/unscaled/scale"
    assert json.loads(api_server("get", "--raw", path))["spec"]["replicas"] == 1


def test_kubectl_scale_changes_the_number_of_drafts_within_its_bounds(api_server: Kube) -> None:
    assert api_server.send("create", named_demo("scaled")).returncode == 0
    api_server("scale", "ssd/scaled", "--replicas=3")
    found = json.loads(api_server("get", "ssd", "scaled", "--output=json"))
    assert found["spec"]["draft"]["replicas"] == 3
    refused = api_server.attempt("scale", "ssd/scaled", "--replicas=65")
    assert "should be less than or equal to 64" in refused.stderr


def test_kubectl_scale_changes_the_number_of_drafts_of_a_pool(api_server: Kube) -> None:
    pool = yaml.safe_load((HERE / "good" / "pool.yaml").read_text())
    pool["spec"]["paused"] = True
    assert api_server.send("create", pool).returncode == 0
    api_server("scale", "ssddp/everything-shared", "--replicas=5")
    head, row = api_server("get", "ssddp", "everything-shared").splitlines()
    columns = "NAME READY REASON DRAFTS TARGETS PROGRESS SESSIONS CAPACITY AGE"
    assert head.split() == columns.split()
    assert row.startswith("everything-shared")
    found = json.loads(api_server("get", "ssddp", "everything-shared", "--output=json"))
    assert found["spec"]["replicas"] == 5


def test_a_write_of_the_spec_does_not_change_the_status(unwatched: Kube, shown: Object) -> None:
    answer = unwatched.send(
        "apply",
        with_status("shown", {"model": {"name": "forged"}}),
        "--server-side",
        DRY_RUN,
        "--field-manager=another",
        "--force-conflicts",
    )
    assert json.loads(answer.stdout)["status"] == shown["status"]


def test_a_partial_status_keeps_the_other_conditions(unwatched: Kube, shown: Object) -> None:
    other = {**shown["status"]["conditions"][0], "type": "DraftReady"}
    answer = unwatched.send(
        "apply",
        with_status("shown", {"conditions": [other]}),
        *(*STATUS, "--field-manager=another", DRY_RUN),
    )
    kinds = [each["type"] for each in json.loads(answer.stdout)["status"]["conditions"]]
    assert sorted(kinds) == ["DraftReady", "Ready", "SpeculationActive"]
