"""Passes over a cluster in memory."""

import copy
from collections.abc import Callable

import pytest
from tests.unit.ssd_operator.world import (
    DEMO,
    DRAFTS,
    KEY,
    RESOURCE,
    SERVICE,
    TARGET,
    World,
    settled,
)

from ssd_operator.api.spec import Object
from ssd_operator.children.objects import RESTART_ANNOTATION
from ssd_operator.observe.cluster import (
    BusyError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    MissingError,
    Ref,
    RefusedError,
)
from ssd_operator.observe.diagnosis import MOUNTING_SECONDS
from ssd_operator.observe.pod_state import name_of, revision_of, to_text


async def test_a_new_resource_gets_all_its_children_and_serves() -> None:
    world = World()
    assert await world.come_to_rest() <= 3
    kinds = {"Deployment", "NetworkPolicy", "Service", "ServiceAccount"}
    assert {ref.kind for ref in world.children()} == kinds
    assert (len(world.ready_pods("target")), len(world.ready_pods("draft"))) == (1, 2)
    assert world.condition("Ready") == ("True", "Serving")


async def test_the_error_of_calls_to_a_target_that_does_not_answer_is_in_the_status() -> None:
    world = await settled()
    world.engines.call_errors = {name_of(pod): "no route" for pod in world.ready_pods("target")}
    world.cluster.now += 60
    await world.round()
    assert world.condition("SpeculationActive") == ("Unknown", "TargetUnreachable")
    assert world.message("SpeculationActive").endswith(": no route.")


async def test_a_condition_of_another_writer_stays_and_causes_no_write() -> None:
    world = await settled()
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Done"}
    with world.edited(RESOURCE) as found:
        found["status"]["conditions"].insert(0, theirs)
    for _ in range(3):
        await world.next_pass()
    assert world.cluster.writes == []
    with world.edited(RESOURCE) as found:
        found["metadata"]["generation"] += 1
    await world.next_pass()
    assert world.written("SSDDeployment", "status") == ["demo"]
    assert theirs in world.status["conditions"]


async def test_an_idle_pass_neither_writes_nor_reads() -> None:
    world = await settled()
    reads = world.cluster.reads
    await world.round()
    assert (world.cluster.writes, world.cluster.reads) == ([], reads)


async def test_a_pass_before_its_own_writes_come_back_does_not_repeat_them() -> None:
    world = World()
    world.catch_up()
    await world.run_pass()
    num_writes = len(world.cluster.writes)
    world.cluster.now += 2.0
    await world.run_pass()
    assert "apply" not in [verb for verb, _ in world.cluster.writes[num_writes:]]


async def test_a_new_operator_reports_a_resource_that_serves_as_ready() -> None:
    world = await settled()
    with world.edited(RESOURCE) as found:
        del found["status"]
    world.restart()
    await world.round()
    assert world.condition("Ready") == ("True", "Serving")


