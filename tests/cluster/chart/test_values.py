"""Values of the chart: a closed schema, and the same keys in schema, values.yaml and README."""

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.cluster.chart.conftest import Completed, template
from tests.cluster.kube import CHART

pytestmark = pytest.mark.timeout(120)

Schema = dict[str, Any]
WRITTEN: Schema = json.loads((CHART / "values.schema.json").read_text())


def resolved(part: Any) -> Any:
    """A part of the schema, with the definitions in place of its references."""
    if isinstance(part, list):
        return [resolved(each) for each in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return resolved(WRITTEN["definitions"][part["$ref"].removeprefix("#/definitions/")])
    return {key: resolved(each) for key, each in part.items()}


SCHEMA = resolved(WRITTEN)
MAPS = {
    "operator.nodeSelector",
    "operator.podAnnotations",
    "serviceAccount.annotations",
    "metrics.serviceMonitor.labels",
    "metrics.podMonitor.labels",
    "metrics.prometheusRule.labels",
    "metrics.dashboard.labels",
    *(
        f"operator.affinity.{kind}.{when}.{selector}.matchLabels"
        for kind in ("podAffinity", "podAntiAffinity")
        for when in (
            "requiredDuringSchedulingIgnoredDuringExecution.[]",
            "preferredDuringSchedulingIgnoredDuringExecution.[].podAffinityTerm",
        )
        for selector in ("labelSelector", "namespaceSelector")
    ),
}
"""Maps of strings with any key."""


@pytest.fixture(scope="module")
def default(render: Callable[..., Any]) -> Any:
    """What the chart renders without any value."""
    return render()


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    """``charts/readme.py``, which is a script."""
    spec = importlib.util.spec_from_file_location("readme", CHART.parent / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def objects(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Each object of the schema with its path; ``[]`` stands for an item."""
    if schema.get("type") == "object":
        yield path, schema
        for key, child in schema.get("properties", {}).items():
            yield from objects(child, (*path, key))
    elif schema.get("type") == "array":
        yield from objects(schema["items"], (*path, "[]"))


def nodes(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Each part of the schema with its path, leaves included."""
    yield path, schema
    for key, child in schema.get("properties", {}).items():
        yield from nodes(child, (*path, key))


def misspelt(path: tuple[str, ...]) -> Any:
    """Values with an unknown key at a path."""
    if not path:
        return {"misspelt": 1}
    inner = misspelt(path[1:])
    if path[0] == "[]":
        return [inner]
    return {path[0]: inner}


INSIDES = {("operator", "resources"), ("operator", "affinity")}
"""Objects of Kubernetes, in which null means: no limit, no rule."""
CLOSED = [
    path
    for path, schema in objects(SCHEMA)
    if path[:1] != ("global",) and ".".join(path) not in MAPS
]


def merged(one: Any, other: Any) -> Any:
    """Both values; items of lists are merged into one."""
    if isinstance(one, list):
        return [merged(one[0], other[0])]
    if isinstance(one, dict):
        both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | both
    return one


def test_an_unknown_value_is_rejected_at_every_level(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(functools.reduce(merged, map(misspelt, CLOSED))))
    # Helm reports all levels with an unknown value in one error.
    error = refusal("--values", values)
    assert error.count("misspelt") == len(CLOSED), error


def test_only_global_and_maps_of_strings_are_open() -> None:
    is_open = {
        ".".join(path)
        for path, schema in objects(SCHEMA)
        if schema.get("additionalProperties") is not False
    }
    assert is_open == MAPS | {"global"}


def leaves(schema: Schema, values: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of values on one line: those without a block below them in values.yaml."""
    if isinstance(values, dict) and path and ".".join(path) in {*MAPS, *WHOLE}:
        yield ".".join(path)
    elif schema.get("type") == "object" and schema.get("properties"):
        for key, child in schema["properties"].items():
            if key != "global":
                yield from leaves(child, (values or {}).get(key), (*path, key))
    else:
        yield ".".join(path)


WHOLE = {"operator.resources", "operator.affinity"}
"""Values that are an object of Kubernetes."""


def test_values_schema_and_readme_name_the_same_keys(readme: ModuleType) -> None:
    text = (CHART / "values.yaml").read_text()
    rows = list(readme.rows(text))
    assert [path for path, _, _ in rows] == list(leaves(SCHEMA, yaml.safe_load(text)))
    for path, default, _ in rows:
        found = yaml.safe_load(text)
        for key in path.split("."):
            found = found[key]
        assert yaml.safe_load(default) == found


def test_the_readme_has_the_current_table(readme: ModuleType) -> None:
    text = (CHART / "README.md").read_text()
    assert readme.with_table(text, (CHART / "values.yaml").read_text()) == text


def test_a_value_without_a_comment_is_an_error(readme: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:4: a\.c has no comment"):
        list(readme.rows("a:\n  # Of nothing.\n\n  c: 1"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["image.tag=latest"], "image.tag=latest is rejected: pods that are created at different"),
        (["engineImages.draft.tag=latest"], "engineImages.draft.tag=latest is rejected: pods"),
        (["image.tag=a/b"], "tag"),
        (["image.digest=sha256:12"], "digest"),
        (["image.pullPolicy=Sometimes"], "pullPolicy"),
        (["operator.logLevel=loud"], "logLevel"),
        (["operator.watchNamespaces={a,a}"], "watchNamespaces"),
        (["operator.watchNamespaces={A}"], "watchNamespaces"),
        (["operator.resources.limits.memory=much"], "memory"),
        (["networkPolicy.apiServerPorts={70000}"], "apiServerPorts"),
        (["networkPolicy.apiServerPorts=null"], "apiServerPorts"),
        (["operator.affinity.nodeAffinity.requiredDuringScheduling[0]=a"], "nodeAffinity"),
        (["serviceAccount.create=false"], "needs serviceAccount.name"),
        (["uninstall.deleteResources=true", "rbac.create=false"], "needs rbac.create"),
        (["tests.sample.enabled=true", "rbac.create=false"], "needs rbac.create"),
        (["tests.sample.enabled=true", "operator.watchNamespaces={there}"], '"here"'),
        (["operator.watchNamespaces={kube-system}"], "never writes in kube-system"),
        (["operator.watchNamespaces={a}", "operator.watchAllNamespaces=true"], "choose one"),
    ],
)
def test_invalid_values_are_rejected_with_the_reason(
    refusal: Callable[..., str], values: list[str], message: str
) -> None:
    assert message in refusal(*(f"--set={value}" for value in values))


@pytest.mark.parametrize("release", ["a.b", "1a", "123"])
def test_a_release_name_that_no_service_may_have_is_rejected_with_the_rule(
    helm: Any, release: str
) -> None:
    done = helm("template", release, CHART, "--kube-version", "1.34.0")
    assert done.returncode != 0
    assert f'release name "{release}" is rejected' in done.stderr
    assert "must begin with a letter" in done.stderr


@pytest.mark.parametrize("amount", ["0.5", "1", "500m"])
def test_an_amount_may_be_any_quantity_of_kubernetes(
    render: Callable[..., Any], tmp_path: Path, amount: str
) -> None:
    names = ("cpu", "memory", "ephemeral-storage")
    amounts = "{" + ", ".join(f"{name}: {amount}" for name in names) + "}"
    values = tmp_path / "values.yaml"
    values.write_text(f"operator: {{resources: {{requests: {amounts}, limits: {amounts}}}}}")
    (found,) = [each for each in render("--values", values) if each["kind"] == "Deployment"]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    wanted = yaml.safe_load(amounts)
    assert container["resources"] == {"requests": wanted, "limits": wanted}


NULLABLE = [
    path
    for path, schema in nodes(SCHEMA)
    if path and path[0] != "global" and "[]" not in path and path[:2] not in INSIDES
]


@pytest.mark.parametrize("depth", sorted({len(path) for path in NULLABLE}))
def test_null_is_rejected_by_name_or_means_the_default(
    helm: Any, default: list[Any], depth: int
) -> None:
    paths = [path for path in NULLABLE if len(path) == depth]

    def with_nulls(some: Collection[tuple[str, ...]]) -> Completed:
        return template(helm, *(f"--set={'.'.join(path)}=null" for path in some))

    # Helm reports all values that do not match the schema.
    refused = with_nulls(paths).stderr
    accepted = [path for path in paths if not is_named(path, refused)]
    assert not refused or len(accepted) < len(paths), refused
    done = with_nulls(accepted)
    assert done.returncode == 0, done.stderr
    assert [each for each in yaml.safe_load_all(done.stdout) if each is not None] == default


def is_named(path: tuple[str, ...], error: str) -> bool:
    parent = re.escape("".join(f"/{key}" for key in path[:-1]))
    return re.search(f"at '{parent}': .*'{path[-1]}'|at '{parent}/{path[-1]}'", error) is not None


@pytest.mark.parametrize("option", ["serviceMonitor", "prometheusRule", "dashboard"])
def test_an_option_without_labels_has_the_labels_of_the_chart(render: Any, option: str) -> None:
    values = f"metrics.{option}.enabled=true,metrics.{option}.labels=null"
    (found,) = [
        each
        for each in render(f"--set={values}")
        if each["kind"] == {"dashboard": "ConfigMap"}.get(option, option[:1].upper() + option[1:])
    ]
    assert found["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ssd"


NAMES = {
    "name",
    "namespace",
    "serviceAccountName",
    "priorityClassName",
    "app.kubernetes.io/instance",
}


def test_names_that_are_no_strings_of_yaml_are_rendered_as_strings(helm: Any) -> None:
    done = helm(
        *("template", "true", CHART, "--namespace", "456", "--kube-version", "1.34.0"),
        *("--values", CHART / "ci" / "everything-values.yaml"),
        *("--set-string=operator.watchNamespaces={456,789}", "--set-string=serviceAccount.name=12"),
        "--set=operator.watchAllNamespaces=false",
    )
    assert done.returncode == 0, done.stderr
    for each in yaml.safe_load_all(done.stdout):
        if each is not None:
            assert [path for path, leaf in numbers(each) if path[-1] in NAMES] == []


def numbers(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Leaves that are not strings, with their paths."""
    steps = part.items() if isinstance(part, dict) else enumerate(part)
    for step, value in steps:
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, step))
        elif not isinstance(value, str):
            yield (*path, step), value


def test_global_is_open(render: Callable[..., Any]) -> None:
    assert render("--set=global.anything=1")
