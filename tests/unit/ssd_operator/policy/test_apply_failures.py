"""Applies that fail or are reverted, and other faults that the random tests have found."""

import copy
from dataclasses import replace
from typing import Any

from tests.unit.ssd_operator.checked_cluster import CheckedCluster
from tests.unit.ssd_operator.world import DEMO, KEY, World

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object
from ssd_operator.children.names import revision_of
from ssd_operator.observe.facts import PoolFact, Ref
from ssd_operator.observe.pod_state import name_of
from ssd_operator.policy.apply_failures import MOST_REPAIRS, RETRY_SECONDS


async def settled(**blocks: Any) -> World:
    spec: Object = {name: {**DEMO.get(name, {}), **block} for name, block in blocks.items()}
    world = World(DEMO | spec, CheckedCluster())
    await world.come_to_rest(8)
    world.cluster.writes.clear()
    return world


def report_links(world: World) -> None:
    """Each target reports a link to each draft."""
    drafts = [name_of(pod) for pod in world.ready_pods("draft")]
    links = tuple(
        LinkStatus(address=name, draft_pod=name, state="Active", transport="tcp") for name in drafts
    )
    world.engines.answers = {
        name_of(pod): PoolFact(target_pod=name_of(pod), at=world.cluster.now, links=links)
        for pod in world.ready_pods("target")
    }


async def test_a_restarted_operator_keeps_the_status_until_targets_have_answered() -> None:
    world = await settled()
    for _ in range(3):
        world.cluster.now += 61.0
        report_links(world)
        await world.round()
    assert world.cluster.condition(KEY, "SpeculationActive") == ("True", "Active")
    world.restart()
    world.cluster.writes.clear()
    world.cluster.now += 61.0
    await world.round()
    report_links(world)
    await world.round()
    assert world.cluster.writes == []


async def test_a_target_that_does_not_answer_a_restarted_operator_becomes_unreachable() -> None:
    world = await settled()
    world.cluster.now += 61.0
    report_links(world)
    await world.round()
    world.restart()
    for _ in range(17):
        await world.round()
    assert world.cluster.condition(KEY, "SpeculationActive") == ("Unknown", "TargetUnreachable")


async def test_edited_templates_are_repaired_one_cell_after_another() -> None:
    world = await settled(target={"replicas": 2})
    for cell in range(2):
        edited = copy.deepcopy(world.deployment(f"demo-target-{cell}"))
        edited["spec"]["template"]["spec"]["containers"][0]["image"] = "localhost/theirs:1"
        world.cluster.put(edited)
    world.controllers.settle()
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()
    assert len(world.cluster.writes) > 0
    fewest = 2
    for _ in range(4):
        while world.controllers.step():
            fewest = min(fewest, len(world.ready_pods("target")))
        world.cluster.now += 2.0
        world.catch_up()
        await world.run_pass()
    assert fewest == 1
    images = {
        world.deployment(f"demo-target-{cell}")["spec"]["template"]["spec"]["containers"][0][
            "image"
        ]
        for cell in range(2)
    }
    assert "localhost/theirs:1" not in images
    assert len({revision_of(pod) for pod in world.ready_pods("target")}) == 2


SERVICE = Ref("Service", "demo")


async def test_an_object_that_a_webhook_reverts_is_applied_and_reported_once() -> None:
    world = World()
    world.cluster.imposed = {SERVICE: {"spec": {"type": "NodePort"}}}
    await world.come_to_rest(6)
    assert world.cluster.writes.count(("apply", SERVICE)) == 1
    world.cluster.now += 1000.0
    await world.come_to_rest(2)
    assert world.cluster.writes.count(("apply", SERVICE)) == 1
    found = [event.message for event in world.cluster.events if event.reason == "ApplyReverted"]
    assert len(found) == 1
    assert found[0].startswith("Service demo: spec.type ")


