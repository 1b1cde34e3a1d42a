"""The queries of alerts and dashboard, and which conditions of a resource raise an alert.

promtool evaluates the alerts. A library parses all queries, also where there is no promtool.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from tests.cluster.kube import CHART

pytestmark = pytest.mark.timeout(120)


def series(kind: str, status: str, reason: str = "Because") -> str:
    """The condition of a resource, as the operator shows it and Prometheus stores it."""
    return (
        'ssd_operator_condition_since_timestamp_seconds{job="ssd-operator",namespace="here",'
        'resource_namespace="here",resource_name="demo",'
        f'condition="{kind}",status="{status}",reason="{reason}"}}'
    )


SERVING = {"Ready": "True", "DraftReady": "True", "Progressing": "True"}
OFF = {"SpeculationActive": "False"}
CASES: tuple[tuple[str, int, dict[str, str], bool], ...] = (
    ("SSDTargetNotReady", 16, {"TargetReady": "False/CrashLoop"}, True),
    ("SSDTargetNotReady", 14, {"TargetReady": "False/CrashLoop"}, False),
    ("SSDTargetNotReady", 99, {"TargetReady": "True"}, False),
    ("SSDTargetNotReady", 99, {"TargetReady": "False/FetchingModel"}, False),
    ("SSDTargetNotReady", 99, {"TargetReady": "False/RollingOut"}, False),
    ("SSDTargetNotReady", 16, {"TargetReady": "False/RollingOut", "Progressing": "False"}, True),
    ("SSDTargetNotReady", 99, {"TargetReady": "Unknown/SpecInvalid"}, False),
    ("SSDTargetNotReady", 16, {"TargetReady": "False/Loading", "Progressing": "False"}, True),
    ("SSDSpeculationInactive", 16, SERVING | {"SpeculationActive": "Unknown"}, True),
    ("SSDSpeculationInactive", 14, SERVING | OFF, False),
    ("SSDSpeculationInactive", 99, OFF | {"Ready": "False"}, False),
    ("SSDSpeculationInactive", 99, SERVING | OFF | {"DraftReady": "True/ScaledToZero"}, False),
    ("SSDScalingInactive", 6, SERVING | {"ScalingActive": "False"}, True),
    (
        "SSDScalingInactive",
        99,
        SERVING | {"ScalingActive": "False", "Progressing": "False/Paused"},
        False,
    ),
    (
        "SSDTargetNotReady",
        99,
        {"Ready": "False/Paused", "TargetReady": "False/Loading", "Progressing": "False/Paused"},
        False,
    ),
    ("SSDEndpointMissing", 6, {"Ready": "False/EndpointMissing", "TargetReady": "True"}, True),
    ("SSDEndpointMissing", 99, {"Ready": "False/Loading", "TargetReady": "False"}, False),
    ("SSDGatewayNotReady", 16, SERVING | {"GatewayReady": "False/CrashLoop"}, True),
    ("SSDGatewayNotReady", 14, SERVING | {"GatewayReady": "False/CrashLoop"}, False),
    ("SSDGatewayNotReady", 99, {"Ready": "False/Loading", "GatewayReady": "False"}, False),
)
"""Alert, minutes, conditions of a resource as long as that, and whether the alert fires."""
FROM_ZERO = {
    series("Ready", "True"): "0x99",
    series("DraftReady", "True", "ScaledToZero"): "0x59 stale",
    series("DraftReady", "False", "Loading"): "_x59 3600x99",
    series("SpeculationActive", "False", "NoDrafts"): "0x99",
}
"""Drafts are wanted again after an hour, and their links do not become active."""
CRASHES = series("TargetReady", "False", "CrashLoop")
REFUSALS = 'ssd_link_refusals_total{namespace="here",pod="demo"}'
HISTORIES: tuple[tuple[str, dict[str, str], dict[int, bool]], ...] = (
    ("SSDSpeculationInactive", FROM_ZERO, {59: False, 60: False, 69: False, 71: True}),
    (
        "SSDTargetCrashes",
        # Ready for one minute in seven.
        {CRASHES: " ".join(f"{420 * n}x5 stale" for n in range(20))},
        {20: False, 40: True, 130: True},
    ),
    ("SSDTargetCrashes", {CRASHES: "0x130"}, {40: False, 130: False}),
    (
        "SSDEndpointMissing",
        {
            series("Ready", "False", "Loading"): "0x20 stale",
            series("Ready", "False", "EndpointMissing"): "_x21 0x1 stale",
        },
        {22: False, 23: False},
    ),
    # The rollout ends after three minutes.
    ("SSDLinksRefused", {REFUSALS: "0 6 12 18x99"}, dict.fromkeys(range(40), False)),
)
"""Alert, series with their values by minute, and whether the alert fires at some minutes."""


def rules_of(render: Any, *, scrapes_operator: bool = True) -> Any:
    """Rendered spec of the PrometheusRule."""
    monitor = f"--set=metrics.serviceMonitor.enabled={str(scrapes_operator).lower()}"
    objects = render("--set=metrics.prometheusRule.enabled=true", monitor)
    (rule,) = [each["spec"] for each in objects if each["kind"] == "PrometheusRule"]
    return rule


def test_every_alert_has_a_valid_query(render: Any) -> None:
    rules = rules_of(render)["groups"][0]["rules"]
    for each in rules:
        promql_parser.parse(each["expr"])


def test_alerts_of_the_operator_need_its_service_monitor(render: Any) -> None:
    names = {
        scrapes: {
            each["alert"]
            for each in rules_of(render, scrapes_operator=scrapes)["groups"][0]["rules"]
        }
        for scrapes in (True, False)
    }
    assert names[False] < names[True]
    assert "SSDOperatorDown" in names[True] - names[False]
    for each in rules_of(render, scrapes_operator=False)["groups"][0]["rules"]:
        assert "job=" not in each["expr"], each


def test_every_panel_of_the_dashboard_has_valid_queries() -> None:
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert queries
    for query in queries:
        promql_parser.parse(query)


def test_alerts_name_the_resource_and_ignore_what_is_expected(
    render: Any, promtool: str, tmp_path: Path
) -> None:
    rule = rules_of(render)
    for each in rule["groups"][0]["rules"]:
        each.pop("annotations")
        each["labels"] = {}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule))
    cases = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            case(
                alert,
                {series(kind, *state.split("/")): f"0x{minutes}" for kind, state in held.items()},
                {minutes: is_firing},
            )
            for alert, minutes, held, is_firing in CASES
        ]
        + [case(*each) for each in HISTORIES],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(cases))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "tests.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def case(alert: str, values: dict[str, str], expected: dict[int, bool]) -> dict[str, Any]:
    """A case of promtool, which begins at 0: constant conditions are as old as the test."""
    fired = {"exp_labels": {"resource_namespace": "here", "resource_name": "demo"}}
    return {
        "name": f"{alert} with {values}",
        "interval": "1m",
        "input_series": [{"series": name, "values": each} for name, each in values.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert,
                "exp_alerts": [fired] if is_firing else [],
            }
            for minute, is_firing in expected.items()
        ],
    }
