"""Passes over a cluster in memory."""

import copy
from unittest.mock import Mock

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World, demo, settled

from ssd_operator.api.spec import Object
from ssd_operator.children.names import NAME_LABEL, revision_of
from ssd_operator.observe.cluster import BusyError, ConflictError, ForbiddenError
from ssd_operator.observe.facts import PoolFact, Ref
from ssd_operator.observe.pod_state import name_of
from ssd_operator.policy.plan import plan
from ssd_operator.runtime import reconcile
from ssd_operator.runtime.work_queue import DEBOUNCE_SECONDS


async def test_a_new_resource_gets_all_its_children_and_serves() -> None:
    world = World()
    assert await world.come_to_rest(6) <= 3
    assert {ref.kind for ref, _ in world.children()} == {
        "Deployment",
        "NetworkPolicy",
        "Service",
        "ServiceAccount",
    }
    assert len(world.ready_pods("target")) == 1
    assert len(world.ready_pods("draft")) == 2
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_an_idle_pass_neither_writes_nor_reads() -> None:
    world = await settled()
    reads = world.cluster.reads
    await world.round()
    assert world.cluster.writes == []
    assert world.cluster.reads == reads


async def test_a_pass_plans_once_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Mock(wraps=plan)
    monkeypatch.setattr(reconcile, "plan", plans)
    world = World()
    world.cluster.refused = {Ref("Service", "demo-targets"): "no"}
    world.cluster.forbidden = {Ref("Deployment", "demo-draft-0"): "exceeded quota"}
    await world.round()  # the first status, without a plan
    for number in range(1, 4):
        await world.round()
        assert plans.call_count == number


async def test_a_pass_before_its_own_writes_come_back_does_not_repeat_them() -> None:
    world = World()
    world.catch_up()
    await world.run_pass()  # the first status
    await world.run_pass()
    num_writes = len(world.cluster.writes)
    world.cluster.now += 2.0
    await world.run_pass()
    again = [verb for verb, _ in world.cluster.writes[num_writes:]]
    assert "apply" not in again


async def test_resources_that_were_created_at_once_have_a_status_before_one_has_children() -> None:
    world = World()
    keys = [KEY, *(("default", f"r{number}") for number in range(7))]
    for key in keys[1:]:
        world.cluster.create_resource(key, DEMO)
    world.catch_up()
    for key in keys:
        assert await world.reconciler.reconcile(key) == DEBOUNCE_SECONDS
    assert [verb for verb, _ in world.cluster.writes] == ["status"] * len(keys)
    for key in keys:
        assert world.cluster.condition(key, "Ready") == ("False", "Loading")
        assert world.cluster.condition(key, "SpecValid") == ("True", "Valid")
        assert "endpoint" not in world.cluster.resource(key)["status"]
        await world.reconciler.reconcile(key)
    services = {each["metadata"]["name"] for each in world.cluster.of_kind("Service")}
    assert services >= {name for _, name in keys}
    assert [each.reason for each in world.cluster.events] == ["Created"] * len(keys)


