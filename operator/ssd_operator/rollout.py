"""Which targets may be replaced now. Pure.

A cell that serves waits until all others serve, so a bad revision stops after one cell, and two
cells are never down because of us. A cell that does not serve has nothing to lose: it rolls at
once, which is how a bad revision is mended.

What decides is the template, not the revision that its label tells: a hand that edits a template
leaves the label, and mending it replaces the pod as any roll does.
"""

from collections.abc import Mapping, Sequence

from ssd_operator.covers import covers
from ssd_operator.facts import Observed, Ref
from ssd_operator.names import COMPONENT_LABEL, Component, cell_of, revision_of
from ssd_operator.pod_state import is_ready, name_of
from ssd_operator.spec import Object


def held_targets(wanted: Sequence[Object], observed: Observed) -> frozenset[Ref]:
    """Target Deployments that are left as they are in this pass.

    Args:
        wanted: target Deployments as they should be, by cell.
        observed: the snapshot.
    """
    live: Mapping[str, Object] = {
        ref.name: child for ref, child in observed.children.items() if ref.kind == "Deployment"
    }
    ready = {cell: _ready_revisions(cell, observed) for cell in map(cell_of, wanted)}
    down = {
        name_of(each)
        for each in wanted
        if name_of(each) not in live or not _is_up(live[name_of(each)], ready[cell_of(each)])
    }
    held = []
    for deployment in wanted:
        name = name_of(deployment)
        has_nothing_to_lose = name not in live or not ready[cell_of(deployment)]
        if has_nothing_to_lose or _is_settled(live[name], deployment):
            continue
        if down - {name}:
            held.append(Ref("Deployment", name))
        else:
            down.add(name)  # whoever rolls now is down from now on
    return frozenset(held)


def _ready_revisions(cell: int, observed: Observed) -> frozenset[str]:
    """Of the target pods of a cell that serve."""
    return frozenset(
        revision_of(pod)
        for pod in observed.pods
        if is_ready(pod)
        and pod["metadata"]["labels"].get(COMPONENT_LABEL) == str(Component.TARGET)
        and cell_of(pod) == cell
    )


def _is_up(deployment: Object, ready: frozenset[str]) -> bool:
    """Whether what its Deployment asks for serves, and not what it asked for before."""
    status = deployment.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return is_seen and status.get("updatedReplicas", 0) > 0 and revision_of(deployment) in ready


def _is_settled(live: Object, wanted: Object) -> bool:
    """Whether applying it would replace no pod."""
    return covers(live["spec"]["template"], wanted["spec"]["template"])
