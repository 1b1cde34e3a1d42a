"""The cost of two hundred resources, at their creation and at rest."""

import os
import threading

import pytest
from tests.cluster.kube import eventually
from tests.cluster.operators import Operator, Reading
from tests.cluster.scale.conftest import NUM_RESOURCES, REQUESTS, Converged, settle

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

WINDOW_SECONDS = float(os.environ.get("SSD_SCALE_SECONDS", "60"))
MOST_MEBIBYTES = 200
MOST_CALLS = 2.0
"""Calls to the API server per resource and minute."""
PASSES = "ssd_operator_reconcile_total"
PASS_SECONDS = "ssd_operator_reconcile_seconds"


def mebibytes(reading: Reading) -> float:
    return reading.total("process_resident_memory_bytes") / 2**20


def cpu_seconds(reading: Reading) -> float:
    return reading.total("process_cpu_seconds_total")


def test_all_resources_converge(converged: Converged, figures: dict[str, object]) -> None:
    before, after = converged.before, converged.after
    calls = after.total(REQUESTS) - before.total(REQUESTS)
    passes = after.total(PASSES) - before.total(PASSES)
    longest = after.bound_of(PASS_SECONDS, 0.99, before)
    figures[f"{NUM_RESOURCES} resources reported, s after the last was created"] = round(
        converged.seconds, 1
    )
    figures["creation: calls a resource"] = round(calls / NUM_RESOURCES, 1)
    figures["creation: passes a resource"] = round(passes / NUM_RESOURCES, 1)
    figures["creation: CPU s"] = round(cpu_seconds(after) - cpu_seconds(before), 1)
    figures["creation: p99 of a pass, s at most"] = longest
    assert converged.seconds <= 120
    assert after.total(PASSES, result="crash") == 0


def test_at_rest_calls_are_rare(
    converged: Converged, operator: Operator, figures: dict[str, object]
) -> None:
    before = operator.read()
    threading.Event().wait(WINDOW_SECONDS)  # the measured interval
    after = operator.read()
    calls = after.total(REQUESTS) - before.total(REQUESTS)
    rate = calls * 60 / WINDOW_SECONDS / NUM_RESOURCES
    passes = after.total(PASSES) - before.total(PASSES)
    longest = after.bound_of(PASS_SECONDS, 0.99, before)
    used = cpu_seconds(after) - cpu_seconds(before)
    figures["at rest: calls a resource and minute"] = round(rate, 3)
    figures["at rest: passes a resource and minute"] = round(
        passes * 60 / WINDOW_SECONDS / NUM_RESOURCES, 2
    )
    figures["at rest: p99 of a pass, s at most"] = longest
    figures["at rest: CPU ms a pass, all included"] = round(1000 * used / passes, 2)
    figures["at rest: share of a core"] = f"{used / WINDOW_SECONDS:.1%}"
    figures["at rest: MiB"] = round(mebibytes(after))
    assert rate <= MOST_CALLS
    assert passes >= NUM_RESOURCES * WINDOW_SECONDS / 60
    assert longest <= 1.0
    assert mebibytes(after) <= MOST_MEBIBYTES


def test_a_restarted_operator_writes_nothing(
    converged: Converged, operator: Operator, figures: dict[str, object]
) -> None:
    operator.restart()

    def has_seen_all() -> bool:
        return operator.read().total(PASSES, result="ok") >= NUM_RESOURCES

    waited = eventually(has_seen_all, "each resource has had a pass", 60)
    settle(operator)
    after = operator.read()
    written = {
        call: count
        for call, count in after.by_labels(REQUESTS).items()
        if "GET" not in call.split()
    }
    figures["restarted: s until each had a pass"] = round(waited, 1)
    figures["restarted: calls"] = round(after.total(REQUESTS))
    figures["restarted: CPU s"] = round(cpu_seconds(after), 1)
    figures["restarted: MiB"] = round(mebibytes(after))
    assert written == {}
    assert mebibytes(after) <= MOST_MEBIBYTES
