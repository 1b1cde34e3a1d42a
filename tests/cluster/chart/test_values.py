"""The values: a closed schema, and three places that name the same keys."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.timeout(120)

CHART = Path(__file__).resolve().parents[3] / "charts" / "ssd"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
MAPS = {
    "operator.nodeSelector",
    "operator.podAnnotations",
    "serviceAccount.annotations",
    "metrics.serviceMonitor.labels",
    "metrics.prometheusRule.labels",
    "metrics.dashboard.labels",
}
"""Their keys are the user's own; values are strings."""
KUBERNETES_OWN = {
    "operator.affinity.nodeAffinity",
    "operator.affinity.podAffinity",
    "operator.affinity.podAntiAffinity",
}
"""Whose inside the API server judges."""

Schema = dict[str, Any]


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


def misspelt(path: tuple[str, ...]) -> Any:
    """Values that hold an unknown key at a path."""
    if not path:
        return {"misspelt": 1}
    inner = misspelt(path[1:])
    if path[0] == "[]":
        return [inner]
    return {path[0]: inner}


CLOSED = [
    path
    for path, schema in objects(SCHEMA)
    if path[:1] != ("global",) and ".".join(path) not in MAPS | KUBERNETES_OWN
]


@pytest.mark.parametrize("path", CLOSED, ids=lambda path: ".".join(path) or "root")
def test_a_typo_is_refused_at_every_level(
    refusal: Callable[..., str], tmp_path: Path, path: tuple[str, ...]
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(misspelt(path)))
    assert "misspelt" in refusal("--values", values)


def test_only_what_is_the_users_own_is_open() -> None:
    is_open = {
        ".".join(path)
        for path, schema in objects(SCHEMA)
        if schema.get("additionalProperties") is not False
    }
    assert is_open == MAPS | KUBERNETES_OWN | {"global"}


def leaves(schema: Schema, values: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of values that stand on one line: what has no block below it in values.yaml."""
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


def test_the_readmes_table_is_fresh(readme: ModuleType) -> None:
    text = (CHART / "README.md").read_text()
    assert readme.with_table(text, (CHART / "values.yaml").read_text()) == text


def test_a_value_without_a_comment_is_no_row(readme: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:4: a\.c has no comment"):
        list(readme.rows("a:\n  # Of nothing.\n\n  c: 1"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["image.tag=latest"], "tag"),
        (["engineImages.draft.tag=latest"], "tag"),
        (["image.digest=sha256:12"], "digest"),
        (["image.pullPolicy=Sometimes"], "pullPolicy"),
        (["operator.logLevel=loud"], "logLevel"),
        (["operator.watchNamespaces={a,a}"], "watchNamespaces"),
        (["operator.watchNamespaces={A}"], "watchNamespaces"),
        (["operator.resources.limits.memory=much"], "memory"),
        (["networkPolicy.apiServerPorts={70000}"], "apiServerPorts"),
        (["serviceAccount.create=false"], "needs serviceAccount.name"),
        (["uninstall.deleteResources=true", "rbac.create=false"], "needs rbac.create"),
        (["tests.sample.enabled=true", "rbac.create=false"], "needs rbac.create"),
        (["tests.sample.enabled=true", "operator.watchNamespaces={there}"], '"here"'),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_reason(
    refusal: Callable[..., str], values: list[str], words: str
) -> None:
    assert words in refusal(*(f"--set={value}" for value in values))


def test_global_is_open(render: Callable[..., Any]) -> None:
    assert render("--set=global.anything=1")
