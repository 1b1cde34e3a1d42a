"""Stories of a pool of drafts and of the resources that refer to it, with a cluster in memory."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from tests.unit.ssd_operator.api.test_schema import POOL_PARTS, check
from tests.unit.ssd_operator.controllers import Controllers
from tests.unit.ssd_operator.memory_cluster import MemoryCluster, is_watched
from tests.unit.ssd_operator.resources import ROOT, SETTINGS, UID, replicas_of

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.api.parse import parse
from ssd_operator.api.spec import KIND, POOL_KIND, Object, Resource
from ssd_operator.children.manifests import wanted
from ssd_operator.children.objects import WATCHED_KINDS
from ssd_operator.observe.cluster import Key, Ref
from ssd_operator.observe.object_cache import ObjectCache
from ssd_operator.observe.pod_state import Address, condition_in, is_ready, labels_of, name_of
from ssd_operator.observe.snapshot import Report
from ssd_operator.policy.drain import Drain
from ssd_operator.runtime.reconcile import Reconciler

SAMPLE = ROOT / "charts" / "ssd" / "samples" / "pool" / "demo-cpu.yaml"
POOL, CODE, CHAT = yaml.safe_load_all(SAMPLE.read_text())
POOL_KEY, CODE_KEY, CHAT_KEY = (("default", name) for name in ("shared-pool", "code", "chat"))
SCALING = {"minReplicas": 1, "maxReplicas": 8, "scaleDownStabilizationSeconds": 0}


def resource(document: Object, **spec: Any) -> Resource:
    about = document["metadata"] | {"namespace": "default", "uid": UID, "generation": 1}
    return parse(document | {"metadata": about, "spec": document["spec"] | spec})


def children(found: Resource) -> dict[str, Object]:
    made = wanted(found, SETTINGS, replicas_of(found))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in made}


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
    secured = resource(CODE, security={"tls": tls | {"targetSecretName": "targets"}})
    target = variables(pod_of(secured, "code-target-0"))
    assert target["SSD_TARGET_LINK_SERVER_NAME"] == "shared-pool-draft.default.svc"


def test_a_draft_of_a_pool_is_that_of_a_resource_but_for_its_name() -> None:
    own = resource(CODE, draft={"source": {"uri": "demo://draft"}, "sharing": "Pool"})
    pods = pod_of(own, "code-draft"), pod_of(resource(POOL), "shared-pool-draft")
    first, second = ([each["spec"]["containers"], each["spec"]["volumes"]] for each in pods)
    assert first == second


@dataclass
class KeyedEngines:
    """``Engines`` of several resources; each target reports what a test sets."""

    need: dict[str, float] = field(default_factory=dict)
    """Running sequences that speculate, by resource."""
    drafts: list[str] = field(default_factory=list)
    """Linked to each target."""
    now: float = 0.0
    _followed: dict[Key, set[str]] = field(default_factory=dict)
    _drains: dict[str, str] = field(default_factory=dict)

    def state(self, key: Key) -> tuple[Mapping[str, Report], Mapping[str, str]]:
        links = tuple(
            LinkStatus(address=each, draft_pod=each, state="active", transport="tcp", sessions=2)
            for each in self.drafts
        )
        status = PoolStatus(links=links, speculative_sequences=self.need.get(key[1], 0.0))
        pools = dict.fromkeys(self._followed.get(key, ()), Report(status, self.now))
        return pools, dict(self._drains)

    def follow(self, key: Key, targets: Mapping[str, Address], pods: AbstractSet[str]) -> None:
        self._followed[key] = set(targets)

    def drain(self, key: Key, wanted: Iterable[Drain]) -> None:
        self._drains |= {each.pod: "Drained" for each in wanted if each.address is not None}


class Shared:
    """A pool, two resources that refer to it, and an operator."""

    def __init__(self, *documents: Object) -> None:
        self.cluster, self.engines = MemoryCluster(), KeyedEngines()
        self.controllers = Controllers(self.cluster)
        self.woken: set[Key] = set()
        self.cache = ObjectCache(lambda key, **_: self.woken.add(key))
        for kind in WATCHED_KINDS:
            self.cache.replace(kind, "", [], 0)
        for document in documents:
            about = document["metadata"] | {"namespace": "default"}
            self.cluster.put(document | {"metadata": about})
        self._num_seen = 0
        self._reconciler = Reconciler(
            self.cluster, self.cache, self.engines, SETTINGS, lambda: self.cluster.now
        )

    async def rounds(self, number: int = 6) -> None:
        for _ in range(number):
            self.cluster.now += 10.0
            self.catch_up()
            pods = [pod for pod in self.cluster.of_kind("Pod") if is_ready(pod)]
            drafts = [pod for pod in pods if labels_of(pod)["ssd.dev/component"] == "draft"]
            self.engines.now, self.engines.drafts = self.cluster.now, list(map(name_of, drafts))
            for key in self.cache.resources:
                await self._reconciler.reconcile(key)
            self.controllers.settle()
        self.catch_up()

    def catch_up(self) -> None:
        new, self._num_seen = self.cluster.log[self._num_seen :], len(self.cluster.log)
        for thing, is_deleted in new:
            is_gone = is_deleted or not is_watched(thing)
            (self.cache.mark_deleted if is_gone else self.cache.put)(thing)

    def status(self, ref: Ref) -> Object:
        found: Object = self.cluster.objects["default", ref]["status"]
        return found

    def condition(self, ref: Ref, kind: str) -> tuple[str, str]:
        found = condition_in(self.status(ref), kind)
        return found["status"], found["reason"]


POOL_REF, CODE_REF, CHAT_REF = Ref(POOL_KIND, "shared"), Ref(KIND, "code"), Ref(KIND, "chat")


def scaled(**scaling: Any) -> Object:
    more = {"autoscaling": SCALING | scaling, "sequencesPerReplica": 10}
    found: Object = POOL | {"spec": POOL["spec"] | more}
    return found


async def test_both_resources_speculate_with_the_drafts_of_the_pool() -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds()
    for ref in (CODE_REF, CHAT_REF):
        assert world.condition(ref, "SpeculationActive") == ("True", "Active")
        assert world.condition(ref, "DraftReady") == ("True", "AllReady")
        draft = world.status(ref)["draft"]
        assert (draft["pool"], draft["summary"]) == ("shared", "2/2")
        assert not condition_in(world.status(ref), "DraftCapacity")
    status = world.status(POOL_REF)
    check(status, POOL_PARTS["status"])
    assert status["deployments"] == ["chat", "code"]
    assert status["sessions"] == {"open": 8, "capacity": 64}
    assert world.condition(POOL_REF, "Ready") == ("True", "AllReady")
    assert {each["target"][:4] for each in status["links"]} == {"code", "chat"}
    num_writes = len(world.cluster.writes)
    await world.rounds(2)
    assert len(world.cluster.writes) == num_writes


async def test_a_pool_is_scaled_by_the_sum_of_the_need_of_all() -> None:
    world = Shared(scaled(), CODE, CHAT)
    world.engines.need = {"code": 14.0, "chat": 17.0}
    await world.rounds()
    # 31 sequences, 10 a draft, 80 % of them used: 3.9 drafts.
    assert world.status(POOL_REF)["draft"]["summary"] == "4/4"
    assert world.condition(POOL_REF, "ScalingActive") == ("True", "Internal")
    world.engines.need = {"code": 1.0, "chat": 2.0}
    await world.rounds(40)
    assert world.status(POOL_REF)["draft"]["summary"] == "1/1"


async def test_a_pool_does_not_shrink_while_a_resource_has_no_ready_target() -> None:
    world = Shared(scaled(), CODE)
    world.engines.need = {"code": 31.0}
    await world.rounds()
    assert world.status(POOL_REF)["draft"]["summary"] == "4/4"
    broken = CHAT | {"spec": CHAT["spec"] | {"paused": True}}
    world.cluster.put(broken | {"metadata": CHAT["metadata"] | {"namespace": "default"}})
    world.engines.need = {"code": 1.0}
    await world.rounds(20)
    assert world.status(POOL_REF)["draft"]["summary"] == "4/4"
    world.engines.need = {"code": 47.0}
    await world.rounds(10)
    assert world.status(POOL_REF)["draft"]["summary"] == "6/6"


async def test_a_pool_to_which_nothing_refers_has_its_minimum() -> None:
    world = Shared(scaled(minReplicas=1))
    await world.rounds(20)
    assert world.status(POOL_REF)["draft"]["desiredReplicas"] == 1
    assert world.status(POOL_REF)["deployments"] == []


async def test_without_the_pool_targets_serve_and_the_status_has_the_reason() -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds()
    world.cluster.remove("default", POOL_REF)
    await world.rounds()
    for ref in (CODE_REF, CHAT_REF):
        assert world.condition(ref, "DraftReady") == ("False", "PoolMissing")
        assert world.condition(ref, "SpeculationActive") == ("False", "PoolMissing")
        assert world.condition(ref, "Ready") == ("True", "Serving")
    world.cluster.put(POOL | {"metadata": {"name": "shared", "namespace": "default"}})
    await world.rounds()
    assert world.condition(CODE_REF, "SpeculationActive") == ("True", "Active")


async def test_a_resource_may_have_the_name_of_a_pool() -> None:
    world = Shared(POOL, CODE, CODE | {"metadata": {"name": "shared"}})
    await world.rounds()
    for ref in (POOL_REF, Ref(KIND, "shared")):
        assert world.condition(ref, "Ready")[0] == "True"
        assert world.condition(ref, "ResourcesOwned") == ("True", "Owned")


async def test_an_older_resource_with_the_prefix_of_a_pool_keeps_its_passes() -> None:
    older = CODE | {"metadata": {"name": "shared-pool"}}
    older |= {"spec": CODE["spec"] | {"draft": {"source": {"uri": "demo://draft"}}}}
    world = Shared(older, CHAT)
    await world.rounds()
    world.cluster.put(POOL | {"metadata": {"name": "shared", "namespace": "default"}})
    await world.rounds()
    found = world.cache.resource(POOL_KEY)
    assert found is not None
    assert found["kind"] == KIND
    assert world.condition(CHAT_REF, "DraftReady") == ("False", "PoolMissing")


def test_a_resource_of_pooled_drafts_may_refer_to_a_pool() -> None:
    draft = {"poolRef": {"name": "shared"}, "sharing": "Pool"}
    assert not [name for name in children(resource(CODE, draft=draft)) if "draft" in name]


@pytest.mark.parametrize(
    ("changed", "woken"),
    [(POOL_REF, {POOL_KEY, CODE_KEY, CHAT_KEY}), (CODE_REF, {POOL_KEY, CODE_KEY})],
)
async def test_a_change_wakes_those_that_share_drafts(changed: Ref, woken: set[Key]) -> None:
    world = Shared(POOL, CODE, CHAT)
    await world.rounds()
    world.woken.clear()
    world.cluster.remove("default", changed)
    world.catch_up()
    assert world.woken == woken


async def test_another_reference_wakes_the_former_pool() -> None:
    world = Shared(POOL, CODE)
    await world.rounds()
    world.woken.clear()
    world.cluster.edit_spec(CODE_KEY, draft={"poolRef": {"name": "other"}})
    world.catch_up()
    assert {POOL_KEY, CODE_KEY, ("default", "other-pool")} <= world.woken