async def test_a_first_status_that_is_not_written_keeps_no_child_from_being_made() -> None:
    world = World()
    world.catch_up()
    world.cluster.failures = [BusyError("429 try later")]
    with pytest.raises(BusyError):
        await world.run_pass()
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_a_new_operator_reports_a_resource_that_serves_as_ready() -> None:
    world = await settled()
    found = world.cluster.resource(KEY)
    world.cluster.put({name: part for name, part in found.items() if name != "status"})
    world.restart()
    await world.round()
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_every_deleted_child_is_made_again() -> None:
    world = await settled()
    for ref, before in world.children():
        world.cluster.remove("default", ref)
        assert await world.come_to_rest(4) <= 3
        after = world.cluster.objects["default", ref]
        assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_every_edited_child_is_restored() -> None:
    world = await settled()
    for ref, before in world.children():
        edited = copy.deepcopy(before)
        edited["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
        edited["metadata"]["annotations"]["note"] = "kept"
        world.cluster.put(edited)
        assert await world.come_to_rest(4) <= 3
        after = world.cluster.objects["default", ref]["metadata"]
        assert after["labels"]["app.kubernetes.io/name"] == "ssd"
        assert after["annotations"]["note"] == "kept"


async def test_a_child_without_its_labels_is_found_by_name_and_restored() -> None:
    world = await settled()
    ref = Ref("Service", "demo")
    edited = copy.deepcopy(world.cluster.objects["default", ref])
    edited["metadata"]["labels"] = {}
    world.cluster.put(edited)
    await world.come_to_rest(4)
    assert world.cluster.objects["default", ref]["metadata"]["labels"][NAME_LABEL] == "demo"


async def test_a_deployment_that_lost_its_labels_goes_with_its_cell() -> None:
    world = await settled(DEMO | {"target": {**DEMO["target"], "replicas": 2}})
    edited = copy.deepcopy(world.deployment("demo-draft-1"))
    edited["metadata"]["labels"] = {}
    world.cluster.put(edited)
    world.cluster.edit_spec(KEY, target={"replicas": 1})
    world.restart()  # which has never seen it
    await world.come_to_rest(8)
    assert ("default", Ref("Deployment", "demo-draft-1")) not in world.cluster.objects


async def test_replicas_that_were_raised_on_a_deployment_are_drained_away() -> None:
    world = await settled()
    raised = copy.deepcopy(world.deployment("demo-draft-0"))
    raised["spec"]["replicas"] = 4
    world.cluster.put(raised)
    world.controllers.settle()
    await world.come_to_rest(8)
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 2
    assert any((verb, ref.kind) == ("patch", "Pod") for verb, ref in world.cluster.writes)


async def test_a_marked_draft_drains_although_an_earlier_call_of_the_pass_fails() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    world.catch_up()
    await world.run_pass()
    drained = set(world.engines.facts)
    assert len(drained) == 1
    world.restart()
    world.cluster.remove("default", Ref("Service", "demo"))
    world.catch_up()
    world.cluster.refusals = {"Service": BusyError("503")}
    with pytest.raises(BusyError):
        await world.run_pass()
    assert set(world.engines.facts) == drained


async def test_a_draft_whose_mark_is_refused_does_not_drain() -> None:
    world = await settled()
    pods = [Ref("Pod", name_of(pod)) for pod in world.ready_pods("draft")]
    world.cluster.forbidden = dict.fromkeys(pods, "no")
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    world.catch_up()
    with pytest.raises(ForbiddenError):
        await world.run_pass()
    assert world.engines.facts == {}


async def test_scaling_down_drains_the_draft_before_it_goes() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()
    world.catch_up()
    world.cluster.now += 2.0
    await world.run_pass()
    (victim,) = world.engines.facts
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 2
    world.engines.finish()
    await world.come_to_rest(6)
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 1
    assert ("default", Ref("Pod", victim)) not in world.cluster.objects
    reasons = {event.reason for event in world.cluster.events}
    assert {"DraftDraining", "DraftDrained", "DraftsScaled"} <= reasons


async def test_no_draft_is_taken_away_while_drafts_roll_unless_the_roll_is_stuck() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, draft={"image": "localhost/new:1"})
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()  # the Deployment has the new template, the pods are of the old one
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    for _ in range(4):
        world.cluster.now += 2.0
        world.catch_up()
        await world.run_pass()
        world.engines.finish()
    assert world.engines.facts == {}
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 2
    rolling = copy.deepcopy(world.deployment("demo-draft-0"))
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    world.cluster.put(rolling | {"status": {"conditions": [stuck]}})
    for _ in range(4):
        world.cluster.now += 2.0
        world.catch_up()
        await world.run_pass()
        world.engines.finish()
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 1


async def test_a_scale_down_that_waited_for_a_roll_continues_after_it() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, draft={"image": "localhost/new:1", "replicas": 1})
    for _ in range(10):
        await world.round()
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 1
    assert len(world.ready_pods("draft")) == 1


