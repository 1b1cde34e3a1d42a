"""The clock of the operator's node is set back while a resource serves, or clocks differ."""

import pytest
from tests.unit.ssd_operator.world import DRAFTS, RESOURCE, settled

from ssd_operator.observe.cluster import ClusterError, ForbiddenError, Ref, RefusedError
from ssd_operator.observe.pod_state import made_at, name_of, to_text
from ssd_operator.observe.snapshot import CLOCK_SECONDS
from ssd_operator.policy.plan import PlanState, remembered

HOUR = 3600.0


async def test_the_status_follows_after_the_clock_was_set_back() -> None:
    world = await settled()
    world.cluster.now -= HOUR
    world.controllers.make_unready(world.ready_pods("target")[0])
    await world.rounds(3)
    assert world.condition("Ready")[0] == "False"


async def test_the_status_of_an_invalid_spec_follows_after_the_clock_was_set_back() -> None:
    world = await settled()
    world.edit_spec(draft={"replicas": -1})
    await world.next_pass()
    world.cluster.now -= HOUR
    world.edit_spec(draft={"replicas": -2})
    await world.rounds(3)
    assert "-2" in world.message("SpecValid")


async def test_the_number_of_drafts_follows_after_the_clock_was_set_back() -> None:
    world = await settled(draft={"autoscaling": {"mode": "Internal", "maxReplicas": 4}})
    world.report(eligible_sequences=0.0)
    await world.rounds(6)
    world.cluster.now -= HOUR
    for _ in range(10):
        world.report(eligible_sequences=1000.0)
        await world.round()
    assert len(world.ready_pods("draft")) == 4


@pytest.mark.parametrize("error", [ForbiddenError("exceeded quota"), RefusedError("no")])
async def test_a_refused_call_is_repeated_after_the_clock_was_set_back(error: ClusterError) -> None:
    world = await settled()
    world.remove(DRAFTS)
    world.cluster.write_faults = {DRAFTS: error}
    await world.rounds(6)
    world.cluster.write_faults = {}
    world.cluster.now -= HOUR
    await world.rounds(3)
    assert len(world.ready_pods("draft")) == 2


@pytest.mark.parametrize("behind_seconds", [1.0, CLOCK_SECONDS])
async def test_pods_from_an_api_server_whose_clock_is_behind_are_counted(
    behind_seconds: float,
) -> None:
    world = await settled()
    seconds = made_at(world[RESOURCE]) - behind_seconds
    for pod in world.ready_pods("target") + world.ready_pods("draft"):
        with world.edited(Ref("Pod", name_of(pod))) as edited:
            edited["metadata"]["creationTimestamp"] = to_text(seconds)
    await world.rounds(3)
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("DraftReady") == ("True", "AllReady")


def test_a_small_correction_of_the_clock_changes_no_memory() -> None:
    state = PlanState(passed_at=HOUR, written_at=HOUR)
    assert remembered(state, HOUR - CLOCK_SECONDS).written_at == HOUR
    assert remembered(state, HOUR - CLOCK_SECONDS - 1.0) == PlanState(
        passed_at=HOUR - CLOCK_SECONDS - 1.0
    )
