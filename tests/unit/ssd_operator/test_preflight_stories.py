"""A target that serves is only replaced by a revision that has passed its preflight."""

from typing import Any

import pytest
from tests.unit.ssd_operator.world import DRAFTS, SERVICE, TARGET, TARGETS, World
from tests.unit.ssd_operator.world import settled as serving

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Ref, RefusedError
from ssd_operator.observe.pod_state import UNREADY_SECONDS, name_of, revision_of

BAD, GOOD = "localhost/bad:1", "localhost/good:1"
NO_IMAGE = {"image": BAD, "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}
PULLING: Object = {"phase": "Pending"}
NOT_PULLED: Object = {"phase": "Pending", "containerStatuses": [NO_IMAGE]}
FAILED: tuple[str, str] = ("False", "PreflightFailed")
PORTS_OF_TARGET = (SERVICE, TARGETS, Ref("NetworkPolicy", "demo-target"))
DONE: tuple[str, str] = ("True", "UpToDate")


async def settled(**outcomes: Object) -> World:
    """A demo that serves; outcomes of preflights by ``bad`` and ``good``."""
    world = await serving()
    world.controllers.outcomes = {f"localhost/{name}:1": each for name, each in outcomes.items()}
    return world


async def change(world: World, image: str, num_rounds: int = 6, **blocks: Any) -> None:
    world.edit_spec(target={"image": image}, **blocks)
    await world.rounds(num_rounds)


def preflights(world: World) -> list[str]:
    return [name_of(pod) for pod in world.controllers.preflights()]


@pytest.mark.parametrize("num_cells", [1, 2])
async def test_an_image_that_cannot_be_pulled_costs_no_outage(num_cells: int) -> None:
    world = await serving(target={"replicas": num_cells})
    world.controllers.outcomes = {BAD: NOT_PULLED}
    targets, drafts = world.ready_pods("target"), world.ready_pods("draft")
    await change(world, BAD, 8, speculation={"branches": 16})  # both templates change
    assert (world.ready_pods("target"), world.ready_pods("draft")) == (targets, drafts)
    assert world.written("Deployment") == []
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == FAILED
    assert f"cannot pull {BAD}: no such" in world.message("Progressing")
    assert world.reasons == ["RevisionChanged", "PreflightFailed"]
    assert len(preflights(world)) == 1
    world.cluster.writes.clear()
    await world.round()
    assert world.cluster.writes == []
    world.edit_spec(target={"image": ""}, speculation={"branches": 24})
    await world.come_to_rest()
    assert world.ready_pods("target") == targets
    assert preflights(world) == []
    assert world.condition("Progressing") == DONE


async def test_another_engine_takes_no_port_from_a_target_that_serves() -> None:
    world = await serving()
    image = "localhost/vllm:1"
    world.controllers.outcomes = {
        image: NOT_PULLED | {"containerStatuses": [NO_IMAGE | {"image": image}]}
    }
    before = [world[each]["spec"] for each in PORTS_OF_TARGET]
    world.edit_spec(target={"engine": "vllm", "image": image})
    await world.rounds(8)
    assert world.condition("Progressing") == FAILED
    assert [world[each]["spec"] for each in PORTS_OF_TARGET] == before
    assert world.status["endpoint"] == {"grpc": "demo.default.svc:50051"}
    world.controllers.outcomes = {}
    await world.rounds(8)
    assert world[SERVICE]["spec"]["ports"][0]["port"] == 8000
    assert world.status["endpoint"] == {"http": "http://demo.default.svc:8000/v1"}


def served_by(world: World) -> tuple[list[str], int]:
    """Names of the ready pods that both Services of targets select, and their port."""
    found = []
    for spec in (world[ref]["spec"] for ref in (SERVICE, TARGETS)):
        selected = [
            name_of(pod)
            for pod in world.ready_pods("target")
            if spec["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        found.append((selected, spec["ports"][0]["port"]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("engines", [("ssd", "vllm"), ("vllm", "ssd")])
@pytest.mark.parametrize("num_cells", [2, 3])
async def test_services_lead_to_pods_of_one_engine_while_cells_change_theirs_one_by_one(
    engines: tuple[str, str], num_cells: int
) -> None:
    world = await serving(target={"replicas": num_cells, "engine": engines[0]})
    old, port = served_by(world)
    world.edit_spec(target={"engine": engines[1]})
    ports, num_mixed = [port], 0
    for _ in range(4 * num_cells):
        await world.next_pass()
        while True:
            ready = list(map(name_of, world.ready_pods("target")))
            selected, now = served_by(world)
            assert selected == [name for name in ready if (name in old) == (now == port)] != []
            num_mixed += selected != ready
            ports.append(now)
            if not world.controllers.step():
                break
    assert num_mixed > 0
    assert len(served_by(world)[0]) == num_cells
    assert (len(set(ports)), ports) == (2, sorted(ports, key=ports.index))
    assert world.condition("Progressing") == DONE


@pytest.mark.parametrize("error", [ForbiddenError("exceeded quota"), RefusedError("denied")])
async def test_a_target_whose_new_engine_is_refused_keeps_its_services(error: ClusterError) -> None:
    world = await serving()
    before, endpoint = [world[each]["spec"] for each in PORTS_OF_TARGET], served_by(world)
    world.cluster.write_faults = {TARGET: error}
    world.edit_spec(target={"engine": "vllm"})
    await world.rounds(6)
    (pod,) = world.ready_pods("target")
    world.controllers.kill(pod)
    world.catch_up()
    await world.try_pass()
    await world.rounds(2)
    assert [world[each]["spec"] for each in PORTS_OF_TARGET] == before
    assert served_by(world) == endpoint == ([name_of(pod)], 50051)
    assert world.status["endpoint"] == {"grpc": "demo.default.svc:50051"}
    world.cluster.write_faults = {}
    world.cluster.now += 60.0
    await world.rounds(4)
    assert served_by(world) == (list(map(name_of, world.ready_pods("target"))), 8000)
    assert world.status["endpoint"] == {"http": "http://demo.default.svc:8000/v1"}


async def test_services_lead_to_new_targets_while_the_last_cell_is_refused() -> None:
    world = await serving(target={"replicas": 2})
    last = Ref("Deployment", "demo-target-1")
    world.cluster.write_faults = {last: ForbiddenError("exceeded quota")}
    world.edit_spec(target={"engine": "vllm"})
    await world.rounds(12)
    served = {name_of(pod): pod["spec"]["containers"][0] for pod in world.ready_pods("target")}
    new = [name for name, each in served.items() if "ssd_vllm" in each["command"]]
    assert (len(served), len(new)) == (2, 1)
    assert served_by(world) == (new, 8000)


def wrap_commands(thing: Object) -> None:
    """What a webhook for secrets does."""
    if thing["kind"] == "Deployment":
        for each in thing["spec"]["template"]["spec"]["containers"]:
            each["args"] = [*each["command"], *each.get("args", ())]
            each["command"] = ["/vault/vault-env"]


async def test_a_change_of_engine_ends_though_a_webhook_wraps_commands() -> None:
    world = World(target={"replicas": 2})
    world.cluster.admit = wrap_commands
    await world.rounds(10)
    assert (len(served_by(world)[0]), served_by(world)[1]) == (2, 50051)
    world.edit_spec(target={"engine": "vllm"})
    for _ in range(10):
        world.cluster.now += 60.0
        await world.rounds(3)
    assert (len(served_by(world)[0]), served_by(world)[1]) == (2, 8000)
    assert world[SERVICE]["spec"]["selector"]["ssd.dev/engine"] == "vllm"


async def test_services_lead_to_the_new_target_if_the_former_one_that_waits_is_down() -> None:
    world = await serving(target={"replicas": 2})
    old, before = world.ready_pods("target")[1], revision_of(world[TARGET])
    world.controllers.outcomes = {BAD: NOT_PULLED}
    world.edit_spec(target={"engine": "vllm"})
    while revision_of(world[TARGET]) == before:
        await world.next_pass()
        world.controllers.step()
    world.controllers.broken = {revision_of(world[TARGET])}
    await change(world, BAD)
    world.controllers.broken = set()
    await world.rounds(3)
    assert len(world.ready_pods("target")) == 2
    assert served_by(world) == ([name_of(old)], 50051)
    world.controllers.make_unready(old)
    await world.rounds(3)
    (new,) = world.ready_pods("target")
    assert served_by(world) == ([name_of(new)], 8000)


def without_engine_label(thing: Object) -> None:
    """What a policy does, and what an older operator made."""
    if thing["kind"] == "Deployment":
        thing["spec"]["template"]["metadata"]["labels"].pop("ssd.dev/engine", None)


async def test_targets_without_the_label_of_their_engine_keep_their_services() -> None:
    world = World()
    world.cluster.admit = without_engine_label
    await world.rounds(6)
    (pod,) = world.ready_pods("target")
    assert served_by(world) == ([name_of(pod)], 50051)
    world.cluster.admit = lambda thing: None
    world.cluster.write_faults = {TARGET: ForbiddenError("exceeded quota")}
    world.restart()
    await world.rounds(6)
    assert served_by(world) == ([name_of(pod)], 50051)
    world.cluster.write_faults = {}
    world.cluster.now += 60.0
    await world.rounds(6)
    (after,) = world.ready_pods("target")
    assert name_of(after) != name_of(pod)
    assert served_by(world) == ([name_of(after)], 50051)
    assert world[SERVICE]["spec"]["selector"]["ssd.dev/engine"] == "ssd"


@pytest.mark.parametrize("code", [0, 1])
async def test_a_container_that_a_mesh_adds_does_not_hold_a_preflight(code: int) -> None:
    ended = {"name": "preflight", "image": GOOD, "state": {"terminated": {"exitCode": code}}}
    mesh = {"name": "istio-proxy", "image": "mesh", "state": {"running": {}}}
    world = await settled(good={"phase": "Running", "containerStatuses": [mesh, ended]})
    await change(world, GOOD, 12)
    assert world.condition("Progressing") == (DONE if code == 0 else FAILED)


async def test_a_good_change_rolls_once_it_has_been_tried_and_leaves_no_pod() -> None:
    world = await settled(good=PULLING)
    before = revision_of(world[TARGET])
    await change(world, GOOD)
    assert world.condition("Progressing") == ("True", "Preflight")
    assert revision_of(world[TARGET]) == before
    world.controllers.outcomes.clear()
    world.controllers.settle()
    await world.come_to_rest()
    (serving,) = world.ready_pods("target")
    assert revision_of(serving) == revision_of(world[TARGET]) != before
    assert preflights(world) == []
    assert world.condition("Progressing") == DONE
    assert "PreflightFailed" not in world.reasons


async def test_a_preflight_that_is_killed_each_time_replaces_nothing_and_reports_it() -> None:
    ended = {"exitCode": 137, "reason": "ContainerStatusUnknown"}
    container = {"name": "preflight", "image": BAD, "state": {"terminated": ended}}
    world = await settled(bad={"phase": "Failed", "containerStatuses": [container]})
    before = world.ready_pods("target")
    await change(world, BAD)
    for _ in range(3):
        assert world.condition("Progressing") == FAILED
        assert "exit code 137" in world.message("Progressing")
        world.cluster.now += 60.0
        await world.rounds(4)
    assert len(world.written("Pod")) > 3
    assert world.ready_pods("target") == before
    world.controllers.outcomes.clear()
    world.cluster.now += 60.0
    await world.rounds(8)
    assert world.condition("Progressing") == DONE


async def test_another_change_midway_is_another_preflight() -> None:
    world = await settled(bad=NOT_PULLED)
    await change(world, BAD, 2)
    (first,) = preflights(world)
    await change(world, GOOD, 8)
    assert world.written("Pod", "delete")[0] == first
    assert len(world.written("Pod")) == 2
    assert world.condition("Progressing") == DONE


async def test_drafts_are_scaled_while_their_change_waits() -> None:
    world = await settled(bad=NOT_PULLED)
    before = {name_of(pod) for pod in world.ready_pods("draft")}
    template = world[DRAFTS]["spec"]["template"]
    await change(world, BAD, speculation={"branches": 16})
    world.edit_spec(draft={"replicas": 3})
    await world.come_to_rest()
    assert before < {name_of(pod) for pod in world.ready_pods("draft")}
    world.edit_spec(draft={"replicas": 1})
    await world.come_to_rest()
    assert len(world.ready_pods("draft")) == 1
    assert world[DRAFTS]["spec"]["template"] == template
    await change(world, GOOD, 10)
    assert world[DRAFTS]["spec"]["template"] != template
    assert world.condition("Progressing") == DONE


async def test_a_cell_that_a_person_has_paused_takes_part_in_a_change() -> None:
    world = await serving(target={"replicas": 2})
    paused = Ref("Deployment", "demo-target-1")
    before = {revision_of(pod) for pod in world.ready_pods("target")}
    with world.edited(paused) as found:
        found["spec"]["paused"] = True
        found["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "EXTRA"})
    world.controllers.settle()
    await change(world, GOOD)
    await world.come_to_rest()
    revisions = {revision_of(world[each]) for each in (TARGET, paused)}
    assert revisions.isdisjoint(before)
    assert {revision_of(pod) for pod in world.ready_pods("target")} == revisions
    assert world.condition("Progressing") == DONE


async def test_a_cell_that_does_not_serve_is_replaced_at_once() -> None:
    world = await settled()
    before = revision_of(world[TARGET])
    world.controllers.make_unready(world.ready_pods("target")[0])
    world.edit_spec(target={"image": GOOD})
    await world.next_pass()
    assert revision_of(world[TARGET]) != before
    assert world.written("Pod") == []


async def test_a_target_that_is_down_for_a_moment_is_not_replaced_by_a_failed_change() -> None:
    world = await settled(bad=NOT_PULLED)
    before = revision_of(world[TARGET])
    await change(world, BAD)
    world.controllers.kill(world.ready_pods("target")[0])
    await world.next_pass()
    assert revision_of(world[TARGET]) == before
    assert world.condition("Ready")[0] == "False"
    await world.rounds(2)
    assert world.condition("Ready") == ("True", "Serving")


async def test_a_preflight_that_is_deleted_by_hand_tries_again() -> None:
    world = await settled(good=NOT_PULLED)
    await change(world, GOOD)
    assert world.condition("Progressing") == FAILED
    world.controllers.outcomes.clear()
    (pod,) = preflights(world)
    world.remove(Ref("Pod", pod))
    await world.come_to_rest()
    assert world.written("Pod") == [pod, pod]
    assert world.condition("Progressing") == DONE


@pytest.mark.parametrize("num_rounds", range(6))
async def test_an_operator_that_is_restarted_at_any_time_continues(num_rounds: int) -> None:
    world = await settled()
    await change(world, GOOD, num_rounds)
    world.restart()
    await world.come_to_rest()
    assert len(world.written("Pod")) == 1
    assert preflights(world) == []
    (serving,) = world.ready_pods("target")
    assert revision_of(serving) == revision_of(world[TARGET])


@pytest.mark.parametrize(
    ("error", "condition", "seconds"),
    [
        (ForbiddenError("exceeded quota: pods=0"), ("True", "Valid"), 60.0),
        (RefusedError("spec.containers[0].image: no"), ("False", "PodTemplateInvalid"), 600.0),
    ],
)
async def test_a_preflight_that_cannot_be_created_is_quoted_and_delays_only_the_change(
    error: ClusterError, condition: tuple[str, str], seconds: float
) -> None:
    world = await settled()
    (serving,) = world.ready_pods("target")
    world.cluster.write_faults = {"Pod": error}
    await change(world, GOOD, 10)
    assert world.ready_pods("target") == [serving]
    assert world.condition("Progressing") == FAILED
    assert str(error) in world.message("Progressing")
    assert world.condition("SpecValid") == condition
    assert len(world.written("Pod")) == 1
    assert await world.next_pass() < seconds
    world.cluster.write_faults = {}
    world.cluster.now += seconds
    await world.rounds(8)
    assert world.condition("Progressing") == DONE


def is_large(preflight: Object) -> bool:
    """Whether a preflight requests what it may use."""
    (container,) = preflight["spec"]["containers"]
    return bool(container["resources"]["requests"] == container["resources"]["limits"])


def limit_range(thing: Object) -> None:
    """A namespace whose LimitRange has a minimum, and 2 as the largest ratio of limit to request.

    Raises:
        ForbiddenError: a preflight requests less than its limits.
    """
    if thing["kind"] == "Pod" and not is_large(thing):
        raise ForbiddenError("minimum memory usage per Container is 64Mi, but request is 0")


async def test_a_preflight_that_a_limit_range_forbids_requests_what_it_may_use() -> None:
    world = await settled()
    world.cluster.admit = limit_range
    await change(world, GOOD, 10)
    assert world.condition("Progressing") == DONE
    (serving,) = world.ready_pods("target")
    assert revision_of(serving) == revision_of(world[TARGET])


async def test_a_preflight_requests_little_again_where_its_limits_are_forbidden() -> None:
    world = await settled()

    def quota(thing: Object) -> None:
        if thing["kind"] == "Pod" and is_large(thing):
            raise ForbiddenError("exceeded quota")

    def both(thing: Object) -> None:
        limit_range(thing)
        quota(thing)

    world.cluster.admit = both
    await change(world, GOOD, 20)
    assert world.condition("Progressing") == FAILED
    assert "exceeded quota" in world.message("Progressing")
    assert len(world.written("Pod")) == 2
    world.cluster.admit = quota
    world.cluster.now += 60.0
    await world.rounds(8)
    assert world.condition("Progressing") == DONE


@pytest.mark.parametrize("error", [ForbiddenError("exceeded quota"), RefusedError("denied")])
async def test_a_cell_that_is_down_rolls_although_no_preflight_can_be_created(
    error: ClusterError,
) -> None:
    world = await serving(target={"replicas": 2})
    world.controllers.make_unready(world.ready_pods("target")[1])
    world.cluster.now += UNREADY_SECONDS
    world.cluster.write_faults = {"Pod": error}
    await change(world, GOOD, 8)
    images = [pod["spec"]["containers"][0]["image"] for pod in world.ready_pods("target")]
    assert [image == GOOD for image in images] == [False, True]


async def test_a_foreign_pod_with_its_name_is_left_alone() -> None:
    world = await settled(good=PULLING)
    await change(world, GOOD, 2)
    (name,) = preflights(world)
    owner = {"kind": "Job", "name": "theirs", "uid": "x", "controller": True}
    labels = {"ssd.dev/component": "theirs"}
    theirs = world.take_name(Ref("Pod", name), labels=labels, ownerReferences=[owner])
    await world.rounds(20)
    assert world.condition("Progressing") == FAILED
    assert world.condition("Ready") == ("True", "Serving")
    assert world[Ref("Pod", name)] == theirs


async def test_fields_that_admission_adds_to_a_preflight_stay() -> None:
    world = await settled(good=PULLING)
    world.cluster.admit = add_to_pods
    await change(world, GOOD, 1)
    assert len(preflights(world)) == 1
    assert world.written("Pod", "patch") == []
    assert "ApplyReverted" not in world.reasons


def add_to_pods(thing: Object) -> None:
    """What LimitRanger and a webhook for credentials do."""
    for container in thing["spec"]["containers"] if thing["kind"] == "Pod" else ():
        container["resources"]["limits"]["ephemeral-storage"] = "1Gi"
        container["env"].append({"name": "AWS_ROLE_ARN", "value": "arn:aws:iam::1:role/ssd"})


async def test_a_preflight_pod_that_was_edited_stops_no_pass() -> None:
    world = await settled()
    await change(world, GOOD, 1)
    (name,) = preflights(world)
    with world.edited(Ref("Pod", name)) as pod:
        pod["metadata"]["annotations"] = {}
    await world.come_to_rest()
    assert world.condition("Progressing") == DONE
