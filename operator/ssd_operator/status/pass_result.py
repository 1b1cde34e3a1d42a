"""The snapshot, the plan and the results of one pass: the input of the status. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import is_terminating, maker_of, revision_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import PassPlan
from ssd_operator.policy.rollout import Preflight

EventLog = Mapping[tuple[str, str], float]
"""Times of the Events of one resource, by reason and message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportState:
    """What the report of one pass leaves to the next. Times are in seconds since the epoch."""

    log: EventLog = field(default_factory=dict)
    written_at: float = -math.inf
    """Last write of the status."""
    unlinked_since: float | None = None
    """Begin of a loss of the links of SpeculationActive that the status does not report yet."""
    turned_since: float | None = None
    """When a target turned its drafts off or on again, unlike NotWorthwhile."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """The snapshot, the plan and the results of one pass."""

    snapshot: Snapshot
    plan: PassPlan = field(default_factory=PassPlan)
    results: Results = field(default_factory=Results)
    before: ReportState = field(default_factory=ReportState)
    """What the report of the pass before left."""

    @cached_property
    def refused(self) -> dict[Ref, str]:
        """Objects that the API server refused, with its error."""
        failures = self.results.failures.items()
        return {ref: each.message for ref, each in failures if each.cause == "Refused"}

    @cached_property
    def deployments(self) -> tuple[Object, ...]:
        """Deployments that exist."""
        return self.snapshot.target_deployments + self.snapshot.draft_deployments

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
        ref = Ref("Service", self.snapshot.resource.name)
        live = self.snapshot.children.get(ref)
        exists = ref in self.results.applied or (live is not None and not is_terminating(live))
        return exists and ref not in self.snapshot.foreign

    @cached_property
    def is_replacing_targets(self) -> bool:
        """Whether a target of an older revision is being deleted."""
        cells = range(self.snapshot.resource.spec.num_cells)
        pods = [
            pod for cell in cells for pod in self.snapshot.cell_targets(cell) if is_terminating(pod)
        ]
        return self.updated(pods) < len(pods)

    def updated(self, pods: Sequence[Object]) -> int:
        """Number of pods that are of the wanted revision, or that no Deployment wants."""
        wanted = self.plan.revisions
        return sum(revision_of(pod) == wanted.get(maker_of(pod), revision_of(pod)) for pod in pods)
