"""The rendered chart, for each file of values, with and without the optional APIs."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kube import CHART, Object

import ssd
from ssd_operator.children.objects import SCHEME_ANNOTATION

pytestmark = pytest.mark.timeout(120)

SNAPSHOTS = Path(__file__).parent / "snapshots"
DASHBOARD = CHART / "files" / "dashboard.json"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
APIS = {
    "bare": (),
    "all": (
        "monitoring.coreos.com/v1/ServiceMonitor",
        "monitoring.coreos.com/v1/PrometheusRule",
        "monitoring.coreos.com/v1/PodMonitor",
    ),
}


def arguments_of(values: Path, apis: str) -> list[str]:
    return ["--values", str(values), *(f"--api-versions={api}" for api in APIS[apis])]


@pytest.fixture(
    scope="module",
    params=list(product(VALUES, APIS)),
    ids=lambda pair: f"{pair[0].name.removesuffix('-values.yaml')}-{pair[1]}",
)
def rendered(request: pytest.FixtureRequest, render: Any) -> list[Object]:
    objects: list[Object] = render(*arguments_of(*request.param))
    return objects


def pods(objects: list[Object]) -> Iterator[Object]:
    for each in objects:
        if each["kind"] == "Pod":
            yield each["spec"]
        elif each["kind"] in {"Deployment", "Job"}:
            yield each["spec"]["template"]["spec"]


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = [
        each
        for each in objects
        if each["kind"] == kind and name in {None, each["metadata"]["name"]}
    ]
    return found


def roles(objects: list[Object]) -> list[Object]:
    return [each for each in objects if each["kind"] in {"Role", "ClusterRole"}]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name)
def test_helm_lint_accepts_the_chart(helm: Any, values: Path) -> None:
    done = helm(*("lint", CHART, "--strict", "--kube-version", "1.34.0", "--values", values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["everything", "default"])
def test_the_rendered_objects_equal_the_snapshot(render: Any, name: str) -> None:
    snapshot, values = SNAPSHOTS / f"{name}.yaml", CHART / "ci" / f"{name}-values.yaml"
    objects = render(*arguments_of(values, "bare"), "--set=crds.install=false")
    for each in objects:
        if each["kind"] == "ConfigMap" and each["data"]["ssd.json"] == DASHBOARD.read_text():
            each["data"]["ssd.json"] = f"the text of {DASHBOARD.name}"
    if name == "default":
        everything = list(yaml.safe_load_all((SNAPSHOTS / "everything.yaml").read_text()))
        objects = [short(each) if each in everything else each for each in objects]
    fresh = yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=None, width=120)
    assert fresh == snapshot.read_text(), f"check the difference, then write it to {snapshot}"


def short(found: Object) -> Object:
    """What a snapshot has for an object that is the same with other values."""
    return {"as in everything.yaml": f"{found['kind']} {found['metadata']['name']}"}


def test_every_object_has_its_own_name(rendered: list[Object]) -> None:
    names = Counter(
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in rendered
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert all(len(name) <= 63 for _, _, name in names)


def test_no_role_has_a_wildcard_or_a_forbidden_right(rendered: list[Object]) -> None:
    for role in roles(rendered):
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            forbidden = {
                "secrets",
                "nodes",
                "namespaces",
                "customresourcedefinitions",
                "configmaps",
            }
            assert not forbidden & set(rule["resources"])
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_every_pod_passes_the_restricted_level(rendered: list[Object]) -> None:
    for pod in pods(rendered):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_optional_objects_depend_on_the_served_apis_unless_they_are_set(render: Any) -> None:
    optional = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}

    def found(*arguments: str) -> set[str]:
        return {each["kind"] for each in render(*arguments)} & optional

    served = [f"--api-versions={api}" for api in APIS["all"]]
    values = [f"metrics.{kind[0].lower()}{kind[1:]}.enabled" for kind in optional]
    assert found() == set()
    assert found(*served) == optional
    assert found(*(f"--set={value}=true" for value in values)) == optional
    assert found(*served, *(f"--set={value}=false" for value in values)) == set()


@pytest.mark.parametrize(
    ("arguments", "namespaces"),
    [
        ((), {"matchNames": ["here"]}),
        (("--set=operator.watchNamespaces={team-a,team-b}",), {"matchNames": ["team-a", "team-b"]}),
        (("--set=operator.watchAllNamespaces=true",), {"any": True}),
    ],
)
def test_engines_of_the_watched_namespaces_are_monitored(
    render: Any, arguments: tuple[str, ...], namespaces: Object
) -> None:
    objects = render("--set=metrics.podMonitor.enabled=true", *arguments)
    assert only(objects, "PodMonitor")["spec"]["namespaceSelector"] == namespaces


def test_engines_whose_pages_have_tls_are_monitored_over_it(render: Any) -> None:
    monitor = only(render("--set=metrics.podMonitor.enabled=true"), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    name = re.sub("[^a-z]", "_", SCHEME_ANNOTATION)
    assert endpoint["relabelings"] == [
        {
            "sourceLabels": [f"__meta_kubernetes_pod_annotation_{name}"],
            "regex": "(https)",
            "targetLabel": "__scheme__",
        }
    ]


NAMED = "--set=operator.watchNamespaces={team-a,team-b}"
EVERYWHERE = "--set=operator.watchAllNamespaces=true"


@pytest.mark.parametrize(
    ("arguments", "namespaces", "listed"),
    [
        ([], ["here"], "here"),
        ([NAMED], ["team-a", "team-b"], "team-a,team-b"),
        ([EVERYWHERE], [None], ""),
    ],
    ids=["default", "named", "everywhere"],
)
def test_the_operator_has_rights_only_in_the_namespaces_that_it_watches(
    render: Any, arguments: list[str], namespaces: list[str | None], listed: str
) -> None:
    objects = render("--set=rbac.aggregate=false", *arguments)
    bound = [each for each in objects if "ssd.dev/binds" in each["metadata"].get("labels", {})]
    assert [each["metadata"].get("namespace") for each in bound] == namespaces
    is_everywhere = arguments == [EVERYWHERE]
    assert any(each["kind"].startswith("Cluster") for each in objects) is is_everywhere
    environment = environment_of(objects)
    assert environment["SSD_OPERATOR_WATCH_NAMESPACES"] == listed
    assert ("SSD_OPERATOR_WATCH_ALL_NAMESPACES" in environment) is is_everywhere


def container_of(objects: list[Object]) -> Object:
    """The operator's container."""
    (pod,) = pods([only(objects, "Deployment")])
    (container,) = pod["containers"]
    return dict(container)