def edit(child: Object) -> None:
    child["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    child["metadata"]["annotations"]["note"] = "kept"


def remove_labels(child: Object) -> None:
    child["metadata"]["labels"] = {}


@pytest.mark.parametrize("change", [None, edit, remove_labels])
async def test_every_child_is_restored(change: Callable[[Object], None] | None) -> None:
    world = await settled()
    for ref in world.children():
        before = copy.deepcopy(world[ref]["metadata"])
        if change is None:
            world.remove(ref)
        else:
            with world.edited(ref) as child:
                change(child)
        assert await world.come_to_rest() <= 3
        after = world[ref]["metadata"]
        assert (after["uid"] != before["uid"]) is (change is None)
        assert after["labels"] == before["labels"]
        assert after["annotations"].get("note") == ("kept" if change is edit else None)


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_deployment_that_lost_its_labels_goes_with_its_cell(*, is_new: bool) -> None:
    world = await settled(target={"replicas": 2})
    ref = Ref("Deployment", "demo-target-1")
    with world.edited(ref) as found:
        remove_labels(found)
    world.edit_spec(target={"replicas": 1})
    if is_new:
        world.restart()  # it has never seen the Deployment
    await world.come_to_rest()
    assert ref not in world
    assert Ref("PodDisruptionBudget", "demo-target") not in world, "it is for several targets"
    assert len(world.ready_pods("target")) == 1
    reads = world.cluster.reads
    await world.round()
    assert world.cluster.reads == reads


async def test_a_marked_draft_drains_although_an_earlier_call_of_the_pass_fails() -> None:
    world = await settled()
    world.edit_spec(draft={"replicas": 1})
    await world.next_pass()
    drained = set(world.drains)
    assert len(drained) == 1
    world.restart()
    world.remove(SERVICE)
    world.cluster.write_faults = {"Service": BusyError("503")}
    with pytest.raises(BusyError):
        await world.next_pass()
    assert set(world.drains) == drained


async def test_scaling_down_drains_the_draft_before_it_goes() -> None:
    world = await settled()
    world.edit_spec(draft={"replicas": 1})
    await world.next_pass()
    await world.next_pass()
    (victim,) = world.drains
    assert world[DRAFTS]["spec"]["replicas"] == 2
    world.engines.finish()
    await world.come_to_rest()
    assert world[DRAFTS]["spec"]["replicas"] == 1
    assert Ref("Pod", victim) not in world
    assert {"DraftDraining", "DraftDrained", "DraftsScaled"} <= set(world.reasons)


async def test_drafts_scale_down_while_they_roll() -> None:
    world = await settled()
    world.edit_spec(draft={"image": "localhost/new:1", "replicas": 1})
    await world.rounds(10)
    assert len(world.ready_pods("draft")) == world[DRAFTS]["spec"]["replicas"] == 1


async def test_a_pod_taken_out_of_its_replica_set_neither_counts_nor_blocks_a_scale_down() -> None:
    world = await settled()
    orphan = copy.deepcopy(world.ready_pods("draft")[0])
    orphan["metadata"] |= {"name": "orphan", "ownerReferences": []}
    world.cluster.put(orphan)
    world.edit_spec(draft={"replicas": 0})
    await world.come_to_rest()
    assert world[DRAFTS]["spec"]["replicas"] == world.status["draft"]["replicas"] == 0
    assert Ref("Pod", "orphan") in world


@pytest.mark.parametrize("component", ["target", "draft", "gateway"])
async def test_a_pod_that_mounts_for_more_than_ten_seconds_is_reported(component: str) -> None:
    world = await settled(gateway={"enabled": True})
    (found, *_) = world.ready_pods(component)
    since = to_text(world.cluster.now)
    with world.edited(Ref("Pod", name_of(found))) as pod:
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": since},
            {"type": "PodReadyToStartContainers", "status": "False"},
        ]
    again_after = await world.next_pass()
    assert again_after <= MOUNTING_SECONDS, "nothing reports the end of the wait"
    world.cluster.now += again_after
    await world.next_pass()
    assert "has no sandbox after 10 s" in world.message(f"{component.capitalize()}Ready")


async def test_a_foreign_pod_with_our_labels_is_no_target_and_is_not_dialled() -> None:
    world = await settled()
    theirs = copy.deepcopy(world.ready_pods("target")[0])
    owner = {"kind": "ReplicaSet", "name": "theirs-1", "uid": "x", "controller": True}
    theirs["metadata"] |= {"name": "theirs", "ownerReferences": [owner]}
    world.cluster.put(theirs)
    await world.round()
    assert "theirs" not in world.engines.followed[KEY]
    assert world.status["target"]["replicas"] == 1


async def test_a_deployment_whose_cell_is_no_number_stops_no_pass() -> None:
    world = await settled()
    with world.edited(TARGET) as found:
        found["metadata"]["labels"]["ssd.dev/cell"] = "debug"
    await world.next_pass()


@pytest.mark.parametrize(
    "error", [BusyError("503"), ConflictError("409"), BusyError("slow", 5.0), ForbiddenError("403")]
)
async def test_a_failed_call_fails_the_pass_and_the_next_one_continues(error: Exception) -> None:
    world = World()
    world.catch_up()
    world.cluster.failures = [error]  # type: ignore[list-item]
    with pytest.raises(type(error)):
        await world.run_pass()
    assert await world.come_to_rest() <= 4
    assert world.condition("Ready") == ("True", "Serving")


async def test_a_resource_that_exists_is_not_dropped_because_a_status_write_was_not_found() -> None:
    world = await settled()
    world.controllers.make_unready(world.ready_pods("target")[0])
    world.cluster.failures = [MissingError("404")]
    await world.next_pass()
    await world.come_to_rest()
    assert world.condition("Ready")[0] == "False"


async def test_a_refused_status_write_loses_no_event_and_ends_no_pass() -> None:
    world = await settled()
    before = copy.deepcopy(world.status)
    world.edit_spec(draft={"replicas": 3})
    write = ("status", RESOURCE)
    world.cluster.write_faults = {write: RefusedError("422: a rule refuses it")}
    await world.next_pass()
    assert write in world.cluster.writes
    assert world.status == before
    assert world.reasons == ["DraftsScaled"]
    world.cluster.write_faults = {}
    await world.next_pass()
    assert world.status["draft"]["desiredReplicas"] == 3
    assert world.reasons == ["DraftsScaled"]


