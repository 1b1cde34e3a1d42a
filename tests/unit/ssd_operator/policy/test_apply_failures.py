"""Applies that are refused, forbidden or reverted are reported, stop no other, and are repeated."""

import itertools
from collections.abc import Callable

import pytest
from tests.unit.ssd_operator.world import DRAFTS, RESOURCE, SERVICE, TARGET, TARGETS, World, settled

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import BusyError, ForbiddenError, Ref, RefusedError
from ssd_operator.observe.pod_state import name_of, revision_of, to_seconds
from ssd_operator.policy.apply_failures import MOST_REPAIRS, PACE_SECONDS, RETRY_SECONDS
from ssd_operator.policy.back_off import LAST_RETRY_SECONDS
from ssd_operator.runtime.reconcile import FAILING_SECONDS
from ssd_operator.runtime.work_queue import PartialError


def edit_the_resource(world: World) -> None:
    world.edit_spec(draft={"replicas": 3})


def wait(world: World) -> None:
    world.cluster.now += RETRY_SECONDS


@pytest.mark.parametrize("change", [edit_the_resource, wait])
async def test_a_refused_object_is_reported_and_sent_again_after_a_change_or_ten_minutes(
    change: Callable[[World], None],
) -> None:
    world = World()
    world.cluster.write_faults = {DRAFTS: RefusedError("spec.template: no")}
    await world.come_to_rest()
    assert world.written("Deployment").count("demo-draft-0") == 1
    assert world.condition("SpecValid") == ("False", "PodTemplateInvalid")
    assert len(world.ready_pods("target")) == 1
    world.cluster.write_faults = {}
    await world.round()
    assert DRAFTS not in world
    change(world)
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("True", "Valid")
    assert len(world.ready_pods("draft")) >= 2