async def test_a_pod_taken_out_of_its_replica_set_neither_counts_nor_blocks_a_scale_down() -> None:
    world = await settled()
    orphan = copy.deepcopy(world.ready_pods("draft")[0])
    orphan["metadata"] |= {"name": "orphan", "ownerReferences": []}
    world.cluster.put(orphan)
    world.cluster.edit_spec(KEY, draft={"replicas": 0})
    await world.come_to_rest(12)
    assert world.deployment("demo-draft-0")["spec"]["replicas"] == 0
    assert world.cluster.resource(KEY)["status"]["draft"]["replicas"] == 0
    assert ("default", Ref("Pod", "orphan")) in world.cluster.objects


async def test_a_foreign_pod_with_our_labels_is_no_target_and_is_not_dialled() -> None:
    world = await settled()
    theirs = copy.deepcopy(world.ready_pods("target")[0])
    owner = {"kind": "ReplicaSet", "name": "theirs-1", "uid": "x", "controller": True}
    theirs["metadata"] |= {"name": "theirs", "ownerReferences": [owner]}
    world.cluster.put(theirs)
    await world.round()
    assert "theirs" not in world.engines.followed
    assert world.cluster.resource(KEY)["status"]["target"]["replicas"] == 1


@pytest.mark.parametrize("ref", ["Pod", "Deployment"])
async def test_a_cell_that_is_no_number_stops_no_pass(ref: str) -> None:
    world = await settled()
    edited = copy.deepcopy(
        world.ready_pods("draft")[0] if ref == "Pod" else world.deployment("demo-target-0")
    )
    edited["metadata"]["labels"]["ssd.dev/cell"] = "debug"
    world.cluster.put(edited)
    world.cluster.now += 2.0
    world.catch_up()
    assert await world.run_pass() is not None


@pytest.mark.parametrize(
    "error", [BusyError("503"), ConflictError("409"), BusyError("slow", 5.0), ForbiddenError("403")]
)
async def test_a_failed_call_fails_the_pass_and_the_next_one_continues(error: Exception) -> None:
    world = World()
    world.catch_up()
    world.cluster.failures = [error]  # type: ignore[list-item]
    with pytest.raises(type(error)):
        await world.run_pass()
    assert await world.come_to_rest(6) <= 4
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_a_paused_resource_gets_its_status_and_nothing_else() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, paused=True, draft={"replicas": 3})
    world.cluster.remove("default", Ref("Service", "demo"))
    await world.come_to_rest(4)
    assert {verb for verb, _ in world.cluster.writes} == {"status"}
    assert world.cluster.condition(KEY, "Progressing") == ("False", "Paused")


async def test_a_namespace_that_is_deleted_is_no_error() -> None:
    world = await settled()
    world.cluster.terminating_namespaces = {"default"}
    world.cluster.remove("default", Ref("Service", "demo"))
    world.cluster.now += 2.0
    world.catch_up()
    assert await world.run_pass() == 30.0


async def test_children_that_are_not_wanted_any_more_are_deleted() -> None:
    world = await settled(demo(target={"replicas": 2}))
    assert Ref("PodDisruptionBudget", "demo-target") in dict(world.children())
    world.cluster.edit_spec(KEY, target={"replicas": 1})
    await world.come_to_rest(8)
    left = dict(world.children())
    assert Ref("PodDisruptionBudget", "demo-target") not in left
    assert Ref("Deployment", "demo-target-1") not in left


async def test_cells_roll_one_after_another() -> None:
    world = await settled(demo(target={"replicas": 3}))
    world.cluster.edit_spec(KEY, target={"image": "localhost/new:1"})
    fewest = 3
    for _ in range(12):
        world.catch_up()
        world.cluster.now += 2.0
        await world.run_pass()
        while world.controllers.step():
            fewest = min(fewest, len(world.ready_pods("target")))
    assert fewest == 2
    assert len(world.ready_pods("target")) == 3
    images = {pod["metadata"]["labels"]["ssd.dev/revision"] for pod in world.ready_pods("target")}
    assert images == {revision_of(world.deployment(f"demo-target-{cell}")) for cell in range(3)}


