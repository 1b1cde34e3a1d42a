"""Metrics for alerts: counts of conditions, and the begin of the longest problem."""

import pytest
from prometheus_client import generate_latest
from tests.unit.ssd_operator.world import DEMO, KEY, World

from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import to_text
from ssd_operator.runtime import metrics
from ssd_operator.runtime.fleet_metrics import FLEET, FleetMetrics, unexpected_conditions
from ssd_operator.runtime.work_queue import Schedule


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch) -> FleetMetrics:
    """The metrics of this process, without resources of other tests."""
    monkeypatch.setattr(FLEET, "_statuses", {})
    return FLEET


def status(drafts: int = 2, since: float = 100.0, **conditions: str) -> Object:
    """A status; each condition is given as ``status`` or ``status/reason``."""
    return {
        "conditions": [
            {
                "type": kind,
                "status": given.partition("/")[0],
                "reason": given.partition("/")[2] or "Because",
                "lastTransitionTime": to_text(since),
            }
            for kind, given in conditions.items()
        ],
        "draft": {"desiredReplicas": drafts},
    }


def shown(name: str, **labels: str) -> float | None:
    return metrics.REGISTRY.get_sample_value(name, labels)


def resources(condition: str, truth: str) -> float | None:
    return shown("ssd_operator_resources", condition=condition, status=truth)


def since(condition: str, truth: str = "False") -> float | None:
    name = "ssd_operator_trouble_since_timestamp_seconds"
    return shown(name, condition=condition, status=truth)


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        (status(Ready="True", SpeculationActive="True"), set()),
        (status(Ready="True", SpeculationActive="Unknown"), {"SpeculationActive"}),
        (status(Ready="False", SpeculationActive="False", ScalingActive="False"), {"Ready"}),
        (status(drafts=0, Ready="True", SpeculationActive="False"), set()),
        (status(drafts=0, TargetReady="False"), {"TargetReady"}),
        (
            status(Ready="True", Progressing="True/Scaling", ScalingActive="False"),
            {"ScalingActive"},
        ),
        (
            status(
                Ready="True",
                Progressing="False/Paused",
                TargetReady="False",
                SpeculationActive="False",
                ScalingActive="False",
            ),
            {"Progressing", "TargetReady"},
        ),
        (status(Ready="False/Loading", TargetReady="False/Loading"), set()),
        (
            status(TargetReady="False/FetchingModel", Progressing="False/ProgressDeadlineExceeded"),
            {"TargetReady", "Progressing"},
        ),
    ],
)
def test_an_expected_condition_is_no_problem(found: Object, kinds: set[str]) -> None:
    assert {kind for (kind, _), _ in unexpected_conditions(found)} == kinds


def test_the_longest_problem_of_one_resource_counts(fleet: FleetMetrics) -> None:
    fleet.put("a", status(TargetReady="False", since=100))
    fleet.put("b", status(TargetReady="False", since=50))
    assert (resources("TargetReady", "False"), since("TargetReady")) == (2, 50)
    fleet.put("b", status(TargetReady="True", since=300))
    assert (resources("TargetReady", "False"), since("TargetReady")) == (1, 100)
    fleet.drop("a")
    assert (resources("TargetReady", "False"), since("TargetReady")) == (None, None)
    assert resources("TargetReady", "True") == 1


def test_short_problems_of_several_resources_are_not_added(fleet: FleetMetrics) -> None:
    for number in range(10):
        fleet.put("a", status(TargetReady=str(bool(number % 2)), since=number * 100))
        fleet.put("b", status(TargetReady=str(not number % 2), since=number * 100))
        assert since("TargetReady") == number * 100


def test_missing_speculation_counts_from_the_time_a_target_serves() -> None:
    loaded = status(Ready="True", since=900)
    loaded["conditions"] += status(SpeculationActive="False", since=100)["conditions"]
    assert dict(unexpected_conditions(loaded)) == {("SpeculationActive", "False"): 900}


async def test_a_restarted_operator_counts_resources_without_a_write(fleet: FleetMetrics) -> None:
    world = World()
    await world.come_to_rest(6)
    fleet.drop(KEY)
    world.restart()
    world.cluster.writes.clear()
    world.catch_up()
    await world.run_pass()
    assert world.cluster.writes == []
    assert resources("Ready", "True") == 1


async def test_a_written_number_of_drafts_is_counted_with_its_direction() -> None:
    def written(direction: str) -> float:
        labels = {"direction": direction, "reason": "Bounds"}
        return metrics.REGISTRY.get_sample_value("ssd_operator_scale_total", labels) or 0.0

    autoscaling = {"mode": "Internal", "minReplicas": 2, "maxReplicas": 3}
    for replicas, direction in ((1, "up"), (5, "down")):
        before = written(direction)
        world = World(
            DEMO | {"draft": DEMO["draft"] | {"replicas": replicas, "autoscaling": autoscaling}}
        )
        await world.come_to_rest(20)
        assert 2 <= world.cluster.resource(KEY)["spec"]["draft"]["replicas"] <= 3
        assert written(direction) == before + 1


def test_a_resource_that_always_fails_is_seen_although_it_is_never_late() -> None:
    schedule, bad, good = Schedule(), ("here", "bad"), ("here", "good")
    for now in range(0, 1000, 70):
        for key in (bad, good):
            schedule.wake(key, now)
        while (taken := schedule.take(now + 65.0)) is not None:
            if taken == bad:
                schedule.fail(taken, now + 65.0)
            else:
                schedule.finish(taken, now + 65.0, 30.0)
    assert schedule.oldest_success_seconds(1000.0) == 1000.0
    schedule.finish(bad, 1000.0, None)
    assert schedule.oldest_success_seconds(1000.0) < 100.0


def test_the_operator_has_no_metrics_of_engines() -> None:
    families = [
        line.split()[2]
        for line in generate_latest(metrics.REGISTRY).decode().splitlines()
        if line.startswith("# HELP")
    ]
    assert "ssd_operator_queue_depth" in families
    foreign = [name for name in families if name.startswith("ssd_") and "_operator_" not in name]
    assert foreign == []
