"""A pool gets TLS that its targets do not have."""

from dataclasses import replace

from tests.unit.ssd_operator.test_shared_drafts import CHAT, CODE, POOL, POOL_REF, Shared

from ssd.rpc.pool_codec import LinkStatus
from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import condition_in


class Plain(Shared):
    """Targets without TLS: their links to drafts with TLS are lost."""

    def link(self, name: str, draft: Object) -> LinkStatus:
        made = super().link(name, draft)
        closed = "Socket closed; perhaps the port needs TLS"
        return replace(made, state="lost", reason=closed) if made.state == "refused" else made


async def test_a_pool_that_targets_cannot_connect_to_any_more_reports_the_cause() -> None:
    world = Plain(POOL, CODE, CHAT)
    await world.rounds(6)
    (old,) = world.revisions()
    world.fitting = {"code": old, "chat": old}
    world.edit_spec(POOL_REF, security={"tls": {"draftSecretName": "d"}})
    await world.rounds(5)
    assert world.condition("Progressing", POOL_REF) == ("True", "RollingOut")
    await world.rounds(5)
    assert world.condition("Progressing", POOL_REF) == ("False", "DraftsRefused")
    (event,) = world.messages("DraftsRefused")
    assert "chat-target-0" in event
    assert "perhaps the port needs TLS" in event
    world.edit_spec(POOL_REF, replicas=5)
    await world.rounds(3)
    message = condition_in(world[POOL_REF]["status"], "DraftReady")["message"]
    assert message.endswith("their number stays while the rollout of the drafts is stopped.")