async def test_a_paused_resource_gets_its_status_and_nothing_else() -> None:
    world = await settled()
    world.edit_spec(paused=True, target={"image": "localhost/new:1"}, draft={"replicas": 3})
    world.remove(SERVICE)
    await world.come_to_rest()
    assert {verb for verb, _ in world.cluster.writes} == {"status"}
    assert world.condition("Progressing") == ("False", "Paused")


@pytest.mark.parametrize("kind", ["Service", "Pod"])
async def test_a_namespace_that_is_deleted_is_no_error(kind: str) -> None:
    world = await settled()
    world.cluster.write_faults = {kind: MissingError("it is being terminated")}
    world.remove(SERVICE)
    world.edit_spec(target={"image": "localhost/new:1"})  # a preflight pod is wanted
    assert await world.next_pass() == 30.0


def change_the_image(world: World) -> None:
    world.edit_spec(target={"image": "localhost/new:1"})


def ask_for_a_restart(world: World) -> None:
    with world.edited(RESOURCE) as found:
        found["metadata"]["annotations"] = {RESTART_ANNOTATION: "1"}


CELLS = [Ref("Deployment", f"demo-target-{cell}") for cell in range(3)]


def edit_by_hand(world: World) -> None:
    for ref in CELLS:
        with world.edited(ref) as found:
            found["spec"]["template"]["spec"]["containers"][0]["image"] = "localhost/theirs:1"
    world.controllers.settle()


@pytest.mark.parametrize("change", [change_the_image, ask_for_a_restart, edit_by_hand])
async def test_cells_roll_one_after_another_after_one_preflight(
    change: Callable[[World], None],
) -> None:
    world = await settled(target={"replicas": 3})
    change(world)
    before = {name_of(pod) for pod in world.ready_pods("target")}
    fewest = 3
    for _ in range(12):
        await world.next_pass()
        while world.controllers.step():
            fewest = min(fewest, len(world.ready_pods("target")))
    assert fewest == 2
    pods = world.ready_pods("target")
    assert before.isdisjoint(map(name_of, pods))
    assert {revision_of(pod) for pod in pods} == {revision_of(world[ref]) for ref in CELLS}
    assert all("theirs" not in str(world[ref]) for ref in CELLS)
    assert len(world.written("Pod")) == 1
    assert world.controllers.preflights() == []


async def test_a_bad_revision_stops_after_one_cell_and_a_good_one_replaces_it() -> None:
    world = await settled(target={"replicas": 2})
    before = {revision_of(world[ref]) for ref in CELLS[:2]}
    world.edit_spec(target={"image": "localhost/bad:1"})
    await world.round()  # the preflight passes
    await world.next_pass()
    world.controllers.broken = {revision_of(world[ref]) for ref in CELLS[:2]} - before
    assert len(world.controllers.broken) == 1
    await world.rounds(4)
    assert len(world.ready_pods("target")) == 1
    world.edit_spec(target={"image": "localhost/good:1"})
    await world.rounds(6)
    assert len(world.ready_pods("target")) == 2


async def test_the_internal_loop_writes_the_number_and_nothing_else_does() -> None:
    autoscaling = {"mode": "Internal", "maxReplicas": 4}
    world = await settled(draft={"autoscaling": autoscaling, "replicas": 1})
    for _ in range(12):
        world.report(eligible_sequences=70)
        await world.round()
    assert len(world.ready_pods("draft")) == world[RESOURCE]["spec"]["draft"]["replicas"] == 3
    assert world.cluster.writes.count(("scale", RESOURCE)) == 1


async def test_a_deleted_resource_is_forgotten() -> None:
    world = await settled()
    await world.delete_resource()
    assert world.engines.followed == {KEY: {}}
    assert world.cluster.writes == []


async def test_a_resource_that_a_finalizer_holds_is_reported_as_deleting() -> None:
    world = await settled()
    assert world.condition("Ready") == ("True", "Serving")
    with world.edited(RESOURCE) as resource:
        resource["metadata"]["deletionTimestamp"] = to_text(world.cluster.now)
        resource["metadata"]["finalizers"] = ["example.com/audit"]
    world.cluster.writes.clear()
    for _ in range(2):
        world.catch_up()
        assert await world.reconciler.reconcile(KEY) is None
    assert world.cluster.writes == [("status", RESOURCE)]
    assert world.condition("Ready") == ("False", "Deleting")
    assert world.condition("TargetReady") == ("Unknown", "Deleting")
    assert "finalizers: example.com/audit" in world.message("Ready")
    assert world.status["speculation"] == {"state": "Deleting"}
    assert "target" not in world.status


