"""Kinds of objects that the operator reads or writes, and where they are served."""

from collections.abc import Mapping
from dataclasses import dataclass

from ssd_operator.api.spec import API_VERSION, KIND, PLURAL


@dataclass(frozen=True, slots=True)
class ServedKind:
    """Where a kind is served."""

    api_version: str
    plural: str
    is_optional: bool = False
    """Whether a cluster may not serve it, or the operator may have no right to it."""

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version in the group."""
        return self.api_version.rpartition("/")[2]


KINDS: Mapping[str, ServedKind] = {
    KIND: ServedKind(API_VERSION, PLURAL),
    "ServiceAccount": ServedKind("v1", "serviceaccounts"),
    "NetworkPolicy": ServedKind("networking.k8s.io/v1", "networkpolicies"),
    "Service": ServedKind("v1", "services"),
    "Deployment": ServedKind("apps/v1", "deployments"),
    "PodDisruptionBudget": ServedKind("policy/v1", "poddisruptionbudgets"),
    "HorizontalPodAutoscaler": ServedKind("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": ServedKind("keda.sh/v1alpha1", "scaledobjects", is_optional=True),
    "PodMonitor": ServedKind("monitoring.coreos.com/v1", "podmonitors", is_optional=True),
    "Pod": ServedKind("v1", "pods"),
    "EndpointSlice": ServedKind("discovery.k8s.io/v1", "endpointslices"),
    "Event": ServedKind("v1", "events"),
}
"""Kinds that we read or write."""
OPTIONAL_KINDS = frozenset(kind for kind, served in KINDS.items() if served.is_optional)
REQUIRED_KINDS = frozenset(KINDS) - OPTIONAL_KINDS - {"Event"}
"""Kinds that are watched in every cluster."""
