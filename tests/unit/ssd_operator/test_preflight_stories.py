"""A target that serves is only replaced by a revision that has passed its preflight."""

import copy
from typing import Any

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World

from ssd_operator.api.spec import KIND, Object
from ssd_operator.children.names import RESTART_ANNOTATION, revision_of
from ssd_operator.observe.cluster import ForbiddenError, RefusedError
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.pod_state import name_of

BAD, GOOD = "localhost/bad:1", "localhost/good:1"
NO_IMAGE = {"image": BAD, "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
PULLING: Object = {"phase": "Pending"}
NOT_PULLED: Object = {"phase": "Pending", "containerStatuses": [NO_IMAGE]}
REFUSED: Object = {
    "phase": "Failed",
    "containerStatuses": [
        {"state": {"terminated": {"exitCode": 78, "message": "SettingsError: queue: -1"}}}
    ],
}


async def settled(num_cells: int = 1, **outcomes: Object) -> World:
    """A demo that serves; outcomes of preflights by ``bad`` and ``good``."""
    spec = copy.deepcopy(DEMO)
    spec["target"]["replicas"] = num_cells
    world = World(spec)
    await world.come_to_rest(6)
    world.cluster.writes.clear()
    world.cluster.events.clear()
    world.controllers.outcomes = {f"localhost/{name}:1": each for name, each in outcomes.items()}
    return world


async def rounds(world: World, number: int) -> None:
    for _ in range(number):
        await world.round()


def change(world: World, image: str) -> None:
    world.cluster.edit_spec(KEY, target={"image": image})


def written(world: World, kind: str, verb: str = "apply") -> list[str]:
    return [ref.name for each, ref in world.cluster.writes if (each, ref.kind) == (verb, kind)]


def preflights(world: World) -> list[str]:
    return [name_of(pod) for pod in world.controllers.preflights()]


def events(world: World) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in world.cluster.events]


def condition(world: World, kind: str) -> Object:
    conditions = world.cluster.resource(KEY)["status"]["conditions"]
    (found,) = (each for each in conditions if each["type"] == kind)
    return dict(found)


async def test_an_image_that_cannot_be_pulled_costs_no_outage() -> None:
    world = await settled(bad=NOT_PULLED)
    (serving,) = world.ready_pods("target")
    change(world, BAD)
    await rounds(world, 8)
    assert world.ready_pods("target") == [serving]
    assert written(world, "Deployment") == []
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    assert world.cluster.condition(KEY, "Progressing") == ("False", "PreflightFailed")
    assert f"cannot pull {BAD}: no such" in condition(world, "Progressing")["message"]
    assert [reason for reason, _ in events(world)] == ["PreflightFailed"]
    assert len(preflights(world)) == 1
    world.cluster.writes.clear()
    await world.round()
    assert world.cluster.writes == []


async def test_settings_that_the_process_rejects_are_reported_with_its_message() -> None:
    world = await settled()
    image = world.deployment("demo-target-0")["spec"]["template"]["spec"]["containers"][0]["image"]
    world.controllers.outcomes[image] = REFUSED
    env = [{"name": "SSD_TARGET_MAX_QUEUE", "value": "-1"}]
    world.cluster.edit_spec(KEY, target={"podTemplate": {"env": env}})
    await rounds(world, 4)
    assert written(world, "Deployment") == []
    assert "SettingsError: queue: -1" in condition(world, "Progressing")["message"]


async def test_a_good_change_rolls_once_it_has_been_tried_and_leaves_no_pod() -> None:
    world = await settled(good=PULLING)
    before = revision_of(world.deployment("demo-target-0"))
    change(world, GOOD)
    await rounds(world, 3)
    assert world.cluster.condition(KEY, "Progressing") == ("True", "Preflight")
    assert revision_of(world.deployment("demo-target-0")) == before
    world.controllers.outcomes.clear()
    world.controllers.settle()
    await world.come_to_rest(6)
    assert revision_of(world.deployment("demo-target-0")) != before
    assert len(world.ready_pods("target")) == 1
    assert preflights(world) == []
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")
    assert "PreflightFailed" not in dict(events(world))


async def test_another_change_midway_is_another_preflight() -> None:
    world = await settled(bad=NOT_PULLED)
    change(world, BAD)
    await rounds(world, 2)
    first = preflights(world)
    change(world, GOOD)
    await world.come_to_rest(8)
    assert len(first) == 1
    assert written(world, "Pod", "delete")[0] == first[0]
    assert len(written(world, "Pod")) == 2
    (serving,) = world.ready_pods("target")
    assert revision_of(serving) == revision_of(world.deployment("demo-target-0"))
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")


