"""Metrics for alerts and dashboards."""

from prometheus_client import generate_latest
from tests.unit.ssd_operator.world import KEY, RESOURCE, World

from ssd_operator.runtime import metrics


def shown(condition: str) -> dict[str, float]:
    """Status and begin of a condition of the resource."""
    return {
        each.labels["status"]: each.value
        for family in metrics.CONDITION_SINCE_SECONDS.collect()
        for each in family.samples
        if each.labels["condition"] == condition and each.labels["resource_name"] == KEY[1]
    }


async def test_the_present_conditions_are_shown_also_by_a_restarted_operator() -> None:
    world = World()
    await world.next_pass()
    assert shown("Ready").keys() == {"False"}
    await world.come_to_rest()
    (begin,) = shown("Ready").values()
    assert shown("Ready") == {"True": begin}
    metrics.set_conditions(KEY, ())
    world.restart()
    world.cluster.writes.clear()
    await world.next_pass()
    assert world.cluster.writes == []
    assert shown("Ready") == {"True": begin}
    await world.delete_resource()
    assert shown("Ready") == {}


async def test_a_written_number_of_drafts_is_counted_with_its_direction() -> None:
    def written(direction: str) -> float:
        labels = {"direction": direction, "reason": "Bounds"}
        return metrics.REGISTRY.get_sample_value("ssd_operator_scale_total", labels) or 0.0

    autoscaling = {"mode": "Internal", "minReplicas": 2, "maxReplicas": 3}
    for replicas, direction in ((1, "up"), (5, "down")):
        before = written(direction)
        world = World(draft={"replicas": replicas, "autoscaling": autoscaling})
        await world.come_to_rest(20)
        assert 2 <= world[RESOURCE]["spec"]["draft"]["replicas"] <= 3
        assert written(direction) == before + 1


def test_the_operator_has_no_other_metric_of_engines_than_the_end_of_its_certificate() -> None:
    families = [
        line.split()[2]
        for line in generate_latest(metrics.REGISTRY).decode().splitlines()
        if line.startswith("# HELP")
    ]
    assert "ssd_operator_queue_depth" in families
    foreign = [name for name in families if name.startswith("ssd_") and "_operator_" not in name]
    assert foreign == ["ssd_tls_certificate_expiry_timestamp_seconds"]
