"""The state that one pass reads: children, pods, reports of engines. Data only."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ssd.rpc.pool_codec import PoolStatus
from ssd_operator.api.spec import Object
from ssd_operator.children.kinds import REQUIRED_KINDS


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object of the resource's namespace. ``kind`` as in a manifest."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFact(PoolStatus):
    """One target's report, and when it came (the operator's clock).

    States of links are written as in the status: Active, Connecting, Quarantined, Draining, Lost,
    Refused.
    """

    target_pod: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFact:
    """The state of a drain of a draft's pod."""

    pod: str
    is_done: bool = False
    result: str = ""
    """Drained, TimedOut, Unreachable; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The state of a resource and of everything around it, as one pass has read it."""

    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that the resource owns (controller owner reference by uid): a preflight's pod is one,
    the pods of Deployments are not."""
    pods: tuple[Object, ...] = ()
    """Pods of engines: the others with the resource's ``ssd.dev/name`` label."""
    released: tuple[Object, ...] = ()
    """Pods of engines that no ReplicaSet and no resource owns, since their labels were changed."""
    endpoints: frozenset[str] = frozenset()
    """Names of the ready pods of the client Service."""
    foreign: frozenset[Ref] = frozenset()
    """Wanted names that other owners' objects have."""
    former: frozenset[Ref] = frozenset()
    """Wanted names of children that a former resource of this name left; they will be deleted."""
    absent: frozenset[Ref] = frozenset()
    """Wanted names that are free, as the API server has answered in this pass."""
    pools: Mapping[str, PoolFact] = field(default_factory=dict)
    """By target pod; only pods that exist."""
    drains: Mapping[str, DrainFact] = field(default_factory=dict)
    """By draft pod."""
    kinds: AbstractSet[str] = REQUIRED_KINDS
    """Kinds that are watched."""
    spec_problem: tuple[str, str] | None = None
    """Reason and message of ``SpecValid=False`` where the resource as it is cannot be read."""
    status: Object = field(default_factory=dict)
    """The resource's present status."""
