"""Which targets may be replaced now. Pure.

A cell that serves waits until its preflight has passed and all others serve, so a bad revision
stops before the first cell or after it, and two cells are never down because of us. A cell that
does not serve has nothing to lose: it rolls at once, which is how a bad revision is mended. Only
a revision that is known to fail is kept from it, too: the present one may yet come back.
"""

from collections.abc import Sequence
from enum import StrEnum

from ssd_operator.facts import Observed, Ref
from ssd_operator.names import COMPONENT_LABEL, Component, cell_of, revision_of
from ssd_operator.pod_state import is_ready, name_of
from ssd_operator.spec import Object


class Stage(StrEnum):
    """How far the preflight of a revision is."""

    NONE = "None"
    """Nobody asks: no target that serves is to be replaced."""
    RUNNING = "Running"
    PASSED = "Passed"
    STUCK = "Stuck"
    """It does not run, for reasons that are not the revision's."""
    FAILED = "Failed"
    """The revision cannot run."""


def held_targets(wanted: Sequence[Object], observed: Observed, stage: Stage) -> frozenset[Ref]:
    """Target Deployments that are left as they are in this pass.

    Args:
        wanted: target Deployments as they should be, by cell.
        observed: the snapshot.
        stage: of the preflight of what is wanted.
    """
    serving = {name_of(each) for each in wanted if serving_pod(each, observed) is not None}
    num_down = len(wanted) - len(serving)
    held = []
    for name in map(name_of, outdated(wanted, observed)):
        if name in serving:
            is_held = bool(num_down) or stage is not Stage.PASSED
            num_down += 1  # whoever rolls now is down from now on
        else:
            is_held = stage is Stage.FAILED
        if is_held:
            held.append(Ref("Deployment", name))
    return frozenset(held)


def outdated(wanted: Sequence[Object], observed: Observed) -> list[Object]:
    """Of target Deployments as they should be, those that exist with another revision."""
    return [
        each
        for each in wanted
        if (live := _live(each, observed)) is not None and revision_of(live) != revision_of(each)
    ]


def serving_pod(wanted: Object, observed: Observed) -> Object | None:
    """A ready pod of the revision that a target's Deployment asks for as it is; None if none is."""
    live = _live(wanted, observed)
    if live is None:
        return None
    for pod in observed.pods:
        is_target = pod["metadata"]["labels"].get(COMPONENT_LABEL) == str(Component.TARGET)
        is_its_own = cell_of(pod) == cell_of(wanted) and revision_of(pod) == revision_of(live)
        if is_target and is_its_own and is_ready(pod):
            return pod
    return None


def _live(wanted: Object, observed: Observed) -> Object | None:
    return observed.children.get(Ref("Deployment", name_of(wanted)))
