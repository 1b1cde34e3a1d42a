"""Services, policies and the endpoint describe the targets that serve, also while others wait."""

from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import Scene, target, terminating
from tests.unit.ssd_operator.world import SERVICE, TARGETS, World, settled

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Ref
from ssd_operator.policy.services import has_channel

BAD = "localhost/bad:1"
FAILED: Object = {
    "phase": "Failed",
    "containerStatuses": [{"name": "preflight", "state": {"terminated": {"exitCode": 78}}}],
}
TLS: Object = {"mode": "Server", "targetSecretName": "t", "draftSecretName": "d"}
POLICIES = (Ref("NetworkPolicy", "demo-target"), Ref("NetworkPolicy", "demo-draft"))
ANY_PORT = [{"protocol": "TCP"}]


async def fail(world: World, **blocks: Any) -> None:
    """Edit the resource; the preflight of the change fails."""
    world.controllers.outcomes = {BAD: FAILED}
    world.edit_spec(target={"image": BAD}, **blocks)
    await world.rounds(6)
    assert world.condition("Progressing") == ("False", "PreflightFailed")


def protocol_of(world: World) -> str:
    """Application protocol of both Services of targets."""
    (protocol,) = {
        world[ref]["spec"]["ports"][0].get("appProtocol", "") for ref in (SERVICE, TARGETS)
    }
    return str(protocol)


def opened(world: World) -> list[bool]:
    """Whether each policy of an engine admits all ports."""
    return [
        any(row["ports"] == ANY_PORT for row in world[ref]["spec"]["ingress"]) for ref in POLICIES
    ]


def variables(pod: Object) -> set[str]:
    """Names of the variables of a pod."""
    return {each["name"] for each in pod["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("engine", "plain", "endpoints"),
    [
        ("ssd", "kubernetes.io/h2c", [{"grpc": "demo.default.svc:50051"}] * 2),
        (
            "vllm",
            "",
            [{"http": f"{scheme}://demo.default.svc:8000/v1"} for scheme in ("http", "https")],
        ),
    ],
)
async def test_a_change_to_tls_whose_preflight_fails_changes_no_service(
    engine: str, plain: str, endpoints: list[Object]
) -> None:
    world = await settled(target={"engine": engine})
    await fail(world, security={"tls": TLS})
    assert (protocol_of(world), world.status["endpoint"]) == (plain, endpoints[0])
    world.edit_spec(target={"image": ""})
    await world.rounds(6)
    assert (protocol_of(world), world.status["endpoint"]) == ("https", endpoints[1])


@pytest.mark.parametrize("num_cells", [1, 2, 3])
async def test_services_name_the_protocol_of_at_least_half_of_the_targets_that_serve(
    num_cells: int,
) -> None:
    world = await settled(target={"replicas": num_cells})
    world.edit_spec(security={"tls": TLS})
    seen = []
    for _ in range(12 * num_cells):
        await world.next_pass()
        serving = world.ready_pods("target")
        num_tls = sum("SSD_TARGET_TLS_KEY" in variables(pod) for pod in serving)
        seen.append(protocol_of(world) == "https")
        assert 2 * (num_tls if seen[-1] else len(serving) - num_tls) >= len(serving)
        world.controllers.step()
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)


async def test_a_collective_channel_stays_open_until_no_target_has_it() -> None:
    world = await settled(transport={"channel": "Collective"}, target={"replicas": 2})
    await fail(world, transport={"channel": "Grpc"})
    assert opened(world) == [True, True]
    world.edit_spec(target={"image": ""})
    for _ in range(8):
        await world.round()
        has_old = any("SSD_TARGET_CHANNEL" in variables(pod) for pod in world.ready_pods("target"))
        assert opened(world) == [True, True] or not has_old
    assert opened(world) == [False, False]


async def test_a_change_of_clients_does_not_wait_for_the_channel() -> None:
    world = await settled(transport={"channel": "Collective"})
    clients = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
    await fail(world, transport={"channel": "Grpc"}, security={"clients": clients})
    assert clients[0] in world[POLICIES[0]]["spec"]["ingress"][0]["from"]


def test_a_former_target_that_finishes_its_streams_keeps_its_channel() -> None:
    former = terminating(target())
    assert not has_channel(Scene(pods=(former,), deployments=()).snapshot)
    env = [{"name": "SSD_TARGET_CHANNEL", "value": "collective"}]
    former |= {"spec": {"containers": [{"name": "target", "env": env}]}}
    assert has_channel(Scene(pods=(former,), deployments=()).snapshot)
    ended = former | {"status": {"phase": "Failed", "reason": "Evicted"}}
    assert not has_channel(Scene(pods=(ended,), deployments=()).snapshot)
