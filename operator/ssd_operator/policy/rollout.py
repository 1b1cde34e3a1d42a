"""Which targets and drafts may be replaced now. Pure.

A cell that serves waits until its preflight has passed and all others serve, so a bad revision
stops before the first cell or after it, and two cells are never down because of us. A cell that
does not serve has nothing to lose: it rolls at once, which is how a bad revision is mended. Only
a revision that is known to fail is kept from it, too: the present one may yet come back.

Drafts follow their target: a setting that both must agree on ends their link on whichever side it
changes first. So a cell's drafts roll once its old target is gone, while the new one loads.

What decides is the template, not the revision that its label tells: a hand that edits a template
leaves the label, and mending it replaces the pod as any roll does.
"""

from collections.abc import Sequence, Set
from enum import StrEnum

from ssd_operator.api.spec import Object
from ssd_operator.children.names import (
    CELL_LABEL,
    COMPONENT_LABEL,
    HASH_ANNOTATION,
    Component,
    cell_of,
    revision_of,
)
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.diff import covers
from ssd_operator.observe.facts import Observed, Ref
from ssd_operator.observe.pod_state import is_leaving, is_ready, name_of


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
    down = {name_of(each) for each in wanted if not _is_up(each, observed)}
    held = []
    for each in outdated(wanted, observed):
        name = name_of(each)
        if serving_pod(each, observed) is None:
            is_held = stage is Stage.FAILED
        else:
            is_held = bool(down - {name}) or stage is not Stage.PASSED
            down.add(name)  # whoever rolls now is down from now on
        if is_held:
            held.append(Ref("Deployment", name))
    return frozenset(held)


def held_drafts(
    wanted: Sequence[Object],
    targets: Sequence[Object],
    observed: Observed,
    held: Set[Ref],
    stage: Stage,
) -> frozenset[Ref]:
    """Draft Deployments whose template is left as it is in this pass.

    The drafts of a Pool belong to all cells: they roll once half of those have been replaced, so
    that neither half waits for all the others.

    Args:
        wanted: draft Deployments as they should be.
        targets: target Deployments as they should be, by cell.
        observed: the snapshot.
        held: see ``held_targets``.
        stage: of the preflight of what is wanted.
    """
    old = {cell_of(each) for each in targets if ref_of(each) in held or _has_old(each, observed)}
    kept = []
    for each in wanted:
        is_pool = CELL_LABEL not in each["metadata"]["labels"]
        its_own = [one for one in targets if is_pool or cell_of(one) == cell_of(each)]
        is_untried = stage is not Stage.PASSED and any(ref_of(one) in held for one in its_own)
        num_old = sum(cell_of(one) in old for one in its_own)
        if is_untried or 2 * num_old > len(its_own):
            kept.append(ref_of(each))
    return frozenset(kept)


def with_template_of(live: Object, wanted: Object) -> Object:
    """A Deployment as it should be, but for its pods, which stay as they are."""
    hashed = live["metadata"].get("annotations") or {}
    annotations = wanted["metadata"]["annotations"] | {
        name: hashed[name] for name in (HASH_ANNOTATION,) if name in hashed
    }
    return wanted | {
        "metadata": wanted["metadata"] | {"annotations": annotations},
        "spec": wanted["spec"] | {"template": live["spec"]["template"]},
    }


def outdated(wanted: Sequence[Object], observed: Observed) -> list[Object]:
    """Of target Deployments as they should be, those whose pods applying them would replace."""
    return [
        each
        for each in wanted
        if (live := _live(each, observed)) is not None
        and ref_of(each) not in observed.reverted
        and not covers(live["spec"]["template"], each["spec"]["template"])
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


def _has_old(wanted: Object, observed: Observed) -> bool:
    """Whether a target of another revision still serves, or finishes its streams."""
    return any(
        revision_of(pod) != revision_of(wanted) and (is_leaving(pod) or is_ready(pod))
        for pod in observed.pods
        if pod["metadata"]["labels"].get(COMPONENT_LABEL) == str(Component.TARGET)
        and cell_of(pod) == cell_of(wanted)
    )


def _is_up(wanted: Object, observed: Observed) -> bool:
    """Whether a cell serves, and its Deployment has followed its last change.

    A ready pod alone may be the one that is about to go.
    """
    live = _live(wanted, observed)
    if live is None or serving_pod(wanted, observed) is None:
        return False
    status = live.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    return is_seen and bool(status.get("updatedReplicas", 0))


def _live(wanted: Object, observed: Observed) -> Object | None:
    return observed.children.get(ref_of(wanted))
