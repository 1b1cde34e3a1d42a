"""Objects that the API server rejects are reported, stop no other object, and are sent again."""

import copy

import pytest
from tests.unit.ssd_operator.world import DEMO, KEY, World, settled

from ssd_operator.api.spec import KIND, Object
from ssd_operator.observe.cluster import BusyError, ForbiddenError
from ssd_operator.observe.facts import PoolFact, Ref
from ssd_operator.observe.pod_state import name_of
from ssd_operator.policy.apply_failures import RETRY_SECONDS
from ssd_operator.runtime.reconcile import FAILING_SECONDS

SCALING: Object = DEMO | {"draft": {**DEMO["draft"], "autoscaling": {"mode": "Internal"}}}


async def test_a_rejected_object_is_reported_and_not_sent_again_until_it_changes() -> None:
    world = World()
    ref = Ref("Deployment", "demo-draft-0")
    world.cluster.refused = {ref: "spec.template: no"}
    await world.come_to_rest(6)
    assert world.cluster.writes.count(("apply", ref)) == 1
    status, reason = world.cluster.condition(KEY, "SpecValid")
    assert (status, reason) == ("False", "PodTemplateInvalid")
    assert len(world.ready_pods("target")) == 1
    world.cluster.refused = {}
    world.cluster.edit_spec(KEY, draft={"image": "localhost/other:1"})
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")
    assert len(world.ready_pods("draft")) == 2


async def test_a_rejected_object_is_sent_again_when_the_live_object_is_gone() -> None:
    world = await settled()
    ref = Ref("Service", "demo-draft-0")
    edited = copy.deepcopy(world.cluster.objects["default", ref])
    edited["metadata"]["labels"]["app.kubernetes.io/name"] = "theirs"
    world.cluster.put(edited)
    world.cluster.refused = {ref: "spec.clusterIP: field is immutable"}
    await world.come_to_rest(4)
    assert world.cluster.condition(KEY, "SpecValid") == ("False", "ObjectRefused")
    world.cluster.refused = {}
    world.cluster.remove("default", ref)
    await world.come_to_rest(4)
    assert ("default", ref) in world.cluster.objects
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")


async def test_a_rejected_object_is_sent_again_after_ten_minutes() -> None:
    world = World()
    ref = Ref("Service", "demo-draft-0")
    world.cluster.refused = {ref: "denied by a webhook"}
    await world.come_to_rest(6)
    world.cluster.refused = {}
    await world.round()
    assert ("default", ref) not in world.cluster.objects
    world.cluster.now += RETRY_SECONDS
    await world.come_to_rest(4)
    assert ("default", ref) in world.cluster.objects
    assert world.cluster.condition(KEY, "SpecValid") == ("True", "Valid")


async def test_a_forbidden_object_is_reported_stops_no_other_and_is_sent_again() -> None:
    world = World()
    ref = Ref("Deployment", "demo-draft-0")
    world.cluster.forbidden = {ref: "exceeded quota: count/deployments.apps=1"}
    world.catch_up()
    await world.run_pass()  # the first status
    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await world.run_pass()
    for _ in range(3):
        await world.round()
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "Forbidden")
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")
    world.cluster.forbidden = {}
    await world.come_to_rest(6)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("True", "Owned")
    assert len(world.ready_pods("draft")) == 2


@pytest.mark.parametrize("kind", ["forbidden", "refused"])
async def test_without_its_service_a_resource_is_not_ready(kind: str) -> None:
    world = World()
    setattr(world.cluster, kind, {Ref("Service", "demo"): "denied by a policy"})
    for _ in range(5):
        await world.round()
    assert len(world.ready_pods("target")) == 1
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    assert "endpoint" not in world.cluster.resource(KEY)["status"]


async def test_a_forbidden_number_of_drafts_stops_no_repair_and_is_reported() -> None:
    world = await settled(SCALING)
    world.cluster.forbidden = {Ref(KIND, "demo"): "denied by a policy on /scale"}
    world.cluster.now += 30.0
    world.engines.answers = {
        name_of(pod): PoolFact(target_pod=name_of(pod), at=world.cluster.now, eligible_sequences=99)
        for pod in world.ready_pods("target")
    }
    world.cluster.remove("default", Ref("Service", "demo-targets"))
    world.catch_up()
    world.cluster.now += 2.0
    with pytest.raises(ForbiddenError, match="/scale"):
        await world.run_pass()
    assert ("scale", Ref(KIND, "demo")) in world.cluster.writes
    assert ("default", Ref("Service", "demo-targets")) in world.cluster.objects
    status = world.cluster.resource(KEY)["status"]
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "Forbidden")
    assert "lastScaleTime" not in status["draft"]


async def test_the_status_is_written_although_a_draft_may_not_be_marked() -> None:
    world = await settled()
    world.cluster.forbidden = {
        Ref("Pod", name_of(pod)): "denied by a policy on pods" for pod in world.ready_pods("draft")
    }
    world.cluster.edit_spec(KEY, draft={"replicas": 1})
    for _ in range(3):
        await world.round()
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "Forbidden")
    (target,) = world.ready_pods("target")
    world.controllers.unwell.add(name_of(target))
    world.controllers.kill(target)
    for _ in range(3):
        await world.round()
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    assert world.cluster.resource(KEY)["status"]["observedGeneration"] == 2


async def test_a_webhook_that_does_not_answer_is_reported_after_a_while() -> None:
    world = World()
    world.cluster.refusals = {"Service": BusyError("500 failed calling webhook")}
    world.catch_up()
    await world.run_pass()  # the first status
    with pytest.raises(BusyError, match="webhook"):
        await world.run_pass()
    assert world.cluster.condition(KEY, "Ready")[0] == "False"
    assert world.cluster.condition(KEY, "ResourcesOwned")[0] == "True"  # it may pass
    world.cluster.now += FAILING_SECONDS
    with pytest.raises(BusyError, match="webhook"):
        await world.run_pass()
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("False", "Forbidden")
    world.cluster.refusals = {}
    await world.come_to_rest(8)
    assert world.cluster.condition(KEY, "ResourcesOwned") == ("True", "Owned")
    assert world.cluster.condition(KEY, "Ready") == ("True", "Serving")


async def test_a_preflight_pod_that_was_edited_stops_no_pass() -> None:
    world = await settled()
    world.cluster.edit_spec(KEY, target={"image": "localhost/other:1"})
    await world.round()
    (pod,) = world.controllers.preflights()
    edited = copy.deepcopy(pod)
    edited["metadata"]["annotations"] = {}
    edited["status"] = {"phase": "Succeeded"}
    world.cluster.put(edited)
    await world.come_to_rest(8)
    assert world.cluster.condition(KEY, "Progressing") == ("True", "UpToDate")
