"""What targets wait for while gateways are replaced. Pure.

Gateways roll by their Deployment: a new one starts beside the old ones, and an old one ends once a
new one is ready. A gateway is ready once a target answers it.

*Decision*: targets that serve wait until a new gateway has started, and the last one of several
cells also waits until a new gateway is ready. *Because* a change of ``security`` makes new targets
refuse old gateways. Without a wait, all targets were replaced although no new gateway could start,
as its Secret did not exist, and OpenAI's API was down with Ready True. *Not chosen*: to wait until
a new gateway is ready also with the first cell, because a gateway with TLS never finds an old
target ready; to wait only if ``security`` changes, because a pod template does not show what the
other side accepts. *Revisit when* gateways start much later than targets.
"""

from collections.abc import Sequence
from typing import Literal

from ssd_operator.api.spec import Object
from ssd_operator.observe.pod_state import has_started, is_ready, revision_of
from ssd_operator.observe.snapshot import Snapshot

AwaitedGateway = Literal["None", "Started", "Ready"]
"""The state of a new gateway that outdated targets wait for; None: they wait for no gateway."""


def new_gateways(snapshot: Snapshot, revision: str) -> list[Object]:
    """Live gateways of this revision."""
    return [pod for pod in snapshot.live_gateways if revision_of(pod) == revision]


def awaited_gateway(
    gateways: Object | None,
    targets: Sequence[Object],
    outdated: Sequence[Object],
    snapshot: Snapshot,
) -> AwaitedGateway:
    """Return what the ``outdated`` ones of the wanted ``targets`` wait for.

    ``gateways`` is their wanted Deployment. Without a gateway of another revision, no API is lost.
    """
    new = [] if gateways is None else new_gateways(snapshot, revision_of(gateways))
    has_old = len(new) < len(snapshot.live_gateways)
    if gateways is None or not has_old or not outdated:
        return "None"
    if not any(map(has_started, new)):
        return "Started"
    is_last = len(outdated) == 1 < len(targets)
    return "Ready" if is_last and not any(map(is_ready, new)) else "None"
