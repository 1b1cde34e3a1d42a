"""Kinds of objects, and the metadata of every child: name, owner, labels, hash."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssd_operator.api.spec import API_VERSION, KIND, PLURAL, Object, Resource
from ssd_operator.children.names import HASH_ANNOTATION, labels_of
from ssd_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True)
class ServedKind:
    """Where a kind is served."""

    api_version: str
    plural: str

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
    "Pod": ServedKind("v1", "pods"),
    "EndpointSlice": ServedKind("discovery.k8s.io/v1", "endpointslices"),
    "Event": ServedKind("v1", "events"),
}
"""Kinds that we read or write."""
WATCHED_KINDS = frozenset(KINDS) - {"Event"}


HASH_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFactory:
    """Makes the children of one resource."""

    resource: Resource
    settings: OperatorSettings

    def make(
        self,
        kind: str,
        name: str,
        component: str | None = None,
        cell: int | None = None,
        **body: Any,
    ) -> Object:
        """Return a whole object with this body, and labels of this component and cell.

        Its hash is that of everything else in it.
        """
        labels = labels_of(self.resource, component, cell)
        labels["app.kubernetes.io/version"] = self.settings.version
        made: Object = {
            "apiVersion": KINDS[kind].api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.resource.namespace,
                "labels": labels,
                "ownerReferences": [owner_reference(self.resource)],
            },
            **body,
        }
        made["metadata"]["annotations"] = {HASH_ANNOTATION: digest(made, HASH_DIGITS)}
        return made


def owner_reference(resource: Resource) -> Object:
    """The garbage collector's link from a child to its resource."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": resource.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def digest(value: Object, num_digits: int) -> str:
    """First hexadecimal digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]
