"""Names and labels of the objects that a resource owns. Pure.

Names of resources have at most 40 characters, so that those of their children fit in 63.
"""

from enum import StrEnum

from ssd_operator.api.spec import GROUP, Resource

NAME_LABEL = f"{GROUP}/name"
COMPONENT_LABEL = f"{GROUP}/component"
CELL_LABEL = f"{GROUP}/cell"
REVISION_LABEL = f"{GROUP}/revision"
"""On pods and their template: the first ten digits of the template's hash."""
TEMPLATE_HASH_LABEL = "pod-template-hash"
"""On pods of a Deployment, by its controller: also the end of their ReplicaSet's name."""
HASH_ANNOTATION = f"{GROUP}/hash"
"""On every object: the hash of its wanted state."""
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


def components_of(resource: Resource) -> tuple[Component, ...]:
    """Components that a resource has."""
    return (*ENGINES, Component.GATEWAY) if resource.spec.gateway.enabled else ENGINES


def child_name(resource: Resource, component: Component, cell: int | None = None) -> str:
    """Name of the objects that a component has once, or once in a cell."""
    name = f"{resource.name}-{component}"
    return name if cell is None else f"{name}-{cell}"


def draft_deployment(resource: Resource, cell: int) -> str:
    """Name of a cell's drafts, Deployment and Service; with a Pool there is one for all cells."""
    return child_name(resource, Component.DRAFT, draft_cell(resource, cell))


def draft_cell(resource: Resource, cell: int) -> int | None:
    """Cell label of a cell's drafts; None in a Pool, whose drafts have no cell."""
    return None if resource.spec.draft.sharing == "Pool" else cell


def draft_cells(resource: Resource) -> range:
    """Cells that have a draft Deployment; a Pool counts as cell 0."""
    return range(1 if resource.spec.draft.sharing == "Pool" else resource.spec.num_cells)


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
    labels = {NAME_LABEL: resource.name, COMPONENT_LABEL: str(component)}
    return labels if cell is None else labels | {CELL_LABEL: str(cell)}