async def test_a_change_that_is_taken_back_leaves_everything_as_it_was() -> None:
    world = await settled(bad=NOT_PULLED)
    (serving,) = world.ready_pods("target")
    change(world, BAD)
    await rounds(world, 6)
    change(world, "")
    await world.come_to_rest(4)
    assert world.ready_pods("target") == [serving]
    assert preflights(world) == []
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")


async def test_two_cells_wait_for_one_preflight() -> None:
    world = await settled(num_cells=2)
    change(world, GOOD)
    await world.come_to_rest(10)
    assert len(written(world, "Pod")) == 1
    assert len(world.ready_pods("target")) == 2
    wanted = {revision_of(world.deployment(f"demo-target-{cell}")) for cell in range(2)}
    assert {revision_of(pod) for pod in world.ready_pods("target")} == wanted
    assert preflights(world) == []


async def test_a_bad_change_of_two_cells_stops_before_the_first() -> None:
    world = await settled(num_cells=2, bad=NOT_PULLED)
    serving = world.ready_pods("target")
    change(world, BAD)
    await rounds(world, 8)
    assert world.ready_pods("target") == serving
    assert len(preflights(world)) == 1


async def test_drafts_stay_while_the_change_is_tried_and_when_it_fails() -> None:
    world = await settled(bad=NOT_PULLED)
    drafts = world.ready_pods("draft")
    world.cluster.edit_spec(KEY, target={"image": BAD}, speculation={"branches": 16})
    await rounds(world, 6)
    assert world.cluster.condition(KEY, "Progressing") == ("False", "PreflightFailed")
    assert world.ready_pods("draft") == drafts
    assert written(world, "Deployment") == []


async def test_drafts_are_scaled_while_their_change_waits() -> None:
    world = await settled(bad=NOT_PULLED)
    before = {name_of(pod) for pod in world.ready_pods("draft")}
    template = world.deployment("demo-draft-0")["spec"]["template"]
    world.cluster.edit_spec(KEY, target={"image": BAD}, speculation={"branches": 16})
    await rounds(world, 6)
    world.cluster.edit_spec(KEY, draft={"replicas": 3})
    await world.come_to_rest(6)
    assert before < {name_of(pod) for pod in world.ready_pods("draft")}
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    await world.come_to_rest(6)
    assert len(world.ready_pods("draft")) == 1
    assert world.deployment("demo-draft-0")["spec"]["template"] == template
    world.cluster.edit_spec(KEY, target={"image": GOOD})
    await world.come_to_rest(10)
    assert world.deployment("demo-draft-0")["spec"]["template"] != template
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")


async def test_a_cells_drafts_roll_after_its_old_target_and_not_before() -> None:
    world = await settled(num_cells=2)
    world.cluster.edit_spec(KEY, speculation={"branches": 16})
    await world.come_to_rest(12)
    order = written(world, "Deployment")
    assert len(order) == 4
    for cell in (0, 1):
        assert order.index(f"demo-target-{cell}") < order.index(f"demo-draft-{cell}")


async def test_a_cell_that_does_not_serve_is_replaced_at_once() -> None:
    world = await settled(bad=NOT_PULLED)
    before = revision_of(world.deployment("demo-target-0"))
    world.controllers.broken = {before}
    world.controllers.kill(world.ready_pods("target")[0])
    change(world, GOOD)
    world.catch_up()
    await world.run_pass()
    assert revision_of(world.deployment("demo-target-0")) != before
    assert written(world, "Pod") == []


async def test_a_target_that_is_down_for_a_moment_is_not_replaced_by_a_failed_change() -> None:
    world = await settled(bad=NOT_PULLED)
    (serving,) = world.ready_pods("target")
    before = revision_of(serving)
    change(world, BAD)
    await rounds(world, 6)
    world.controllers.kill(serving)
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()
    assert revision_of(world.deployment("demo-target-0")) == before
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    await rounds(world, 2)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_a_preflight_that_is_deleted_by_hand_tries_again() -> None:
    world = await settled(good=REFUSED)
    change(world, GOOD)
    await rounds(world, 3)
    assert world.cluster.condition(KEY, "Progressing") == ("False", "PreflightFailed")
    world.controllers.outcomes.clear()
    (pod,) = preflights(world)
    world.cluster.remove("default", Ref("Pod", pod))
    await world.come_to_rest(8)
    assert written(world, "Pod") == [pod, pod]
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")


