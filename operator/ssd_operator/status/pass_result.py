"""What one pass found, decided and brought about: the input of the status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from ssd_operator.api.spec import Object
from ssd_operator.children.names import maker_of, revision_of
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import is_terminating
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import Plan
from ssd_operator.policy.rollout import Preflight


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreported:
    """Begins of changes that may pass, and that the status does not report yet.

    None where there is no such change. Times are in seconds since the epoch.
    """

    unlinked_since: float | None = None
    """Loss of the links of SpeculationActive."""
    turned_since: float | None = None
    """A target turned its drafts off or on again, unlike NotWorthwhile."""


@dataclass(frozen=True, kw_only=True)
class PassResult(Snapshot):
    """A snapshot, the plan that was made from it, and the results of the plan."""

    plan: Plan = field(default_factory=Plan)
    results: Results = field(default_factory=Results)
    unreported: Unreported = field(default_factory=Unreported)
    """As of the pass before."""

    @cached_property
    def refused(self) -> dict[Ref, str]:
        """Objects that the API server refused, with its error."""
        failures = self.results.failures.items()
        return {ref: each.message for ref, each in failures if each.cause == "Refused"}

    @cached_property
    def deployments(self) -> tuple[Object, ...]:
        """Deployments that exist."""
        return self.target_deployments + self.draft_deployments

    @cached_property
    def preflight(self) -> Preflight:
        """The preflight of the plan, stuck if its pod could not be created."""
        found = self.plan.preflight
        failure = None if found.pod is None else self.results.failures.get(ref_of(found.pod))
        if failure is None or failure.cause == "Contested":
            return found
        return replace(found, stage="Stuck", message=failure.message.rstrip("."))

    @cached_property
    def has_endpoint(self) -> bool:
        """Whether the Service of the resource's name exists and belongs to the resource."""
        ref = Ref("Service", self.resource.name)
        live = self.children.get(ref)
        exists = ref in self.results.applied or (live is not None and not is_terminating(live))
        return exists and ref not in self.foreign

    @cached_property
    def is_replacing_targets(self) -> bool:
        """Whether a target of an older revision is being deleted."""
        cells = range(self.resource.spec.num_cells)
        pods = [pod for cell in cells for pod in self.cell_targets(cell) if is_terminating(pod)]
        return self.updated(pods) < len(pods)

    def updated(self, pods: Sequence[Object]) -> int:
        """Number of pods that are of the wanted revision, or that no Deployment wants."""
        wanted = self.plan.revisions
        return sum(revision_of(pod) == wanted.get(maker_of(pod), revision_of(pod)) for pod in pods)


def result_of(
    snapshot: Snapshot, plan: Plan, results: Results, unreported: Unreported
) -> PassResult:
    """The result of a pass over what a snapshot holds."""
    found = {each.name: getattr(snapshot, each.name) for each in fields(snapshot)}
    return PassResult(**found, plan=plan, results=results, unreported=unreported)
