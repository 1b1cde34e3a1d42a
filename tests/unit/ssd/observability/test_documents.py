"""The dashboard, the alerts and the documents name exactly the metrics that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from prometheus_client import Metric

from ssd.observability import metrics
from ssd_gateway import metrics as gateway_metrics
from ssd_operator.runtime import metrics as operator_metrics

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "charts" / "ssd"
README = ROOT / "services" / "README.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"job", "namespace", "pod", "le"}
"""Labels that Prometheus adds, and the one of buckets."""
HEAD = "| Metric | Labels | Of | Meaning |\n|---|---|---|---|\n"


def families(process: str) -> list[Metric]:
    match process:
        case "target" | "draft":
            registry = metrics.metrics_of("target" if process == "target" else "draft")
        case "vllm":
            return list(metrics.PROPOSER_CRASHES_TOTAL.describe())
        case "gateway":
            registry = gateway_metrics.REGISTRY
        case _:
            registry = operator_metrics.REGISTRY
    return [each for each in registry.collect() if each.name.startswith("ssd_")]


def labels_of(*modules: ModuleType) -> dict[str, tuple[str, ...]]:
    return {
        family.name: metric._labelnames
        for module in modules
        for metric in vars(module).values()
        if hasattr(metric, "_labelnames")
        for family in metric.describe()
    }


def series(family: Metric) -> set[str]:
    """Names under which Prometheus stores a metric."""
    return {family.name + suffix for suffix in SUFFIXES[family.type]}


def queries() -> Iterator[str]:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    rules = (CHART / "templates" / "prometheusrule.yaml").read_text()
    # The name of a condition's metric is in a variable of the template.
    yield re.sub(r"^\s*(summary|description):.*$", "", rules, flags=re.MULTILINE)


def test_dashboard_and_alerts_query_every_metric_and_no_other() -> None:
    used = set(re.findall(r"\bssd_\w+", " ".join(queries())))
    all_families = [
        family
        for process in ("target", "draft", "vllm", "gateway", "operator")
        for family in families(process)
    ]
    known = {name for family in all_families for name in series(family)}
    assert used - known == set(), "the dashboard or an alert queries metrics that do not exist"
    unseen = {family.name for family in all_families if not used & series(family)}
    assert unseen == set(), "no panel of charts/ssd/files/dashboard.json shows these metrics"


def test_queries_use_labels_that_the_metrics_have() -> None:
    labels = labels_of(metrics, gateway_metrics, operator_metrics)
    for query in queries():
        for name, selector in re.findall(r"\b(ssd_\w+)\{([^}]*)\}", query):
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            found = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
            assert found <= set(labels[family]) | OF_PROMETHEUS, (name, found)
        of_query = {each for name, of in labels.items() if name in query for each in of}
        for group in re.findall(r"\bby \(([\w, ]+)\)", query):
            assert set(group.split(", ")) <= of_query | OF_PROMETHEUS, group


def test_the_readme_lists_every_metric() -> None:
    text = README.read_text()
    assert HEAD in text
    found = HEAD + text.partition(HEAD)[2].partition("\n\n")[0] + "\n"
    assert found == table(), f"write this table to {README}:\n{table()}"


def table() -> str:
    """Rows of the metrics of target, draft and gateway: name, labels, processes, first sentence."""
    of: dict[str, list[str]] = {}
    helps: dict[str, str] = {}
    labels = labels_of(metrics, gateway_metrics)
    names: dict[str, str] = {}
    for process in ("target", "draft", "gateway"):
        for family in families(process):
            of.setdefault(family.name, []).append(process)
            helps[family.name] = re.split(r"(?<=\.) (?=[A-Z])", family.documentation)[0]
            names[family.name] = family.name + ("_total" if family.type == "counter" else "")
    return HEAD + "".join(
        f"| `{names[family]}` | {', '.join(f'`{each}`' for each in labels[family])} "
        f"| {', '.join(of[family])} | {helps[family]} |\n"
        for family in of
    )