async def test_a_reverted_object_is_applied_again_when_it_or_the_resource_changes() -> None:
    world = World()
    world.cluster.imposed = {SERVICE: {"spec": {"type": "NodePort"}}}
    await world.come_to_rest(6)
    edited = copy.deepcopy(world.cluster.objects["default", SERVICE])
    world.cluster.put(edited | {"status": {"loadBalancer": {}}})
    await world.come_to_rest(2)
    assert world.cluster.writes.count(("apply", SERVICE)) == 1  # its status only
    edited["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.put(edited)
    await world.come_to_rest(2)
    assert world.cluster.writes.count(("apply", SERVICE)) == 2
    world.cluster.imposed = {}
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    await world.come_to_rest(6)
    assert world.cluster.objects["default", SERVICE]["spec"]["type"] == "ClusterIP"


async def test_a_refused_object_is_applied_again_when_the_resource_changes() -> None:
    world = World()
    world.cluster.refused = {SERVICE: "the quota of services is used up"}
    await world.come_to_rest(6)
    assert world.cluster.writes.count(("apply", SERVICE)) == 1
    world.cluster.refused = {}
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    assert ("default", SERVICE) in world.cluster.objects


async def test_an_unwanted_child_without_labels_is_deleted() -> None:
    world = await settled(target={"replicas": 2})
    stripped = copy.deepcopy(world.deployment("demo-target-1"))
    stripped["metadata"]["labels"] = {}
    world.cluster.put(stripped)
    world.cluster.edit_spec(KEY, target={"replicas": 1})
    await world.come_to_rest(6)
    assert Ref("Deployment", "demo-target-1") not in dict(world.children())
    assert len(world.ready_pods("target")) == 1
    reads = world.cluster.reads
    await world.round()
    assert world.cluster.reads == reads


async def test_a_template_that_a_webhook_changes_delays_no_other_cell() -> None:
    world = World(DEMO | {"target": {**DEMO["target"], "replicas": 2}}, CheckedCluster())
    for cell in range(2):
        ref = Ref("Deployment", f"demo-target-{cell}")
        theirs = {"spec": {"template": {"spec": {"enableServiceLinks": True}}}}
        world.cluster.imposed[ref] = theirs
    await world.come_to_rest(8)
    assert world.controllers.preflights() == []
    before = {revision_of(pod) for pod in world.ready_pods("target")}
    world.cluster.edit_spec(KEY, target={"image": "localhost/new:1"})
    await world.come_to_rest(12)
    after = {revision_of(pod) for pod in world.ready_pods("target")}
    assert len(after) == 2
    assert not after & before
    assert world.controllers.preflights() == []


async def test_a_restarted_operator_keeps_scaling_active_without_links() -> None:
    autoscaling = {"mode": "Internal", "minReplicas": 0, "maxReplicas": 4}
    world = await settled(draft={"replicas": 0, "autoscaling": autoscaling})
    for _ in range(6):
        world.cluster.now += 10.0
        report_links(world)
        await world.round()
    assert world.cluster.condition(KEY, "ScalingActive") == ("True", "Internal")
    world.restart()
    world.cluster.writes.clear()
    world.cluster.now += 61.0
    await world.round()
    report_links(world)
    await world.round()
    assert world.cluster.writes == []


async def test_links_that_come_and_go_under_a_pause_are_reported_once() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, paused=True)
    for number in range(20):
        world.cluster.now += 20.0
        report_links(world)
        if number // 3 % 2:
            without_links = {
                name: replace(fact, links=()) for name, fact in world.engines.answers.items()
            }
            world.engines.answers = without_links
        await world.round()
    reasons = [event.reason for event in world.cluster.events]
    assert reasons.count("SpeculationOff") == reasons.count("SpeculationOn") == 1


def add_a_variable(world: World) -> bool:
    """Edit a template as another controller does; whether the edit was missing."""
    edited = copy.deepcopy(world.deployment("demo-target-0"))
    variables = edited["spec"]["template"]["spec"]["containers"][0]["env"]
    if variables[-1]["name"] == "THEIRS":
        return False
    variables.append({"name": "THEIRS", "value": str(world.cluster.now)})
    world.cluster.put(edited)
    world.controllers.settle()
    return True


async def test_an_object_that_is_contested_is_left_as_it_is_after_some_repairs() -> None:
    world = await settled()
    num_edits = 0
    for _ in range(100):
        num_edits += add_a_variable(world)
        await world.round()
    assert num_edits == MOST_REPAIRS + 1
    (event,) = (each for each in world.cluster.events if each.reason == "ApplyReverted")
    assert "env is changed again after each repair" in event.message
    world.cluster.writes.clear()
    await world.round()
    assert world.cluster.writes == []


async def test_a_contested_object_follows_its_resource_and_is_repaired_again_later() -> None:
    world = await settled()
    for _ in range(40):
        add_a_variable(world)
        await world.round()
    world.cluster.edit_spec(KEY, target={"image": "localhost/new:1"})
    await world.come_to_rest(12)
    container = world.deployment("demo-target-0")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "localhost/new:1"
    for _ in range(40):
        add_a_variable(world)
        await world.round()
    assert add_a_variable(world) is False
    world.cluster.now += RETRY_SECONDS
    await world.come_to_rest(8)
    assert add_a_variable(world) is True


async def test_frequent_scaling_is_no_repair() -> None:
    world = await settled()
    for number in (1, 2, 3, 4) * 4:
        world.cluster.edit_spec(KEY, draft={"replicas": number})
        await world.come_to_rest(8)
        assert len(world.ready_pods("draft")) == number
    assert "ApplyReverted" not in {event.reason for event in world.cluster.events}