async def test_a_bad_revision_stops_after_one_cell_and_a_good_one_replaces_it() -> None:
    world = await settled(demo(target={"replicas": 2}))
    before = {revision_of(world.deployment(f"demo-target-{cell}")) for cell in range(2)}
    world.cluster.edit_spec(KEY, target={"image": "localhost/bad:1"})
    await world.round()  # the preflight passes
    world.catch_up()
    await world.run_pass()
    revisions = [revision_of(world.deployment(f"demo-target-{cell}")) for cell in range(2)]
    world.controllers.broken = set(revisions) - before
    assert len(world.controllers.broken) == 1
    for _ in range(4):
        await world.round()
    assert len(world.ready_pods("target")) == 1
    world.cluster.edit_spec(KEY, target={"image": "localhost/good:1"})
    for _ in range(6):
        await world.round()
    assert len(world.ready_pods("target")) == 2


async def test_the_internal_loop_writes_the_number_and_nothing_else_does() -> None:
    world = await settled(
        demo(draft={"autoscaling": {"mode": "Internal", "maxReplicas": 4}, "replicas": 1})
    )
    (target,) = world.ready_pods("target")
    name = target["metadata"]["name"]
    for _ in range(12):
        world.engines.answers[name] = PoolFact(
            target_pod=name, at=world.cluster.now, eligible_sequences=70
        )
        await world.round()
    assert world.cluster.resource(KEY)["spec"]["draft"]["replicas"] == 3
    assert world.cluster.writes.count(("scale", Ref("SSDDeployment", "demo"))) == 1
    assert len(world.ready_pods("draft")) == 3


async def test_a_deleted_resource_is_forgotten() -> None:
    world = await settled()
    world.cluster.remove("default", Ref("SSDDeployment", "demo"))
    world.catch_up()
    assert await world.run_pass() is None
    assert world.engines.followed == {}
    assert world.cluster.writes == []


async def test_nothing_is_written_in_kube_system() -> None:
    world = World()
    world.cluster.create_resource(("kube-system", "demo"), DEMO)
    world.catch_up()
    assert await world.reconciler.reconcile(("kube-system", "demo")) is None
    assert world.cluster.writes == []


@pytest.mark.parametrize("is_seen", [False, True])
async def test_additions_to_fields_that_we_own_are_removed(*, is_seen: bool) -> None:
    world = await settled()
    before = copy.deepcopy(world.deployment("demo-draft-0")["spec"])
    service = copy.deepcopy(world.cluster.objects["default", Ref("Service", "demo")])
    edited = copy.deepcopy(world.deployment("demo-draft-0"))
    edited["spec"]["paused"] = True
    container = edited["spec"]["template"]["spec"]["containers"][0]
    container["env"].insert(1, {"name": "SSD_DRAFT_LOG_FORMAT", "value": "text"})
    world.cluster.put(edited)
    service["spec"]["selector"]["extra"] = "x"
    world.cluster.put(service)
    if is_seen:
        world.controllers.settle()
    await world.come_to_rest(6)
    assert world.deployment("demo-draft-0")["spec"] == before
    assert ("patch", Ref("Deployment", "demo-draft-0")) in world.cluster.writes
    selector = world.cluster.objects["default", Ref("Service", "demo")]["spec"]["selector"]
    assert "extra" not in selector
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_additions_are_removed_although_a_controller_writes_a_status_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await settled()
    edited = copy.deepcopy(world.deployment("demo-draft-0"))
    edited["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "THEIRS"})
    world.cluster.put(edited)
    patch, written = world.cluster.patch, list[Object]()

    async def patch_later(namespace: str, ref: Ref, changes: Object, part: str = "") -> Object:
        if not written:
            written.append(world.cluster.put(world.deployment("demo-draft-0") | {"status": {}}))
        return await patch(namespace, ref, changes, part)

    monkeypatch.setattr(world.cluster, "patch", patch_later)
    world.cluster.now += 2.0
    world.catch_up()
    await world.run_pass()
    env = world.deployment("demo-draft-0")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "THEIRS" not in [each["name"] for each in env]


async def test_ready_needs_an_endpoint_of_the_service_that_clients_use() -> None:
    world = await settled()
    (found,) = world.cluster.of_kind("EndpointSlice")
    world.cluster.put({**found, "endpoints": []})
    world.catch_up()
    await world.run_pass()
    assert world.cluster.condition(KEY, "Ready") == ("False", "EndpointMissing")
    world.controllers.settle()
    await world.round()
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
