"""SpeculationActive over time: a short loss of links changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ssd_operator.policy.test_apply_failures import report_links
from tests.unit.ssd_operator.scenes import NOW, Scene, answer, draft, link, target
from tests.unit.ssd_operator.world import KEY, World, settled

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object
from ssd_operator.status.conditions import Truth
from ssd_operator.status.pass_result import PassResult
from ssd_operator.status.speculating import HOLD_SECONDS, speculation_active, unlinked_since

QUARANTINED = link("d0", "Quarantined", reason="tables were late")
LOST = (answer("t0", QUARANTINED),)
UP: dict[str, Any] = {"containerStatuses": [{"started": True}]}


def before(status: str = "True") -> Object:
    condition = {"type": "SpeculationActive", "status": status, "reason": "Active", "message": "W."}
    return {"status": {"conditions": [condition]}}


def result(scene: Scene, since: float | None) -> PassResult:
    return replace(scene, unlinked_since=since).result


@pytest.mark.parametrize(
    ("since", "truth", "reason"),
    [
        (NOW, "True", "Active"),
        (NOW - HOLD_SECONDS + 1, "True", "Active"),
        (NOW - HOLD_SECONDS, "False", "Quarantined"),
        (None, "False", "Quarantined"),
    ],
)
def test_a_loss_counts_after_some_time(since: float | None, truth: str, reason: str) -> None:
    found = speculation_active(result(Scene(pools=LOST, facts=before()), since))
    assert (str(found.truth), found.reason) == (truth, reason)


def test_a_loss_begins_once_and_ends_with_the_first_link() -> None:
    lost = Scene(pools=LOST, facts=before())
    assert unlinked_since(lost.result, None) == NOW
    assert unlinked_since(lost.result, NOW - 9) == NOW - 9
    assert unlinked_since(Scene(facts=before()).result, NOW - 9) is None


def test_inactive_speculation_loses_nothing() -> None:
    scene = Scene(pools=LOST, facts=before("False"))
    assert unlinked_since(scene.result, None) is None
    assert speculation_active(scene.result).truth is Truth.FALSE


BUSY = (target(ready=False, **UP), draft("d0", ready=False, **UP))
CAUSES: list[tuple[str, Scene, float | None]] = [
    ("no draft is wanted", Scene(drafts=0, pools=LOST), None),
    ("the pods are too busy to be ready", Scene(pods=BUSY, pools=()), NOW),
    ("the target loads", Scene(pods=(target(ready=False), draft("d0")), pools=()), None),
    ("the drafts load", Scene(pods=(target(), draft("d0", ready=False)), pools=LOST), None),
    ("no draft is there", Scene(pods=(target(),), pools=LOST), None),
    (
        "the models do not fit",
        Scene(
            pools=(
                answer(
                    "t0",
                    link("d0", "Refused", reason="vocab_size: this draft has 1, the target has 2"),
                ),
            )
        ),
        None,
    ),
    ("the target does not answer", Scene(pools=()), None),
]


@pytest.mark.parametrize(("cause", "scene", "since"), CAUSES, ids=[each[0] for each in CAUSES])
def test_only_a_loss_that_may_pass_is_awaited(
    cause: str, scene: Scene, since: float | None
) -> None:
    scene = replace(scene, facts=before())
    assert unlinked_since(scene.result, None) == since, cause


async def minutes(world: World, seconds: float) -> None:
    """Links that are lost for a round every so many seconds, for 20 minutes."""
    for number in range(int(1200 / seconds)):
        report_links(world)
        if number % 2:
            late = LinkStatus(
                address="a", draft_pod="d", state="Quarantined", reason=f"{number} ms late"
            )
            answers = world.engines.answers.items()
            world.engines.answers = {name: replace(fact, links=(late,)) for name, fact in answers}
        world.cluster.now += seconds - 2.0
        await world.round()


async def test_links_that_come_and_go_every_few_seconds_cause_no_warning() -> None:
    world = await settled()
    await minutes(world, 6.0)
    events = [event.reason for event in world.cluster.events]
    assert (events.count("SpeculationOn"), events.count("SpeculationOff")) == (1, 0)
    assert world.cluster.condition(KEY, "SpeculationActive") == ("True", "Active")


def lose(world: World) -> None:
    """Each target reports that it has no link."""
    report_links(world)
    answers = world.engines.answers.items()
    world.engines.answers = {name: replace(fact, links=()) for name, fact in answers}


async def test_links_that_stay_lost_are_reported() -> None:
    world = await settled()
    report_links(world)
    await world.round()
    lose(world)
    again_after = await world.run_pass()
    assert again_after is not None
    assert again_after <= HOLD_SECONDS, "no watch reports the end of the wait"
    for _ in range(16):
        lose(world)
        await world.round()
    assert world.cluster.condition(KEY, "SpeculationActive") == ("False", "NoDrafts")
    events = [event.reason for event in world.cluster.events]
    assert events.count("SpeculationOff") == 1


async def test_scaling_to_zero_causes_no_warning() -> None:
    world = await settled()
    report_links(world)
    await world.round()
    assert world.cluster.condition(KEY, "SpeculationActive") == ("True", "Active")
    world.cluster.edit_spec(KEY, draft={"replicas": 0})
    for _ in range(4):
        report_links(world)
        await world.round()
    assert world.cluster.condition(KEY, "SpeculationActive") == ("False", "NoDrafts")
    assert "SpeculationOff" not in [event.reason for event in world.cluster.events]
