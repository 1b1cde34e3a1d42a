"""Which targets may be replaced now. Pure.

A cell that serves waits until all others serve, so a bad revision stops after one cell, and two
cells are never down because of us. A cell that does not serve has nothing to lose: it rolls at
once, which is how a bad revision is mended.
"""

from collections.abc import Mapping, Sequence

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
    serving = {
        name_of(each)
        for each in wanted
        if name_of(each) in live and _serves(live[name_of(each)], observed)
    }
    num_down = len(wanted) - len(serving)
    held = []
    for deployment in wanted:
        name = name_of(deployment)
        is_settled = name in live and revision_of(live[name]) == revision_of(deployment)
        if name not in serving or is_settled:
            continue
        if num_down:
            held.append(Ref("Deployment", name))
        num_down += 1  # whoever rolls now is down from now on
    return frozenset(held)


def _serves(deployment: Object, observed: Observed) -> bool:
    """Whether a ready pod is of the revision that its Deployment asks for."""
    return any(
        is_ready(pod)
        and pod["metadata"]["labels"].get(COMPONENT_LABEL) == str(Component.TARGET)
        and cell_of(pod) == cell_of(deployment)
        and revision_of(pod) == revision_of(deployment)
        for pod in observed.pods
    )