def environment_of(objects: list[Object]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container_of(objects)["env"]}


def test_a_release_in_kube_system_must_name_other_namespaces(render: Any, refusal: Any) -> None:
    assert "the operator never writes in kube-system" in refusal(namespace="kube-system")
    assert render("--set=operator.watchNamespaces={team-a}", namespace="kube-system")


def test_helm_keeps_the_crds_when_it_removes_the_release(render: Any) -> None:
    rendered = [each for each in render() if each["kind"] == "CustomResourceDefinition"]
    stored = list(yaml.safe_load_all((CHART / "files" / "crd.yaml").read_text()))
    assert len(rendered) == len(stored) == 2
    for crd, raw in zip(rendered, stored, strict=True):
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert crd["spec"] == raw["spec"]


def test_the_default_images_have_the_version_of_the_chart(render: Any) -> None:
    objects = render()
    environment = environment_of(objects)
    assert container_of(objects)["image"] == f"localhost/ssd-operator:{ssd.__version__}"
    assert environment["SSD_OPERATOR_TARGET_IMAGE"] == f"localhost/ssd-target:{ssd.__version__}"
    assert environment["SSD_OPERATOR_DRAFT_IMAGE"] == f"localhost/ssd-draft:{ssd.__version__}"
    notes = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (notes["version"], notes["appVersion"]) == (ssd.__version__, ssd.__version__)


def test_a_repository_with_a_slash_and_a_digest_are_used_unchanged(render: Any) -> None:
    digest = "sha256:" + "0" * 64
    objects = render(
        "--set=imageRegistry=r.example/ssd",
        "--set=image.repository=mirror.example/op",
        f"--set=image.digest={digest}",
        "--set=engineImages.draft.tag=v7",
    )
    environment = environment_of(objects)
    assert container_of(objects)["image"] == f"mirror.example/op@{digest}"
    assert environment["SSD_OPERATOR_TARGET_IMAGE"] == f"r.example/ssd/ssd-target:{ssd.__version__}"
    assert environment["SSD_OPERATOR_DRAFT_IMAGE"] == "r.example/ssd/ssd-draft:v7"


def test_the_sample_has_the_pull_secrets_of_the_release(render: Any) -> None:
    secrets = [{"name": name} for name in ("registry", "", "mirror", "registry")]
    values = f"--set-json=imagePullSecrets={json.dumps(secrets)}"
    objects = render("--set=tests.sample.enabled=true", values)
    (container,) = only(objects, "Pod", "ssd-operator-sample")["spec"]["containers"]
    assert container["args"] == ["sample", "here", "registry", "mirror"]


def test_the_notes_contain_the_sample() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    (shown,) = re.findall(r"<<END\n(.*?)\n  END\n", notes, re.DOTALL)
    sample = (CHART / "samples" / "demo-cpu.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(sample)


@pytest.mark.parametrize("sample", sorted((CHART / "samples").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_sample_is_one_resource_and_begins_with_a_comment(sample: Path) -> None:
    text = sample.read_text()
    resource = yaml.safe_load(text)
    assert (resource["apiVersion"], resource["kind"]) == ("ssd.dev/v1alpha1", "SSDDeployment")
    assert text.startswith("# ")
