"""The snapshot, the plan and the results of one pass: the input of the status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

from ssd_operator.api.spec import Object
from ssd_operator.observe.cluster import Ref, ref_of
from ssd_operator.observe.pod_state import is_terminating, maker_of, revision_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import PassPlan, PlanState
from ssd_operator.policy.rollout import Preflight

LONGEST_MESSAGE = 1024
"""Characters of a message or Event; quotations of registries and schedulers have no bound."""


class Condition(NamedTuple):
    """One statement about a resource, without its type; True is good, except for NotWorthwhile."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word in CamelCase."""
    message: str
    """One sentence: actual value, allowed value, fix."""


yes = partial(Condition, "True")
no = partial(Condition, "False")
unknown = partial(Condition, "Unknown")


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """The snapshot, the plan and the results of one pass."""

    snapshot: Snapshot
    plan: PassPlan = field(default_factory=PassPlan)
    results: Results = field(default_factory=Results)
    state: PlanState = field(default_factory=PlanState)
    """What the pass leaves to the next one; the report adds its own part."""

    @property
    def preflight(self) -> Preflight:
        """The preflight of the plan, stuck if its pod could not be created."""
        preflight, failures = self.plan.preflight, self.results.failures
        failure = None if preflight.pod is None else failures.get(ref_of(preflight.pod))
        if failure is None or failure.cause == "Contested":
            return preflight
        return replace(preflight, stage="Stuck", message=failure.message.rstrip("."))

    @cached_property
    def has_endpoint(self) -> bool:
        """Whether the Service of the resource's name exists and belongs to the resource."""
        ref = Ref("Service", self.snapshot.resource.name)
        live = self.snapshot.children.get(ref)
        return ref in self.results.applied or (live is not None and not is_terminating(live))

    def updated(self, pods: Sequence[Object]) -> int:
        """Number of pods that are of the wanted revision, or that no Deployment wants."""
        wanted = self.plan.revisions
        return sum(revision_of(pod) == wanted.get(maker_of(pod), revision_of(pod)) for pod in pods)
