"""Targets are not replaced by ones that gateways cannot call: stories with a cluster in memory."""

import pytest
from tests.unit.ssd_operator.resources import SETTINGS, deployments, parsed
from tests.unit.ssd_operator.world import RESOURCE, SERVICE, World, settled

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Ref
from ssd_operator.observe.pod_state import name_of, revision_of

GATED: Object = {"gateway": {"enabled": True}}
TLS = {"mode": "Server", "targetSecretName": "target-tls", "draftSecretName": "draft-tls"}
MUTUAL: Object = {
    "security": {"tls": TLS | {"mode": "Mutual"}},
    "gateway": {"enabled": True, "tlsSecretName": "absent"},
}
TARGET_POLICY = Ref("NetworkPolicy", "demo-target")
DONE = ("True", "UpToDate")


def new_revision(world: World) -> str:
    """Revision of the gateways that the resource specifies."""
    (gateways,) = deployments(parsed(world[RESOURCE]), "gateway")
    return revision_of(gateways)


async def with_new_gateways_down(num_cells: int) -> World:
    """Callers need certificates from now on, and no new gateway is ready."""
    world = await settled(**GATED, target={"replicas": num_cells})
    world.edit_spec(**MUTUAL)
    world.controllers.broken.add(new_revision(world))
    await world.rounds(6)
    return world


def start_gateways(world: World, *others: Object) -> None:
    """The containers of gateways that are not ready run, beside these other ones."""
    for pod in world.cluster.of_kind("Pod"):
        if revision_of(pod) == new_revision(world):
            with world.edited(Ref("Pod", name_of(pod))) as found:
                own = {"name": "gateway", "started": not others}
                found["status"]["containerStatuses"] = [own, *others]


def cells_with_certificates(world: World) -> list[str]:
    """Cells whose ready target needs the certificate of its callers."""
    return [
        pod["metadata"]["labels"]["ssd.dev/cell"]
        for pod in world.ready_pods("target")
        if "SSD_TARGET_TLS_CLIENT_CA"
        in {each["name"] for each in pod["spec"]["containers"][0]["env"]}
    ]


@pytest.mark.parametrize("num_cells", [1, 2])
async def test_targets_keep_serving_old_gateways_while_no_new_one_can_start(num_cells: int) -> None:
    world = await with_new_gateways_down(num_cells)
    assert cells_with_certificates(world) == []
    assert len(world.ready_pods("target")) == num_cells
    assert world.condition("Progressing") == ("True", "RollingOut")
    (waiting,) = (
        name_of(pod)
        for pod in world.cluster.of_kind("Pod")
        if revision_of(pod) == new_revision(world)
    )
    cause = f"waits until a new gateway has started: {waiting} is being created."
    assert world.message("Progressing").endswith(cause)
    world.cluster.writes.clear()
    await world.rounds(2)
    assert world.cluster.writes == []
    world.controllers.broken.clear()
    await world.rounds(6)
    assert cells_with_certificates(world) == [*map(str, range(num_cells))]
    assert world.condition("Progressing") == DONE


async def test_the_only_target_is_replaced_once_a_new_gateway_has_started() -> None:
    world = await with_new_gateways_down(1)
    start_gateways(world)
    await world.rounds(4)
    assert cells_with_certificates(world) == ["0"]


async def test_a_sidecar_that_runs_is_no_gateway_that_has_started() -> None:
    world = await with_new_gateways_down(1)
    start_gateways(world, {"name": "proxy", "started": True})
    await world.rounds(4)
    assert cells_with_certificates(world) == []


async def test_a_gateway_that_needs_a_target_which_loads_has_not_failed() -> None:
    world = await with_new_gateways_down(3)
    revisions = map(revision_of, deployments(parsed(world[RESOURCE]), "target"))
    world.controllers.broken.update(revisions)
    start_gateways(world)
    await world.rounds(4)
    assert len(world.ready_pods("target")) == 2
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    with world.edited(Ref("Deployment", "demo-gateway")) as found:
        found["status"]["conditions"] = [late | {"message": "timed out"}]
    world.cluster.now += 120
    await world.next_pass()
    assert world.condition("Progressing") == ("True", "RollingOut")