@pytest.mark.parametrize("num_rounds", range(6))
async def test_an_operator_that_is_restarted_at_any_time_continues(num_rounds: int) -> None:
    world = await settled()
    change(world, GOOD)
    await rounds(world, num_rounds)
    world.restart()
    await world.come_to_rest(8)
    assert len(written(world, "Pod")) == 1
    assert preflights(world) == []
    (serving,) = world.ready_pods("target")
    assert revision_of(serving) == revision_of(world.deployment("demo-target-0"))


async def test_a_quota_that_forbids_the_preflight_is_quoted_and_delays_only_the_change() -> None:
    world = await settled()
    (serving,) = world.ready_pods("target")
    world.cluster.refusals["Pod"] = ForbiddenError("exceeded quota: pods=0")
    change(world, GOOD)
    await rounds(world, 10)
    assert world.ready_pods("target") == [serving]
    assert world.cluster.condition(KEY, "Progressing") == ("False", "PreflightFailed")
    assert "exceeded quota: pods=0" in condition(world, "Progressing")["message"]
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    assert len(written(world, "Pod")) == 1
    world.catch_up()
    again_after = await world.run_pass()
    assert again_after is not None
    assert again_after < 60.0
    world.cluster.refusals.clear()
    world.cluster.now += 60.0
    await rounds(world, 8)
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")
    assert written(world, "Deployment") == ["demo-target-0"]


async def test_an_invalid_pod_makes_the_spec_invalid() -> None:
    world = await settled()
    (serving,) = world.ready_pods("target")
    world.cluster.refusals["Pod"] = RefusedError("spec.containers[0].image: no")
    change(world, BAD)
    await rounds(world, 4)
    assert world.ready_pods("target") == [serving]
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "PodTemplateInvalid")
    assert world.cluster.condition(KEY, "Progressing") == ("False", "PreflightFailed")
    assert len(written(world, "Pod")) == 1


async def test_a_namespace_that_is_deleted_is_no_failed_preflight() -> None:
    world = await settled()
    world.cluster.terminating_namespaces = {"default"}
    change(world, GOOD)
    world.catch_up()
    assert await world.run_pass() == 30.0


async def test_a_foreign_pod_with_its_name_is_left_alone() -> None:
    world = await settled(good=PULLING)
    change(world, GOOD)
    await rounds(world, 2)
    (name,) = preflights(world)
    world.cluster.remove("default", Ref("Pod", name))
    metadata = {
        "namespace": "default",
        "name": name,
        "labels": {"ssd.dev/component": "theirs"},
        "ownerReferences": [{"kind": "Job", "name": "theirs", "uid": "x", "controller": True}],
    }
    theirs = world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    await rounds(world, 2)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "NameTaken")
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    assert world.cluster.objects["default", Ref("Pod", name)] == theirs


async def test_a_paused_resource_has_no_preflight() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, paused=True)
    change(world, GOOD)
    await rounds(world, 3)
    assert preflights(world) == []


async def test_a_restart_that_is_asked_for_replaces_every_pod_one_cell_at_a_time() -> None:
    world = await settled(num_cells=2)
    before = {name_of(pod) for part in ("target", "draft") for pod in world.ready_pods(part)}
    restart(world, "1")
    fewest = 2
    for _ in range(12):
        world.catch_up()
        world.cluster.now += 2.0
        await world.run_pass()
        while world.controllers.step():
            fewest = min(fewest, len(world.ready_pods("target")))
    after = {name_of(pod) for part in ("target", "draft") for pod in world.ready_pods(part)}
    assert len(after) == len(before) == 4
    assert not before & after
    assert fewest == 1
    world.cluster.writes.clear()
    restart(world, "1")
    await world.round()
    assert world.cluster.writes == []


def restart(world: World, when: str) -> None:
    found: dict[str, Any] = copy.deepcopy(world.cluster.objects["default", Ref(KIND, "demo")])
    found["metadata"]["annotations"] = {RESTART_ANNOTATION: when}
    world.cluster.put(found)


async def test_fields_that_admission_adds_to_a_preflight_stay() -> None:
    world = await settled(good=PULLING)
    world.cluster.admit = add_to_pods
    change(world, GOOD)
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()
    assert len(preflights(world)) == 1
    assert written(world, "Pod", "patch") == []
    assert "ApplyReverted" not in dict(events(world))


def add_to_pods(thing: Object) -> Object:
    """What LimitRanger and a webhook for credentials do."""
    thing = copy.deepcopy(thing)
    for container in thing["spec"]["containers"] if thing["kind"] == "Pod" else ():
        container["resources"]["limits"]["ephemeral-storage"] = "1Gi"
        container["env"].append({"name": "AWS_ROLE_ARN", "value": "arn:aws:iam::1:role/ssd"})
    return thing