async def test_nothing_is_written_in_kube_system() -> None:
    world = World()
    world.cluster.create_resource(("kube-system", "demo"), DEMO)
    world.catch_up()
    assert await world.reconciler.reconcile(("kube-system", "demo")) is None
    assert world.cluster.writes == []


@pytest.mark.parametrize("is_seen", [False, True])
async def test_additions_to_fields_that_we_own_are_removed(*, is_seen: bool) -> None:
    world = await settled()
    before = copy.deepcopy(world[DRAFTS]["spec"])
    with world.edited(DRAFTS) as found:
        found["spec"]["paused"] = True
        container = found["spec"]["template"]["spec"]["containers"][0]
        container["env"].insert(1, {"name": "SSD_DRAFT_LOG_FORMAT", "value": "text"})
    world.edit_spec(SERVICE, selector={"extra": "x"})
    if is_seen:
        world.controllers.settle()
    await world.come_to_rest()
    assert world[DRAFTS]["spec"] == before
    assert "demo-draft-0" in world.written("Deployment", "patch")
    assert "extra" not in world[SERVICE]["spec"]["selector"]
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_refused_apply_is_repeated_once_a_patch_has_made_room(*, has_room: bool) -> None:
    world = await settled()
    with world.edited(SERVICE) as found:
        found["spec"]["selector"] = {"app": "theirs"}
    refusals: list[ClusterError] = [RefusedError("422: two ports of one name")]
    refusals += [] if has_room else [ForbiddenError("403: a policy")]

    def refuse(verb: str, ref: Ref) -> None:
        if ref == SERVICE and refusals:
            raise refusals.pop(0)

    world.cluster.meddle = refuse
    await world.next_pass()
    calls = [verb for verb, ref in world.cluster.writes if ref == SERVICE]
    assert calls == (["apply", "patch", "apply"] if has_room else ["apply", "patch"])
    is_ours = world[SERVICE]["spec"]["selector"] != {"app": "theirs"}
    assert is_ours is has_room
    if not has_room:
        assert "two ports of one name" in world.message("SpecValid")


BUDGET = Ref("PodDisruptionBudget", "demo-target")
PROFILE = {"type": "Localhost", "localhostProfile": "a.json"}
EXCLUDING: list[tuple[Ref, Object]] = [
    (TARGET, {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%"}}}),
    (TARGET, {"template": {"spec": {"securityContext": {"seccompProfile": PROFILE}}}}),
    (BUDGET, {"maxUnavailable": None, "minAvailable": 1}),
    (SERVICE, {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]}),
]


@pytest.mark.parametrize(("ref", "edit"), EXCLUDING)
async def test_a_field_by_hand_that_excludes_one_of_ours_is_removed(ref: Ref, edit: Object) -> None:
    world = await settled(target={"replicas": 2})
    before = world[ref]["spec"]
    world.edit_spec(ref, **edit)
    assert world[ref]["spec"] != before
    await world.come_to_rest()
    assert world[ref]["spec"] == before
    assert world.condition("SpecValid") == ("True", "Valid")


async def test_a_refused_apply_keeps_fields_of_others_that_exclude_none_of_ours() -> None:
    world = await settled()
    world.edit_spec(SERVICE, **EXCLUDING[-1][1], externalIPs=["10.1.1.1"])
    await world.come_to_rest()
    assert world[SERVICE]["spec"]["type"] == "ClusterIP"
    assert world[SERVICE]["spec"]["externalIPs"] == ["10.1.1.1"]
    rolling = EXCLUDING[0][1]
    world.edit_spec(TARGET, **rolling, minReadySeconds=9)
    await world.come_to_rest()
    assert world[TARGET]["spec"]["strategy"] == {"type": "Recreate"}
    assert world[TARGET]["spec"]["minReadySeconds"] == 9


async def test_additions_are_removed_although_a_controller_writes_a_status_meanwhile() -> None:
    world = await settled()
    with world.edited(DRAFTS) as found:
        found["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "THEIRS"})

    def write_a_status(verb: str, ref: Ref) -> None:
        if verb == "patch":
            world.cluster.put(world[DRAFTS] | {"status": {}})

    world.cluster.meddle = write_a_status
    await world.next_pass()
    assert ("patch", DRAFTS) in world.cluster.writes
    env = world[DRAFTS]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "THEIRS" not in [each["name"] for each in env]