async def test_the_last_cell_serves_old_gateways_until_a_new_one_is_ready() -> None:
    world = await with_new_gateways_down(2)
    start_gateways(world)
    await world.rounds(4)
    assert cells_with_certificates(world) == ["0"]
    assert len(world.ready_pods("target")) == 2
    assert "waits until a new gateway is ready: demo-gateway-" in world.message("Progressing")
    world.controllers.broken.clear()
    await world.rounds(6)
    assert cells_with_certificates(world) == ["0", "1"]
    assert world.condition("Progressing") == DONE


async def test_a_new_gateway_that_may_not_exist_is_explained() -> None:
    world = await settled(**GATED)
    world.edit_spec(**MUTUAL)
    await world.next_pass()
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    with world.edited(Ref("Deployment", "demo-gateway")) as found:
        found["status"]["conditions"] = [failure]
    (preflight,) = world.controllers.preflights()
    world.cluster.put(preflight | {"status": {"phase": "Succeeded"}})
    await world.next_pass()
    cause = "until a new gateway has started: demo-gateway has no pod: exceeded quota."
    assert world.message("Progressing").endswith(cause)


async def test_a_first_gateway_holds_no_target() -> None:
    world = await settled()
    world.edit_spec(**MUTUAL)
    world.controllers.broken.add(new_revision(world))
    await world.rounds(6)
    assert cells_with_certificates(world) == ["0"]


async def test_a_target_that_does_not_serve_waits_for_no_gateway() -> None:
    world = await settled(**GATED)
    (target,) = world.ready_pods("target")
    world.controllers.make_unready(target)
    world.edit_spec(**MUTUAL)
    world.controllers.broken.add(new_revision(world))
    await world.rounds(6)
    assert cells_with_certificates(world) == ["0"]


async def test_a_change_that_replaces_no_gateway_waits_for_none() -> None:
    world = await settled(**GATED)
    for gateway in world.ready_pods("gateway"):
        world.controllers.make_unready(gateway)
    world.edit_spec(target={"image": "localhost/new:1"})
    await world.rounds(6)
    (target,) = world.ready_pods("target")
    assert target["spec"]["containers"][0]["image"] == "localhost/new:1"


GATEWAY_CHILDREN = [
    Ref(kind, "demo-gateway")
    for kind in ("Deployment", "Service", "NetworkPolicy", "ServiceAccount")
]
TO_VLLM: Object = {"target": {"engine": "vllm"}, "gateway": {"enabled": False}}


async def test_another_engine_whose_preflight_fails_ends_no_gateway() -> None:
    clients = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
    world = await settled(**GATED, security={"clients": clients})
    policy = world[TARGET_POLICY]
    bad = {"name": "preflight", "state": {"terminated": {"exitCode": 78, "message": "no"}}}
    world.controllers.outcomes = {
        SETTINGS.vllm_image: {"phase": "Failed", "containerStatuses": [bad]}
    }
    world.edit_spec(**TO_VLLM)
    await world.rounds(6)
    assert world.condition("Progressing") == ("False", "PreflightFailed")
    assert [ref for ref in GATEWAY_CHILDREN if ref not in world] == []
    assert len(world.ready_pods("gateway")) == 1
    assert world[TARGET_POLICY] == policy, "it admits the gateway"


@pytest.mark.parametrize("num_cells", [1, 2])
async def test_gateways_end_when_the_services_lead_to_another_engine(num_cells: int) -> None:
    world = await settled(**GATED, target={"replicas": num_cells})
    world.edit_spec(**TO_VLLM)
    has_gateway = []
    for _ in range(8):
        await world.next_pass()
        is_former = world[SERVICE]["spec"]["ports"][0]["port"] == 50051
        assert {ref in world for ref in GATEWAY_CHILDREN} == {is_former}
        has_gateway.append(is_former)
        world.controllers.settle()
    assert has_gateway[:2] == [True, True]
    assert not has_gateway[-1]
    assert world.ready_pods("gateway") == []


async def test_a_gateway_that_is_turned_off_ends_at_once() -> None:
    world = await settled(**GATED)
    world.edit_spec(gateway={"enabled": False})
    await world.next_pass()
    assert [ref for ref in GATEWAY_CHILDREN if ref in world] == []
