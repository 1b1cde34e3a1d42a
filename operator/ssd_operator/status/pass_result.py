"""What one pass found, decided and brought about: the input of the status. Pure."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from ssd_operator.api.spec import Object
from ssd_operator.children.names import (
    COMPONENT_LABEL,
    Component,
    cell_of,
    draft_deployment,
    revision_of,
    target_deployment,
)
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import is_terminating
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Cause, Results
from ssd_operator.policy.plan import Plan
from ssd_operator.policy.rollout import Preflight, Stage


@dataclass(frozen=True, kw_only=True)
class PassResult(Snapshot):
    """A snapshot, the plan that was made from it, and the results of the plan."""

    plan: Plan = field(default_factory=Plan)
    results: Results = field(default_factory=Results)
    unlinked_since: float | None = None
    """Begin of a loss of links that may pass, as of the pass before; seconds since the epoch."""

    @cached_property
    def refused(self) -> dict[Ref, str]:
        """Objects that the API server refused, with its error."""
        failures = self.results.failures.items()
        return {ref: each.message for ref, each in failures if each.cause is Cause.REFUSED}

    @cached_property
    def taken(self) -> frozenset[Ref]:
        """Wanted names of other owners' objects."""
        return self.foreign | self.results.foreign

    @cached_property
    def preflight(self) -> Preflight:
        """The preflight of the plan, stuck if its pod could not be created."""
        found = self.plan.preflight
        failure = None if found.pod is None else self.results.failures.get(ref_of(found.pod))
        if failure is None or failure.cause not in (Cause.REFUSED, Cause.FORBIDDEN):
            return found
        return replace(found, stage=Stage.STUCK, message=failure.message.rstrip("."))

    @cached_property
    def has_endpoint(self) -> bool:
        """Whether the Service of the resource's name exists and belongs to the resource."""
        ref = Ref("Service", self.resource.name)
        live = self.children.get(ref)
        exists = ref in self.results.applied or (live is not None and not is_terminating(live))
        return exists and ref not in self.taken

    @cached_property
    def is_replacing_targets(self) -> bool:
        """Whether a target of an older revision is being deleted."""
        cells = range(self.resource.spec.num_cells)
        pods = [pod for cell in cells for pod in self.cell_targets(cell)]
        return any(is_terminating(pod) and self._is_outdated(pod) for pod in pods)

    def revision(self, component: Component) -> str:
        """Wanted revision of the first cell's pods; other cells differ in the cell only."""
        name = target_deployment if component is Component.TARGET else draft_deployment
        return self.plan.revisions.get(name(self.resource, 0), "")

    def updated(self, pods: tuple[Object, ...]) -> int:
        """Number of pods that are of the wanted revision."""
        return sum(not self._is_outdated(pod) for pod in pods)

    def _is_outdated(self, pod: Object) -> bool:
        is_target = pod["metadata"]["labels"][COMPONENT_LABEL] == str(Component.TARGET)
        name = target_deployment if is_target else draft_deployment
        wanted = self.plan.revisions.get(name(self.resource, cell_of(pod)))
        return wanted is not None and revision_of(pod) != wanted


def result_of(
    snapshot: Snapshot, plan: Plan, results: Results, unlinked_since: float | None
) -> PassResult:
    """The result of a pass over what a snapshot holds."""
    found = {each.name: getattr(snapshot, each.name) for each in fields(snapshot)}
    return PassResult(**found, plan=plan, results=results, unlinked_since=unlinked_since)
