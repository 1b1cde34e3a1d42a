"""Kinds of objects, and what all objects of a component have: name, owner, labels, hash."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ssd_operator.api.spec import (
    API_VERSION,
    KIND,
    PLURAL,
    Accelerator,
    DraftSpec,
    Object,
    Resource,
    Spec,
    TargetSpec,
)
from ssd_operator.children.names import (
    HASH_ANNOTATION,
    MANAGED_BY_LABEL,
    OPERATOR,
    Component,
    child_name,
    selector,
)
from ssd_operator.settings import OperatorSettings

HASH_DIGITS = 16


class ServedKind(NamedTuple):
    """Where a kind is served."""

    api_version: str
    plural: str


KINDS: Mapping[str, ServedKind] = {
    KIND: ServedKind(API_VERSION, PLURAL),
    "ServiceAccount": ServedKind("v1", "serviceaccounts"),
    "NetworkPolicy": ServedKind("networking.k8s.io/v1", "networkpolicies"),
    "Service": ServedKind("v1", "services"),
    "Deployment": ServedKind("apps/v1", "deployments"),
    "PodDisruptionBudget": ServedKind("policy/v1", "poddisruptionbudgets"),
    "Pod": ServedKind("v1", "pods"),
    "EndpointSlice": ServedKind("discovery.k8s.io/v1", "endpointslices"),
    "Event": ServedKind("v1", "events"),
}
"""Kinds that we read or write; children are applied in this order."""
WATCHED_KINDS = frozenset(KINDS) - {"Event"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The pods of one component of a resource, all or those of a cell, and their objects."""

    resource: Resource
    settings: OperatorSettings
    component: Component
    cell: int | None = None
    """None for gateways, the drafts of a Pool, and objects that a component has once."""

    @property
    def name(self) -> str:
        """Of most of their objects."""
        return child_name(self.resource, self.component, self.cell)

    @property
    def spec(self) -> Spec:
        """Of the resource."""
        return self.resource.spec

    @property
    def is_target(self) -> bool:
        """Whether the pods are targets."""
        return self.component is Component.TARGET

    @property
    def block(self) -> TargetSpec | DraftSpec:
        """The part of the spec about these engines."""
        return self.spec.target if self.is_target else self.spec.draft

    @property
    def device(self) -> Accelerator:
        """Device of the pods."""
        return self.spec.accelerator if self.is_target else self.spec.draft_device

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pods; those of other objects have the operator's version too."""
        recommended = {
            "app.kubernetes.io/name": "ssd",
            "app.kubernetes.io/instance": self.resource.name,
            "app.kubernetes.io/part-of": "ssd",
            MANAGED_BY_LABEL: OPERATOR,
            "app.kubernetes.io/component": str(self.component),
        }
        return recommended | selector(self.resource, self.component, self.cell)

    def make(self, kind: str, name: str = "", **body: Any) -> Object:
        """Return a whole object with this body; its hash is that of everything else in it."""
        # The garbage collector deletes a child after its resource.
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.resource.name,
            "uid": self.resource.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        made: Object = {
            "apiVersion": KINDS[kind].api_version,
            "kind": kind,
            "metadata": {
                "name": name or self.name,
                "namespace": self.resource.namespace,
                "labels": self.labels | {"app.kubernetes.io/version": self.settings.version},
                "ownerReferences": [owner],
            },
            **body,
        }
        made["metadata"]["annotations"] = {HASH_ANNOTATION: digest(made, HASH_DIGITS)}
        return made


def digest(value: Object, num_digits: int) -> str:
    """First hexadecimal digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]
