"""Names, labels and kinds of the objects that a resource owns, and their metadata. Pure.

Names of resources have at most 40 characters, so that those of their children fit in 63.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ssd_operator.api.spec import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    POOL_KIND,
    POOL_PLURAL,
    Accelerator,
    DraftSpec,
    Object,
    Resource,
    Spec,
    TargetSpec,
)
from ssd_operator.settings import OperatorSettings

NAME_LABEL = f"{GROUP}/name"
COMPONENT_LABEL = f"{GROUP}/component"
CELL_LABEL = f"{GROUP}/cell"
ENGINE_LABEL = f"{GROUP}/engine"
"""Label of pods of targets and their template: ``spec.target.engine``."""
POOL_LABEL = f"{GROUP}/pool"
"""Label of targets that refer to a pool: the ``Resource.prefix`` of the pool."""
REVISION_LABEL = f"{GROUP}/revision"
"""Label of pods and their template: the first ten digits of the template's hash."""
TEMPLATE_HASH_LABEL = "pod-template-hash"
"""Label that the Deployment controller gives to pods, and the end of their ReplicaSet's name."""
HASH_ANNOTATION = f"{GROUP}/hash"
"""Annotation of every object: the hash of its wanted state."""
RESTART_ANNOTATION = f"{GROUP}/restart"
"""Copied from the resource to the pod templates: a new value replaces all pods."""
SCHEME_ANNOTATION = f"{GROUP}/scheme"
"""``https`` on a pod whose port ``http`` has TLS; the PodMonitor of the chart reads it."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR = "ssd-operator"
"""Value of the managed-by label, and the field manager."""

TARGET_PORT = 50051
DRAFT_PORT = 50052
HTTP_PORT = 9090
GATEWAY_PORT = 8000
"""HTTP port of gateways: the API, probes and metrics."""
FETCH = "fetch"
"""Init container that fetches a model of the hub."""


class Component(StrEnum):
    """Which pods a child is for."""

    TARGET = "target"
    DRAFT = "draft"
    GATEWAY = "gateway"
    PREFLIGHT = "preflight"
    """A pod that tests a change; no selector of ours matches it."""


ENGINES = (Component.TARGET, Component.DRAFT)
"""Components whose pods run an engine; no pass counts or drains the pods of gateways."""


def child_name(resource: Resource, component: Component, cell: int | None = None) -> str:
    """Name of the objects that a component has once, or once in a cell."""
    name = f"{resource.prefix}-{component}"
    return name if cell is None else f"{name}-{cell}"


def drafts_name(resource: Resource, cell: int) -> str:
    """Return the name of the Deployment and Service of a cell's drafts, or of its pool's."""
    if resource.pool_prefix is not None:
        return f"{resource.pool_prefix}-{Component.DRAFT}"
    return child_name(resource, Component.DRAFT, draft_cell(resource, cell))


def draft_cell(resource: Resource, cell: int) -> int | None:
    """Cell label of a cell's drafts; None in a Pool, whose drafts have no cell."""
    return None if resource.spec.draft.sharing == "Pool" else cell


def draft_cells(resource: Resource) -> range:
    """Cells that have a draft Deployment; a Pool counts as cell 0."""
    if resource.pool_prefix is not None:
        return range(0)
    return range(1 if resource.spec.draft.sharing == "Pool" else resource.spec.num_cells)


def peers(resource: Resource, component: Component, cell: int | None = None) -> dict[str, str]:
    """Labels of the pods at the other end of the links of target or drafts; of all cells for None.

    The labels of a pool do not depend on references, so a reference replaces no draft of the pool.
    """
    other = Component.DRAFT if component is Component.TARGET else Component.TARGET
    if resource.is_pool:
        return {POOL_LABEL: resource.prefix, COMPONENT_LABEL: str(other)}
    if other is Component.DRAFT and (pool := resource.pool_prefix) is not None:
        return {NAME_LABEL: pool, COMPONENT_LABEL: str(other)}
    return selector(resource, other, None if cell is None else draft_cell(resource, cell))


def targets_service(resource: Resource) -> str:
    """Name of the headless Service of all ready targets."""
    return f"{resource.name}-targets"


def spiffe_id(namespace: str, account: str) -> str:
    """URI in the certificate of a service account."""
    return f"spiffe://ssd/ns/{namespace}/sa/{account}"


def server_name(namespace: str, service: str) -> str:
    """Name in the certificates of the pods behind a Service."""
    return f"{service}.{namespace}.svc"


def selector(resource: Resource, component: Component, cell: int | None = None) -> dict[str, str]:
    """Labels that select pods, of all cells for None; nothing changes them."""
    labels = {NAME_LABEL: resource.prefix, COMPONENT_LABEL: str(component)}
    return labels if cell is None else labels | {CELL_LABEL: str(cell)}


HASH_DIGITS = 16


class ServedKind(NamedTuple):
    """Where a kind is served."""

    api_version: str
    plural: str


KINDS: Mapping[str, ServedKind] = {
    KIND: ServedKind(API_VERSION, PLURAL),
    POOL_KIND: ServedKind(API_VERSION, POOL_PLURAL),
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
        """Name of most of their objects."""
        return child_name(self.resource, self.component, self.cell)

    @property
    def spec(self) -> Spec:
        """Spec of the resource."""
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
        pool = self.resource.pool_prefix if self.is_target else None
        linked = {} if pool is None else {POOL_LABEL: pool}
        return recommended | linked | selector(self.resource, self.component, self.cell)

    @property
    def engine_label(self) -> dict[str, str]:
        """Label of the engine, on pods of targets only."""
        return {ENGINE_LABEL: self.spec.target.engine} if self.is_target else {}

    def make(self, kind: str, name: str = "", **body: Any) -> Object:
        """Return a whole object with this body; its hash is that of everything else in it."""
        # The garbage collector deletes a child after its resource.
        owner = {
            "apiVersion": API_VERSION,
            "kind": self.resource.kind,
            "name": self.resource.name,
            "uid": self.resource.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        manifest: Object = {
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
        manifest["metadata"]["annotations"] = {HASH_ANNOTATION: digest(manifest, HASH_DIGITS)}
        return manifest


def digest(value: Object, num_digits: int) -> str:
    """First hexadecimal digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]
