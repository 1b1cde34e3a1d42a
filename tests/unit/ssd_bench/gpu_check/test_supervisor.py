"""The processes of checks: a crash, a hang or a full time limit ends one check only."""

from pathlib import Path

import pytest

from ssd_bench.gpu_check import supervisor
from ssd_bench.gpu_check.__main__ import LIMIT_SECONDS
from ssd_bench.gpu_check.checks import CHECKS, Check
from ssd_bench.gpu_check.outcome import Environment, Outcome
from ssd_bench.gpu_check.supervisor import run_checks, run_in_child


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(device="cpu", scratch=tmp_path)


def test_a_check_in_its_own_process_returns_its_figures(environment: Environment) -> None:
    outcome = run_in_child("machine", environment, 120.0)
    assert outcome is not None
    assert outcome.status == "passed"
    bandwidth = outcome.figures["copy_gb_per_second"]
    assert isinstance(bandwidth, float)
    assert bandwidth > 0


def test_a_check_that_crashes_fails_with_its_last_line(environment: Environment) -> None:
    outcome = run_in_child("no such check", environment, 60.0)
    assert outcome == Outcome(status="failed", reason="ended with 1: KeyError: 'no such check'")


def test_a_check_that_does_not_end_is_killed(environment: Environment) -> None:
    assert run_in_child("machine", environment, 0.01) is None


FAILED = Outcome(status="failed", reason="broken")


def of_each(
    monkeypatch: pytest.MonkeyPatch,
    environment: Environment,
    limit_seconds: float,
    found: Outcome | None = FAILED,
) -> list[tuple[str, str, str]]:
    """Run one check of the product and one of a peer, which both have this outcome."""
    checks = {"own": Check("a:b", 10.0), "peer": Check("a:b", 10.0, is_peer=True)}
    monkeypatch.setattr(supervisor, "CHECKS", checks)
    monkeypatch.setattr(supervisor, "run_in_child", lambda *_arguments: found)
    monkeypatch.setattr(supervisor, "monotonic", lambda: 100.0)
    seen: list[tuple[str, str, str]] = []
    run_checks(
        list(checks),
        environment,
        limit_seconds,
        lambda name, outcome, _seconds: seen.append((name, outcome.status, outcome.reason)),
    )
    return seen


def test_a_peer_that_fails_is_skipped(
    monkeypatch: pytest.MonkeyPatch, environment: Environment
) -> None:
    assert of_each(monkeypatch, environment, 60.0) == [
        ("own", "failed", "broken"),
        ("peer", "skipped", "it failed: broken"),
    ]


def test_checks_without_time_are_skipped(
    monkeypatch: pytest.MonkeyPatch, environment: Environment
) -> None:
    reason = "its part of the 1 s of all checks is under a second"
    assert of_each(monkeypatch, environment, 1.0)[0] == ("own", "skipped", reason)


def test_a_check_that_reaches_its_budget_fails_and_leaves_the_budgets_of_others(
    monkeypatch: pytest.MonkeyPatch, environment: Environment
) -> None:
    own, peer = of_each(monkeypatch, environment, 60.0, found=None)
    assert own == ("own", "timed out", "no result within 30 s; --limit gives all checks more time")
    # The first check ended at once here: its time is that of the second one.
    assert peer[1:] == (
        "skipped",
        "it timed out: no result within 60 s; --limit gives all checks more time",
    )


def test_the_budgets_of_all_checks_are_within_the_limit() -> None:
    assert sum(check.budget_seconds for check in CHECKS.values()) == LIMIT_SECONDS


def test_bfloat16_of_the_default_attention_is_checked_before_other_attention() -> None:
    attention = [name for name in CHECKS if name.startswith("attention")]
    assert attention[0] == "attention flex"


def test_every_check_has_a_function_and_a_limit() -> None:
    assert len({check.function for check in CHECKS.values()}) == len(CHECKS)
    assert all(check.budget_seconds > 0 for check in CHECKS.values())
