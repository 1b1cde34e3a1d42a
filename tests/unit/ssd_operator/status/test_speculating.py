"""SpeculationActive over time: a short loss of links changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.ssd_operator.scenes import NOW, Scene, answer, draft, link, target
from tests.unit.ssd_operator.world import World, settled

from ssd_operator.api.spec import Object
from ssd_operator.status.condition_rules import HOLD_SECONDS, conditions, pending
from ssd_operator.status.pass_result import yes

ACTIVE, SLOWER = "SpeculationActive", "NotWorthwhile"
LOST = (answer("t0", link("d0", "Quarantined", reason="tables were late")),)
MISFIT = (answer("t0", link("d0", "Refused", reason="vocab_size: this draft has 1, the target 2")),)
UP: dict[str, Any] = {"containerStatuses": [{"started": True}]}


def before(status: str = "True") -> Object:
    condition = {"type": "SpeculationActive", "status": status, "reason": "Active", "message": "W."}
    return {"status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    ("status", "since", "truth", "reason"),
    [
        ("True", NOW, "True", "Active"),
        ("True", NOW - HOLD_SECONDS[ACTIVE] + 1, "True", "Active"),
        ("True", NOW - HOLD_SECONDS[ACTIVE], "False", "Quarantined"),
        ("True", None, "True", "Active"),
        ("False", NOW, "False", "Quarantined"),
    ],
)
def test_a_loss_counts_after_some_time(
    status: str, since: float | None, truth: str, reason: str
) -> None:
    begin = {} if since is None else {ACTIVE: since}
    found = conditions(Scene(pools=LOST, facts=before(status), pending=begin).result)[ACTIVE]
    assert (found.status, found.reason) == (truth, reason)


def test_a_loss_begins_once_and_ends_with_the_first_link() -> None:
    lost = Scene(pools=LOST, facts=before())
    earlier = {ACTIVE: NOW - 9}
    assert pending(lost.result) == {ACTIVE: NOW}
    assert pending(replace(lost, pending=earlier).result) == earlier
    assert pending(Scene(facts=before(), pending=earlier).result) == {}
    assert pending(Scene(pools=LOST, facts=before("False")).result) == {}


BUSY = (target(ready=False, **UP), draft("d0", ready=False, **UP))
CAUSES: dict[str, tuple[Scene, float | None]] = {
    "no draft is wanted": (Scene(drafts=0, pools=LOST), None),
    "the pods are too busy to be ready": (Scene(pods=BUSY, pools=()), NOW),
    "the target loads": (Scene(pods=(target(ready=False), draft("d0")), pools=()), None),
    "the drafts load": (Scene(pods=(target(), draft("d0", ready=False)), pools=LOST), None),
    "no draft is there": (Scene(pods=(target(),), pools=LOST), None),
    "the models do not fit": (Scene(pools=MISFIT), None),
    "the target does not answer": (Scene(pools=()), None),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_only_a_transient_loss_is_awaited(cause: str) -> None:
    scene, since = CAUSES[cause]
    assert pending(replace(scene, facts=before()).result).get(ACTIVE) == since


def test_a_target_that_is_faster_without_drafts_reports_it_and_keeps_its_links() -> None:
    slower: dict[str, Any] = {
        "speculating": False,
        "speculation_reason": "slower",
        "speculation_speed_up": 0.83,
    }
    lasting = {SLOWER: NOW - HOLD_SECONDS[SLOWER]}
    scene = Scene(pools=(answer("t0", link("d0"), **slower),), pending=lasting)
    found = conditions(scene.result)
    assert found["NotWorthwhile"] == yes(
        "Slower", "t0 decodes without drafts, because that is faster."
    )
    assert found["SpeculationActive"].status == "True"
    for reason in ("faster", "measuring", ""):
        other = answer("t0", link("d0"), **slower | {"speculation_reason": reason})
        scene = Scene(pools=(other,), pending=lasting)
        assert "NotWorthwhile" not in conditions(scene.result)


async def choose(world: World, num_passes: int, *, is_faster: bool) -> float:
    """A pass each ten seconds while speculation is faster, or is not; seconds until the next."""
    again_after = 0.0
    for _ in range(num_passes):
        world.cluster.now += 8.0
        world.report(speculating=is_faster, speculation_reason="faster" if is_faster else "slower")
        again_after = await world.next_pass()
    return again_after


async def test_a_choice_that_changes_every_few_seconds_is_not_reported() -> None:
    world = await settled()

    async def alternate() -> set[bool]:
        seen = set()
        for number in range(20):
            await choose(world, 2, is_faster=number % 2 == 0)
            kinds = {each["type"] for each in world.status["conditions"]}
            seen.add("NotWorthwhile" in kinds)
        return seen

    assert await alternate() == {False}
    await choose(world, 8, is_faster=False)
    assert await alternate() == {True}
    await choose(world, 8, is_faster=True)
    assert await alternate() == {False}


async def test_a_target_that_is_faster_without_drafts_causes_no_warning() -> None:
    world = await settled()
    world.cluster.events.clear()
    again_after = await choose(world, 1, is_faster=False)
    assert 0 < again_after <= HOLD_SECONDS[SLOWER], "no watch reports the end of the wait"
    await choose(world, 7, is_faster=False)
    assert world.condition("NotWorthwhile") == ("True", "Slower")
    assert [event.severity for event in world.cluster.events if event.severity != "Normal"] == []


async def test_a_measured_speed_up_that_changes_causes_no_write() -> None:
    world = await settled()
    slower: dict[str, Any] = {"speculating": False, "speculation_reason": "slower"}
    await choose(world, 8, is_faster=False)
    world.report(**slower, speculation_speed_up=0.94)
    await world.come_to_rest()
    world.cluster.writes.clear()
    for figure in (0.96, 0.94):
        world.report(**slower, speculation_speed_up=figure)
        await world.round()
    assert world.cluster.writes == []


async def test_links_that_come_and_go_every_few_seconds_cause_no_warning() -> None:
    world = await settled()
    for number in range(60):
        world.report_links()
        if number % 2:
            world.report_links("Quarantined", reason=f"{number} ms late")
        world.cluster.now += 4.0
        await world.round()
    assert (world.reasons.count("SpeculationOn"), world.reasons.count("SpeculationOff")) == (1, 0)
    assert world.condition("SpeculationActive") == ("True", "Active")


async def test_links_that_stay_lost_are_reported() -> None:
    world = await settled()
    world.report_links()
    await world.round()
    world.report()
    again_after = await world.run_pass()
    assert again_after <= HOLD_SECONDS[ACTIVE], "no watch reports the end of the wait"
    for _ in range(16):
        world.report()
        await world.round()
    assert world.condition("SpeculationActive") == ("False", "NoDrafts")
    assert world.reasons.count("SpeculationOff") == 1


async def test_links_that_come_and_go_under_a_pause_are_reported_once() -> None:
    world = await settled()
    world.edit_spec(paused=True)
    for number in range(20):
        world.cluster.now += 20.0
        world.report_links()
        if number // 3 % 2:
            world.report()
        await world.round()
    assert world.reasons.count("SpeculationOff") == world.reasons.count("SpeculationOn") == 1