async def test_a_refused_object_is_sent_again_when_the_live_object_is_gone() -> None:
    world = await settled()
    with world.edited(TARGETS) as found:
        found["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.write_faults = {TARGETS: RefusedError("spec.clusterIP: field is immutable")}
    await world.come_to_rest()
    assert world.condition("SpecValid") == ("False", "ObjectRefused")
    world.cluster.write_faults = {}
    world.remove(TARGETS)
    await world.come_to_rest()
    assert TARGETS in world
    assert world.condition("SpecValid") == ("True", "Valid")


async def test_a_forbidden_object_is_reported_stops_no_other_and_is_sent_again() -> None:
    world = World()
    world.cluster.write_faults = {DRAFTS: ForbiddenError("exceeded quota: deployments=1")}
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.next_pass()
    await world.rounds(3)
    assert world.condition("ResourcesOwned") == ("False", "Forbidden")
    assert world.condition("Ready") == ("True", "Serving")
    world.cluster.write_faults = {}
    world.cluster.now += LAST_RETRY_SECONDS
    await world.come_to_rest()
    assert world.condition("ResourcesOwned") == ("True", "Owned")
    assert len(world.ready_pods("draft")) == 2


async def test_a_forbidden_call_waits_longer_and_longer_while_other_objects_are_repaired() -> None:
    world = await settled()
    with world.edited(DRAFTS) as deployment:
        deployment["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.write_faults = {DRAFTS: ForbiddenError("denied by a policy")}
    times = []
    for _ in range(200):
        world.remove(SERVICE)
        world.cluster.writes.clear()
        with pytest.raises(PartialError, match="denied") as found:
            await world.next_pass()
        times += [world.cluster.now] if world.written("Deployment") else []
        assert SERVICE in world
        assert world.condition("ResourcesOwned") == ("False", "Forbidden")
        assert 0.0 < found.value.retry_after_seconds <= LAST_RETRY_SECONDS
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[0] <= 2.0
    assert LAST_RETRY_SECONDS / 2 <= pauses[-1] <= LAST_RETRY_SECONDS + 2.0


async def test_a_pass_that_a_busy_server_ends_reports_forbidden_calls_too() -> None:
    world = await settled()
    with world.edited(DRAFTS) as deployment:
        deployment["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.write_faults = {DRAFTS: ForbiddenError("denied by a policy")}
    with pytest.raises(PartialError):
        await world.next_pass()
    world.remove(SERVICE)
    world.cluster.write_faults |= {SERVICE: BusyError("429")}
    with pytest.raises(BusyError):
        await world.next_pass()
    assert world.condition("ResourcesOwned") == ("False", "Forbidden")


async def test_a_change_of_the_resource_sends_a_forbidden_object_again_at_once() -> None:
    world = World()
    world.cluster.write_faults = {DRAFTS: ForbiddenError("exceeded quota: deployments=1")}
    await world.rounds(20)
    world.cluster.write_faults = {}
    await world.round()
    assert DRAFTS not in world
    edit_the_resource(world)
    await world.round()
    assert DRAFTS in world


async def test_a_forbidden_number_of_drafts_stops_no_repair_and_is_reported() -> None:
    world = await settled(draft={"autoscaling": {"mode": "Internal"}})
    world.cluster.write_faults = {RESOURCE: ForbiddenError("denied by a policy on /scale")}
    world.cluster.now += 30.0
    world.report(eligible_sequences=99)
    world.remove(TARGETS)
    with pytest.raises(ForbiddenError, match="/scale"):
        await world.next_pass()
    assert ("scale", RESOURCE) in world.cluster.writes
    assert TARGETS in world
    assert world.condition("ResourcesOwned") == ("False", "Forbidden")
    assert "lastScaleTime" not in world.status["draft"]


async def test_a_draft_that_may_not_be_marked_does_not_drain_and_delays_no_status() -> None:
    world = await settled()
    pods = [Ref("Pod", name_of(pod)) for pod in world.ready_pods("draft")]
    world.cluster.write_faults = dict.fromkeys(pods, ForbiddenError("denied by a policy"))
    world.edit_spec(draft={"replicas": 1})
    world.controllers.make_unready(world.ready_pods("target")[0])
    await world.rounds(3)
    assert world.drains == {}
    assert world.condition("ResourcesOwned") == ("False", "Forbidden")
    assert world.condition("Ready")[0] == "False"
    assert world.status["observedGeneration"] == 2


async def test_a_webhook_that_does_not_answer_is_reported_after_a_while() -> None:
    world = World()
    world.cluster.write_faults = {"Service": BusyError("500 failed calling webhook")}
    with pytest.raises(BusyError, match="webhook"):
        await world.next_pass()
    assert world.condition("Ready")[0] == "False"
    assert world.condition("ResourcesOwned")[0] == "True"  # it may pass
    world.cluster.now += FAILING_SECONDS
    with pytest.raises(BusyError, match="webhook"):
        await world.next_pass()
    assert world.condition("ResourcesOwned") == ("False", "Forbidden")
    world.cluster.write_faults = {}
    await world.come_to_rest()
    assert world.condition("ResourcesOwned") == ("True", "Owned")


def become_a_node_port(thing: Object) -> None:
    if thing["kind"] == "Service" and thing["metadata"]["name"] == "demo":
        thing["spec"]["type"] = "NodePort"


async def test_a_field_that_a_webhook_changes_is_applied_and_reported_every_ten_minutes() -> None:
    world = World()
    world.cluster.admit = become_a_node_port
    await world.come_to_rest()
    world.cluster.now += RETRY_SECONDS / 2
    with world.edited(SERVICE) as found:
        found["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    await world.come_to_rest(2)
    assert world[SERVICE]["metadata"]["labels"]["app.kubernetes.io/name"] == "ssd"
    assert world.written("Service").count("demo") == 2
    (message,) = world.messages("ApplyReverted")
    assert message.startswith("Service demo: spec.type ")
    world.cluster.now += RETRY_SECONDS / 2
    await world.come_to_rest(2)
    assert world.written("Service").count("demo") == 3
    world.cluster.admit = lambda thing: None
    world.edit_spec(draft={"replicas": 1})
    await world.come_to_rest()
    assert world[SERVICE]["spec"]["type"] == "ClusterIP"


def link_services(thing: Object) -> None:
    if thing["kind"] == "Deployment":
        thing["spec"]["template"]["spec"]["enableServiceLinks"] = True


async def test_a_template_that_a_webhook_changes_delays_no_other_cell() -> None:
    world = World(target={"replicas": 2})
    world.cluster.admit = link_services
    await world.come_to_rest()
    assert world.controllers.preflights() == []
    before = {revision_of(pod) for pod in world.ready_pods("target")}
    world.edit_spec(target={"image": "localhost/new:1"})
    await world.come_to_rest(12)
    after = {revision_of(pod) for pod in world.ready_pods("target")}
    assert len(after) == 2
    assert not after & before
    assert world.controllers.preflights() == []


def add_a_variable(world: World) -> bool:
    """Edit a template as another controller does; whether the edit was missing."""
    with world.edited(TARGET) as found:
        variables = found["spec"]["template"]["spec"]["containers"][0]["env"]
        is_missing = bool(variables[-1]["name"] != "THEIRS")
        if is_missing:
            variables.append({"name": "THEIRS", "value": str(world.cluster.now)})
    world.controllers.settle()
    return is_missing


async def contest(world: World, num_rounds: int = 40) -> int:
    """Repairs while another controller adds a variable again and again."""
    num_edits = 0
    for _ in range(num_rounds):
        num_edits += add_a_variable(world)
        await world.round()
    return num_edits - 1


async def test_a_contested_object_is_left_as_it_is_for_some_time_after_some_repairs() -> None:
    world = await settled()
    assert await contest(world, 100) == MOST_REPAIRS
    (message,) = world.messages("ApplyReverted")
    assert "env is changed again after each repair" in message
    world.cluster.writes.clear()
    await world.round()
    assert world.cluster.writes == []
    world.edit_spec(target={"image": "localhost/new:1"})
    await world.come_to_rest(12)
    container = world[TARGET]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "localhost/new:1"
    await contest(world)
    assert add_a_variable(world) is False
    wait(world)
    await world.come_to_rest()
    assert add_a_variable(world) is True


@pytest.mark.parametrize("template", ["current", "held"])
async def test_frequent_scaling_is_no_repair(template: str) -> None:
    world = await settled()
    if template == "held":
        world.controllers.outcomes = {"localhost/new:1": {"phase": "Pending"}}
        world.edit_spec(target={"image": "localhost/new:1"}, speculation={"branches": 16})
    for number in (1, 2, 3, 4) * 4:
        world.edit_spec(draft={"replicas": number})
        await world.come_to_rest()
    assert "ApplyReverted" not in world.reasons
    assert len(world.ready_pods("draft")) == 4


AT_REST = {"mode": "Internal", "minReplicas": 0, "maxReplicas": 4}


@pytest.mark.parametrize(
    ("draft", "condition"),
    [({}, "SpeculationActive"), ({"replicas": 0, "autoscaling": AT_REST}, "ScalingActive")],
)
async def test_a_restarted_operator_keeps_the_status_until_targets_have_answered(
    draft: Object, condition: str
) -> None:
    world = await settled(draft=draft)
    for _ in range(6):
        world.cluster.now += 61.0
        world.report_links()
        await world.round()
    assert world.condition(condition)[0] == "True"
    world.restart()
    world.cluster.writes.clear()
    world.cluster.now += 61.0
    await world.round()
    world.report_links()
    await world.round()
    assert world.cluster.writes == []


def add_a_label(world: World) -> None:
    world.edit_spec(SERVICE, selector={"by": "hand"})


def is_repaired(world: World) -> bool:
    return "by" not in world[SERVICE]["spec"]["selector"]


async def test_a_service_is_repaired_at_once_and_after_some_repairs_within_ten_seconds() -> None:
    world = await settled()
    for _ in range(MOST_REPAIRS):
        add_a_label(world)
        await world.round()
        assert is_repaired(world)
    await world.round()
    assert world.condition("ResourcesOwned") == ("True", "Owned"), "the object is as wanted"
    add_a_label(world)
    world.catch_up()
    again_after = await world.run_pass()
    assert not is_repaired(world)
    assert world.condition("ResourcesOwned") == ("False", "ApplyReverted")
    assert 0 < again_after <= PACE_SECONDS
    world.cluster.now += again_after
    await world.run_pass()
    assert is_repaired(world)
    await world.round()
    assert world.condition("ResourcesOwned") == ("True", "Owned")
    assert world.messages("ApplyReverted") == [
        "Service demo: spec.selector.by is changed again after each repair; "
        "look for another writer. It is repaired again after 10 s."
    ]


async def test_a_writer_that_never_rests_has_a_service_repaired_every_ten_seconds_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await settled()
    for _ in range(100):
        add_a_label(world)
        world.cluster.now += 1.0
        world.catch_up()
        await world.run_pass()
    assert len(world.written("Service")) <= MOST_REPAIRS + 100 / PACE_SECONDS
    assert caplog.text.count("apply_reverted") == 1


async def test_a_pause_is_in_the_status_with_its_end_and_other_fields_are_still_repaired() -> None:
    world = await settled()
    await contest(world, 20)
    assert world.condition("ResourcesOwned") == ("False", "ApplyReverted")
    message = world.message("ResourcesOwned")
    text, _, end = message.rstrip(".").rpartition(" again at ")
    assert text.endswith("changed again after each repair; look for another writer. It is repaired")
    seconds = to_seconds(end)
    assert seconds is not None
    assert 0 < seconds - world.cluster.now <= RETRY_SECONDS
    assert world.messages("ApplyReverted") == [message]
    world.edit_spec(TARGET, replicas=0)
    await world.round()
    assert world[TARGET]["spec"]["replicas"] == 1
    assert add_a_variable(world) is False, "the repair of another field leaves the template alone"
    wait(world)
    await world.come_to_rest()
    assert world.condition("ResourcesOwned") == ("True", "Owned")


async def test_a_second_contested_field_does_not_end_the_pause_of_the_first() -> None:
    world = await settled()
    await contest(world, 20)
    for _ in range(3):
        world.edit_spec(TARGET, replicas=2)
        await world.round()
    assert world[TARGET]["spec"]["replicas"] == 2, "both fields are paused"
    assert add_a_variable(world) is False
    first, second = world.messages("ApplyReverted")
    assert second.startswith(first)
    assert "spec.replicas is changed again" in second
    end = to_seconds(first.rstrip(".").rpartition(" again at ")[2])
    assert end is not None
    world.cluster.now = end
    await world.come_to_rest(12)
    assert add_a_variable(world) is True
    assert world[TARGET]["spec"]["replicas"] == 1


async def test_cells_whose_number_of_pods_is_contested_are_replaced_one_after_the_other() -> None:
    world = await settled(target={"replicas": 2})
    cells = [TARGET, Ref("Deployment", "demo-target-1")]
    for _ in range(MOST_REPAIRS + 1):
        for cell in cells:
            world.edit_spec(cell, replicas=0)
        await world.round()
    for cell in cells:
        world.edit_spec(cell, replicas=1)
    await world.come_to_rest()
    for cell in cells:
        with world.edited(cell) as found:
            found["spec"]["template"]["spec"]["containers"][0]["image"] = "localhost/theirs:1"
    world.controllers.settle()
    world.cluster.writes.clear()
    for _ in range(12):
        before = len(world.written("Deployment"))
        await world.round()
        assert len(world.written("Deployment")) - before <= 1
    assert sorted(world.written("Deployment")) == ["demo-target-0", "demo-target-1"]


async def test_a_pause_of_an_object_that_waits_for_its_rollout_is_kept() -> None:
    world = await settled()
    world.controllers.outcomes = {"localhost/new:1": {"phase": "Pending"}}
    world.edit_spec(target={"image": "localhost/new:1"}, speculation={"branches": 16})
    await world.come_to_rest()
    world.cluster.admit = set_the_deadline
    world.cluster.writes.clear()
    with world.edited(DRAFTS) as found:
        set_the_deadline(found)
    await world.rounds(5)
    assert world.written("Deployment") == ["demo-draft-0"]


def set_the_deadline(thing: Object) -> None:
    if thing["kind"] == "Deployment" and thing["metadata"]["name"] == "demo-draft-0":
        thing["spec"]["progressDeadlineSeconds"] = 99
