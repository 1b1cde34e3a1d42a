"""Children of kinds that a cluster may do without: not watched, so read now and then."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ssd_operator.api.spec import Object, Resource, ScalingMode
from ssd_operator.children.names import Component, account
from ssd_operator.observe.cluster import OPTIONAL_KINDS, Cluster, ForbiddenError, ref_of
from ssd_operator.observe.facts import Ref
from ssd_operator.observe.object_cache import is_ours

READ_SECONDS = 600.0
"""Between two looks at these objects, and at which of their kinds are served."""
FORBIDDEN_SECONDS = 60.0
"""Between two looks where the right was missing."""


@dataclass(slots=True)
class OptionalChildren:
    """Of one resource; nothing of it is needed to be right."""

    found: dict[Ref, Object] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    """Kinds that the resource wants and that we may not read."""
    _wanted: frozenset[str] = frozenset()
    _read_at: float = float("-inf")

    def remember(self, answer: Object) -> None:
        """Keep what the API server answered to a write."""
        self.found[ref_of(answer)] = answer

    async def read(
        self, cluster: Cluster, resource: Resource, served: frozenset[str], now: float
    ) -> None:
        """Read what the resource wants or has had, if it is time to.

        The first time all kinds are read: nobody knows what an operator before us has made. A
        missing right matters for a kind that is wanted only.

        Raises:
            ClusterError: the API server does not answer.
        """
        wanted, is_first = _wanted_kinds(resource), self._read_at == float("-inf")
        pause = FORBIDDEN_SECONDS if self.forbidden else READ_SECONDS
        if now - self._read_at < pause and wanted == self._wanted:
            return
        had = {ref.kind for ref in self.found}
        kinds = [
            kind
            for kind in OPTIONAL_KINDS
            if kind in served and (is_first or kind in wanted or kind in had)
        ]
        found, forbidden = dict[Ref, Object](), set[str]()
        for kind in kinds:
            ref = Ref(kind, _name_of(kind, resource))
            try:
                live = await cluster.get(resource.namespace, ref)
            except ForbiddenError as error:
                if error.is_leaving:
                    raise
                forbidden.add(kind)
                continue
            if live is not None and is_ours(live, resource.uid):
                found[ref] = live
        self.found, self.forbidden = found, wanted & forbidden
        self._wanted, self._read_at = wanted, now


class ServedKinds:
    """Which optional kinds the cluster knows, as of the last ten minutes. Asyncio loop."""

    def __init__(self, cluster: Cluster, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now
        self._kinds: frozenset[str] = frozenset()
        self._read_at = float("-inf")

    async def get(self) -> frozenset[str]:
        """The kinds.

        Raises:
            ClusterError: the API server does not answer.
        """
        now = self._now()
        if now - self._read_at >= READ_SECONDS:
            self._kinds = await self._cluster.optional_kinds()
            self._read_at = now
        return self._kinds

    def doubt(self) -> None:
        """Ask again the next time: a call met a kind that is not there."""
        self._read_at = float("-inf")


def _wanted_kinds(resource: Resource) -> frozenset[str]:
    autoscaling = resource.spec.draft.autoscaling
    wishes: Mapping[str, bool] = {
        "ScaledObject": autoscaling is not None and autoscaling.mode is ScalingMode.KEDA,
        "PodMonitor": resource.spec.observability.pod_monitor,
    }
    return frozenset(kind for kind, is_wanted in wishes.items() if is_wanted)


def _name_of(kind: str, resource: Resource) -> str:
    return account(resource, Component.DRAFT) if kind == "ScaledObject" else resource.name
