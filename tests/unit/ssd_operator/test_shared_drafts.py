"""Stories of a pool of drafts and of the resources that refer to it, with a cluster in memory."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.unit.ssd_operator.api.test_schema import POOL_PARTS, check
from tests.unit.ssd_operator.resources import CORPUS, ROOT, parsed, without_hashes
from tests.unit.ssd_operator.resources import children as children_of
from tests.unit.ssd_operator.world import TARGET, World, settled

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.spec import KIND, POOL_KIND, Object, Resource
from ssd_operator.children.objects import COMPONENT_LABEL, NAME_LABEL
from ssd_operator.observe.cluster import (
    ClusterError,
    ForbiddenError,
    Key,
    Ref,
    RefusedError,
    ref_of,
)
from ssd_operator.observe.pod_state import condition_in, labels_of, name_of, revision_of
from ssd_operator.observe.snapshot import TargetReport

SAMPLE = ROOT / "charts" / "ssd" / "samples" / "pool" / "demo-cpu.yaml"
POOL, CODE, CHAT = yaml.safe_load_all(SAMPLE.read_text())
POOL_KEY, CODE_KEY, CHAT_KEY = (("default", name) for name in ("shared-pool", "code", "chat"))
DRAFTS = "shared-pool-draft"
SCALING = {"minReplicas": 1, "maxReplicas": 8, "scaleDownStabilizationSeconds": 0}


def resource(document: Object, **spec: Any) -> Resource:
    return parsed(document | {"spec": document["spec"] | spec})


def children(found: Resource) -> dict[str, Object]:
    return {str(ref_of(each)): each for each in children_of(found)}


def pod_of(found: Resource, deployment: str) -> Object:
    template: Object = children(found)[f"Deployment/{deployment}"]["spec"]["template"]
    return template


def variables(pod: Object) -> Object:
    return {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}


def test_a_pool_has_drafts_alone_and_who_refers_to_it_has_none() -> None:
    assert set(children(resource(POOL))) == {
        "ServiceAccount/shared-pool-draft",
        "NetworkPolicy/shared-pool-draft",
        "Service/shared-pool-draft",
        "Deployment/shared-pool-draft",
        "PodDisruptionBudget/shared-pool-draft",
    }
    assert not [name for name in children(resource(CODE)) if "draft" in name]


def test_targets_are_admitted_by_their_label_and_call_the_service_of_the_pool() -> None:
    target = pod_of(resource(CODE), "code-target-0")
    assert variables(target)["SSD_TARGET_DRAFTS"] == "shared-pool-draft:50052"
    policy = children(resource(POOL))["NetworkPolicy/shared-pool-draft"]["spec"]
    (links,) = (each for each in policy["ingress"] if each["ports"][0]["port"] == 50052)
    admitted = links["from"][0]["podSelector"]["matchLabels"]
    assert admitted.items() <= target["metadata"]["labels"].items()


def test_certificates_of_a_pool_have_names_of_their_own() -> None:
    tls = {"mode": "Mutual", "draftSecretName": "drafts"}
    draft = variables(pod_of(resource(POOL, security={"tls": tls}), "shared-pool-draft"))
    assert draft["SSD_DRAFT_CALLER_NAMES"] == "spiffe://ssd/ns/default/sa/shared-pool-target"
    # The pool names the certificate of the drafts, so who refers to it does not.
    secured = resource(CODE, security={"tls": {"mode": "Mutual", "targetSecretName": "targets"}})
    target = variables(pod_of(secured, "code-target-0"))
    assert target["SSD_TARGET_LINK_SERVER_NAME"] == "shared-pool-draft.default.svc"


def test_the_drafts_of_a_pool_are_those_of_a_resource_but_for_names() -> None:
    pool = yaml.safe_load((CORPUS / "pool.yaml").read_text())
    fields, own = dict(pool["spec"]), "everything-shared-pool"
    security = fields.pop("security")
    spec = {
        "accelerator": fields.pop("device"),
        "target": {"source": fields["source"]},
        "security": security | {"tls": security["tls"] | {"targetSecretName": "target-tls"}},
    }
    # Both kinds have these fields in the same place; the others of a pool are in spec.draft.
    for name in ("paused", "model", "speculation", "podTemplate", "modelCache"):
        spec[name] = fields.pop(name)
    spec["draft"] = fields | {"sharing": "Pool"}
    same = parsed(pool | {"kind": KIND, "metadata": {"name": own}, "spec": spec})
    made, targets = children(parsed(pool)), f'"{COMPONENT_LABEL}": "target"'
    assert made[f"Deployment/{own}-draft"]["spec"].pop("minReadySeconds") == 20
    for ref, each in children(same).items():
        if labels_of(each)[COMPONENT_LABEL] == "draft":
            text = without_hashes(each)
            for before, after in (
                (f'"{KIND}", "name": "{own}"', f'"{POOL_KIND}", "name": "everything-shared"'),
                (f'/instance": "{own}"', '/instance": "everything-shared"'),
                (f'/name": "{own}", {targets}', f'/pool": "{own}", {targets}'),
            ):
                text = text.replace(before, after)
            assert without_hashes(made.pop(ref)) == text
    assert not made


class Shared(World):
    """A pool and the resources that refer to it."""

    def __init__(self, *documents: Object) -> None:
        super().__init__(*documents)
        self.need: dict[str, float] = {}
        """Running sequences that speculate, by resource."""
        self.fitting: dict[str, str] = {}
        """The one revision of drafts that fits the targets of a resource; of others all do."""

    async def round(self) -> bool:
        self.cluster.now += 10.0
        self.catch_up()
        for pod in self.ready_pods("target"):
            name = labels_of(pod)[NAME_LABEL]
            links = tuple(self.link(name, draft) for draft in self.ready_pods("draft"))
            status = PoolStatus(links=links, eligible_sequences=self.need.get(name, 0.0))
            self.engines.answers[name_of(pod)] = TargetReport(status, self.cluster.now)
        for key in self.cache.resources:
            await self.reconciler.reconcile(key)
        has_drained = self.engines.finish()
        has_moved = self.controllers.settle()
        self.catch_up()
        return has_drained or has_moved

    def link(self, name: str, draft: Object) -> LinkStatus:
        """The link of a target of a resource to a draft."""
        fits = self.fitting.get(name, revision_of(draft)) == revision_of(draft)
        more: dict[str, Any] = {"state": "active", "sessions": 2, "transport": "tcp"}
        if not fits:
            more = {"state": "refused", "reason": "lookahead: this draft has 4"}
        return LinkStatus(address=name_of(draft), draft_pod=name_of(draft), **more)

    def revisions(self) -> set[str]:
        """Revisions of the drafts that are ready."""
        return set(map(revision_of, self.ready_pods("draft")))


POOL_REF, CODE_REF, CHAT_REF = Ref(POOL_KIND, "shared"), Ref(KIND, "code"), Ref(KIND, "chat")


def scaled(**scaling: Any) -> Object:
    more = {"autoscaling": SCALING | scaling, "sequencesPerReplica": 10}
    found: Object = POOL | {"spec": POOL["spec"] | more}
    return found


async def test_both_resources_speculate_with_the_drafts_of_the_pool() -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    for ref in (CODE_REF, CHAT_REF):
        assert world.condition("SpeculationActive", ref) == ("True", "Active")
        assert world.condition("DraftReady", ref) == ("True", "AllReady")
        draft = world[ref]["status"]["draft"]
        assert (draft["pool"], draft["summary"]) == ("shared", "2/2")
        assert not condition_in(world[ref]["status"], "DraftCapacity")
    status = world[POOL_REF]["status"]
    check(status, POOL_PARTS["status"])
    assert status["deployments"] == ["chat", "code"]
    assert status["sessions"] == {"open": 8, "capacity": 64}
    assert status["target"] == {"readyReplicas": 2, "linkedReplicas": 2, "summary": "2/2"}
    assert world.condition("Ready", POOL_REF) == ("True", "AllReady")
    assert {each["target"][:4] for each in status["links"]} == {"code", "chat"}
    num_writes = len(world.cluster.writes)
    await world.rounds(2)
    assert len(world.cluster.writes) == num_writes


@pytest.mark.parametrize("error", [ForbiddenError("denied by a policy"), RefusedError("no")])
async def test_a_target_that_may_not_refer_to_a_pool_keeps_its_own_drafts(
    error: ClusterError,
) -> None:
    world = await settled()
    own = world.ready_pods("draft")
    world.put(POOL)
    world.cluster.write_faults = {TARGET: error}
    world.edit_spec(draft={"source": None, "poolRef": {"name": "shared"}})
    await world.rounds(8)
    assert world.ready_pods("draft") == own
    assert world.written("Service", "delete") == []
    world.cluster.write_faults = {}
    world.cluster.now += 60.0
    await world.rounds(8)
    assert not [ref for ref in world.children() if "draft" in ref.name]


def progress(world: Shared) -> str:
    return world.condition("Progressing", POOL_REF)[1]


async def changed() -> tuple[Shared, str, str]:
    """A pool that makes drafts which fit no target; its former and its new revision."""
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    (old,) = world.revisions()
    world.fitting = {"code": old, "chat": old}
    world.edit_spec(POOL_REF, speculation={"lookahead": 4})
    await world.rounds(8)
    (new,) = world.revisions() - {old}
    return world, old, new


async def test_drafts_of_a_pool_that_fit_no_target_replace_one_draft_alone() -> None:
    world, old, new = await changed()
    assert world.revisions() == {old, new}
    assert world.condition("Progressing", POOL_REF) == ("False", "DraftsRefused")
    assert world.messages("DraftsRefused")[0].startswith(
        "1 of 2 drafts are new, and the others stay, because chat-target-0"
    )
    for ref in (CODE_REF, CHAT_REF):
        assert world.condition("SpeculationActive", ref) == ("True", "Active")
    world.edit_spec(POOL_REF, speculation={"lookahead": 6})
    await world.rounds(6)
    assert (world.revisions(), progress(world)) == ({old}, "UpToDate")


class Cut(Shared):
    """The targets of ``chat`` cannot connect to any draft."""

    def link(self, name: str, draft: Object) -> LinkStatus:
        made = super().link(name, draft)
        return replace(made, state="lost", reason="no valid token") if name == "chat" else made


async def test_a_target_that_cannot_connect_stops_the_rollout_of_a_pool_for_a_minute() -> None:
    world = Cut(POOL, CODE, CHAT)
    await world.rounds(3)
    world.edit_spec(POOL_REF, speculation={"lookahead": 4})
    await world.rounds(3)
    assert len(world.revisions()) == 2
    assert progress(world) == "RollingOut"
    message = condition_in(world[POOL_REF]["status"], "Progressing")["message"]
    assert "chat-target-0" in message
    assert message.endswith("has a link to a new one.")
    await world.rounds(6)
    assert (len(world.revisions()), progress(world)) == (1, "UpToDate")
    world.edit_spec(POOL_REF, replicas=3)
    await world.rounds(3)
    assert len(world.ready_pods("draft")) == 3


async def test_the_rollout_of_a_pool_waits_for_a_target_whose_resource_has_left_it() -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    (old,) = world.revisions()
    world.fitting = {"chat": old}
    # The resource is paused, so its target stays.
    world.edit_spec(CHAT_REF, paused=True, draft={"poolRef": {"name": "other"}})
    world.edit_spec(POOL_REF, speculation={"lookahead": 4})
    await world.rounds(10)
    assert len(world.revisions()) == 2
    assert progress(world) == "DraftsRefused"
    world.edit_spec(CHAT_REF, paused=False)
    await world.rounds(16)
    assert (world.revisions() & {old}, progress(world)) == (set(), "UpToDate")


async def test_an_operator_that_restarts_keeps_the_rollout_of_a_pool_stopped() -> None:
    world, old, new = await changed()
    world.restart()
    # The first passes have no answer of a target.
    for _ in range(2):
        world.catch_up()
        await world.reconciler.reconcile(POOL_KEY)
        world.controllers.settle()
    assert world[Ref("Deployment", DRAFTS)]["spec"]["paused"]
    await world.rounds(6)
    assert (world.revisions(), progress(world)) == ({old, new}, "DraftsRefused")
    world.fitting = {"code": new, "chat": new}
    await world.rounds(8)
    assert (world.revisions(), progress(world)) == ({new}, "UpToDate")


async def test_the_drafts_of_a_pool_follow_when_the_last_target_fits() -> None:
    world, old, new = await changed()
    world.fitting["code"] = new
    await world.rounds(6)
    assert (world.revisions(), progress(world)) == ({old, new}, "DraftsRefused")
    assert world.condition("SpeculationActive", CODE_REF) == ("True", "Active")
    world.fitting["chat"] = new
    await world.rounds(8)
    assert (world.revisions(), progress(world)) == ({new}, "UpToDate")


async def test_a_pool_keeps_its_number_of_drafts_while_targets_refuse_new_ones() -> None:
    world, old, new = await changed()
    world.edit_spec(POOL_REF, replicas=1)
    await world.rounds(8)
    assert (world.revisions(), progress(world)) == ({old, new}, "DraftsRefused")
    assert world[Ref("Deployment", DRAFTS)]["spec"]["replicas"] == 2
    world.edit_spec(POOL_REF, speculation={"lookahead": 6})
    await world.rounds(12)
    assert (world.revisions(), progress(world)) == ({old}, "UpToDate")
    assert len(world.ready_pods("draft")) == 1


async def test_a_change_of_a_pool_that_cannot_run_leaves_the_other_drafts() -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    (old,) = world.revisions()
    world.controllers.broken.add(revision_of(pod_of(resource(POOL, sequencesPerReplica=9), DRAFTS)))
    world.edit_spec(POOL_REF, sequencesPerReplica=9)
    await world.rounds(6)
    assert world.revisions() == {old}
    assert world.condition("SpeculationActive", CODE_REF) == ("True", "Active")
    assert world.condition("Ready", POOL_REF) == ("False", "Loading")
    assert world[POOL_REF]["status"]["draft"]["summary"] == "1/2"
    world.edit_spec(POOL_REF, sequencesPerReplica=32)
    await world.rounds(6)
    assert (world.revisions(), progress(world)) == ({old}, "UpToDate")


async def test_a_pool_is_scaled_by_the_sum_of_the_need_of_all() -> None:
    world = Shared(scaled(), CODE, CHAT)
    world.need = {"code": 14.0, "chat": 17.0}
    await world.rounds(6)
    # 31 sequences, 10 a draft, 80 % of them used: 3.9 drafts.
    assert world[POOL_REF]["status"]["draft"]["summary"] == "4/4"
    assert world.condition("ScalingActive", POOL_REF) == ("True", "Internal")
    world.need = {"code": 1.0, "chat": 2.0}
    await world.rounds(40)
    assert world[POOL_REF]["status"]["draft"]["summary"] == "1/1"


async def test_a_target_that_no_draft_fits_does_not_scale_a_pool_to_its_maximum() -> None:
    world = Shared(scaled(), CODE, CHAT)
    world.need, world.fitting = {"code": 4.0, "chat": 100.0}, {"chat": "another"}
    await world.rounds(40)
    # Half a draft for 4 sequences, and one for the target that is refused.
    assert world[POOL_REF]["status"]["draft"]["summary"] == "2/2"


async def test_a_pool_does_not_shrink_while_a_resource_has_no_ready_target() -> None:
    world = Shared(scaled(), CODE)
    world.need = {"code": 31.0}
    await world.rounds(6)
    assert world[POOL_REF]["status"]["draft"]["summary"] == "4/4"
    world.put(CHAT | {"spec": CHAT["spec"] | {"paused": True}})
    world.need = {"code": 1.0}
    await world.rounds(20)
    assert world[POOL_REF]["status"]["draft"]["summary"] == "4/4"
    world.need = {"code": 47.0}
    await world.rounds(10)
    assert world[POOL_REF]["status"]["draft"]["summary"] == "6/6"


async def test_a_pool_without_a_ready_target_misses_no_samples() -> None:
    world = Shared(scaled(), CHAT | {"spec": CHAT["spec"] | {"paused": True}})
    await world.rounds(6)
    assert world.condition("Ready", POOL_REF)[0] == "True"
    assert world.condition("ScalingActive", POOL_REF) == ("True", "Internal")


@pytest.mark.parametrize(
    "draft",
    [{"poolRef": {"name": "other"}}, {"poolRef": None, "source": {"uri": "demo://draft"}}],
)
async def test_a_pool_counts_a_target_whose_resource_has_left_it_until_the_target_is_replaced(
    draft: Object,
) -> None:
    world = Shared(scaled(), CHAT)
    world.need = {"chat": 31.0}
    await world.rounds(6)
    world.edit_spec(CHAT_REF, paused=True, draft=draft)
    await world.rounds(20)
    status = world[POOL_REF]["status"]
    assert (status["draft"]["summary"], status["deployments"]) == ("4/4", [])
    assert status["sessions"]["open"] == 8
    world.edit_spec(CHAT_REF, paused=False)
    await world.rounds(40)
    status = world[POOL_REF]["status"]
    assert (status["draft"]["summary"], status["target"]["summary"]) == ("1/1", "0/0")


async def test_after_a_pause_a_pool_shrinks_only_after_a_full_window() -> None:
    world = Shared(scaled(scaleDownStabilizationSeconds=300), CODE)
    world.need = {"code": 60.0}
    await world.rounds(40)
    assert world[POOL_REF]["status"]["draft"]["summary"] == "8/8"
    world.edit_spec(POOL_REF, paused=True)
    await world.rounds(40)
    world.need = {"code": 8.0}
    world.edit_spec(POOL_REF, paused=False)
    await world.rounds(30)
    assert world[POOL_REF]["spec"]["replicas"] == 8
    await world.rounds(3)
    assert world[POOL_REF]["spec"]["replicas"] == 6


async def test_a_pool_to_which_nothing_refers_has_its_minimum() -> None:
    world = Shared(scaled(minReplicas=1))
    await world.rounds(20)
    status = world[POOL_REF]["status"]
    assert status["draft"]["desiredReplicas"] == 1
    assert status["deployments"] == []
    assert (status["draft"]["summary"], status["target"]["summary"]) == ("1/1", "0/0")


@pytest.mark.parametrize("is_gone", [True, False])
async def test_without_a_valid_pool_targets_serve_and_the_status_has_the_reason(
    *, is_gone: bool
) -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    if is_gone:
        world.remove(POOL_REF)
    else:
        world.edit_spec(POOL_REF, replicas=-1)
    await world.rounds(6)
    # The pods of an invalid pool stay.
    links = ("False", "PoolMissing") if is_gone else ("True", "Active")
    for ref in (CODE_REF, CHAT_REF):
        assert world.condition("DraftReady", ref) == ("False", "PoolMissing")
        assert world.condition("SpeculationActive", ref) == links
        assert world.condition("Ready", ref) == ("True", "Serving")
    if is_gone:
        world.put(POOL)
    else:
        world.edit_spec(POOL_REF, replicas=2)
    await world.rounds(6)
    assert world.condition("DraftReady", CODE_REF) == ("True", "AllReady")
    assert world.condition("SpeculationActive", CODE_REF) == ("True", "Active")


async def test_a_resource_may_have_the_name_of_a_pool() -> None:
    world = Shared(POOL, CODE, CODE | {"metadata": {"name": "shared"}})
    await world.rounds(6)
    for ref in (POOL_REF, Ref(KIND, "shared")):
        assert world.condition("Ready", ref)[0] == "True"
        assert world.condition("ResourcesOwned", ref) == ("True", "Owned")


async def test_an_older_resource_with_the_prefix_of_a_pool_keeps_its_passes() -> None:
    older = CODE | {"metadata": {"name": "shared-pool"}}
    older |= {"spec": CODE["spec"] | {"draft": {"source": {"uri": "demo://draft"}}}}
    world = Shared(older, CHAT)
    await world.rounds(6)
    world.put(POOL)
    await world.rounds(6)
    found = world.cache.resource(POOL_KEY)
    assert found is not None
    assert found["kind"] == KIND
    assert world.condition("DraftReady", CHAT_REF) == ("False", "PoolMissing")


def test_a_resource_of_pooled_drafts_may_refer_to_a_pool() -> None:
    draft = {"poolRef": {"name": "shared"}, "sharing": "Pool"}
    assert not [name for name in children(resource(CODE, draft=draft)) if "draft" in name]


@pytest.mark.parametrize(
    ("changed", "woken"),
    [(POOL_REF, {POOL_KEY, CODE_KEY, CHAT_KEY}), (CODE_REF, {POOL_KEY, CODE_KEY})],
)
async def test_a_change_wakes_those_that_share_drafts(changed: Ref, woken: set[Key]) -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds(6)
    world.woken.clear()
    world.remove(changed)
    world.catch_up()
    assert world.woken == woken


async def test_another_reference_wakes_the_former_pool() -> None:
    world = Shared(POOL, CODE)
    await world.rounds(6)
    world.woken.clear()
    world.edit_spec(CODE_REF, draft={"poolRef": {"name": "other"}})
    world.catch_up()
    assert {POOL_KEY, CODE_KEY, ("default", "other-pool")} <= world.woken
