"""Services, and who may call what."""

from ssd_operator.api.spec import Object
from ssd_operator.children.names import (
    DRAFT_PORT,
    HTTP_PORT,
    TARGET_PORT,
    Component,
    account,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
)
from ssd_operator.children.objects import ChildFactory

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that every namespace has."""


def services(factory: ChildFactory) -> list[Object]:
    """The endpoint, its headless twin for clients that balance, and what targets dial.

    A target resolves its drafts' Service every 2 s: that is the whole registration. All leave out
    pods that are not ready, so a draining draft is not dialled again.
    """
    resource = factory.resource
    target = Component.TARGET
    of_targets = _service_spec(selector(resource, target), TARGET_PORT)
    made = [
        _service(factory, resource.name, of_targets, (target, None)),
        _service(factory, f"{resource.name}-targets", _headless(of_targets), (target, None)),
    ]
    for cell in draft_cells(resource):
        own_cell = draft_cell(resource, cell)
        spec = _service_spec(selector(resource, Component.DRAFT, own_cell), DRAFT_PORT)
        name = draft_deployment(resource, cell)
        made.append(_service(factory, name, _headless(spec), (Component.DRAFT, own_cell)))
    return made


def network_policies(factory: ChildFactory) -> list[Object]:
    """Who may reach targets and drafts; none at all if the resource says so."""
    resource = factory.resource
    if not resource.spec.security.network_policy:
        return []
    config = factory.config
    operator: Object = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: config.operator_namespace}},
        "podSelector": {"matchLabels": dict(config.operator_labels)},
    }
    clients = list(resource.spec.security.clients) or [_any_pod()]
    targets: Object = {"podSelector": {"matchLabels": selector(resource, Component.TARGET)}}
    return [
        _network_policy(factory, Component.TARGET, _callers([*clients, operator], TARGET_PORT)),
        _network_policy(factory, Component.DRAFT, _callers([targets, operator], DRAFT_PORT)),
    ]


def _service(
    factory: ChildFactory, name: str, spec: Object, of: tuple[Component, int | None]
) -> Object:
    return factory.make("v1", "Service", name, {"spec": spec}, of=of)


def _service_spec(pods: dict[str, str], port: int) -> Object:
    grpc = {
        "name": "grpc",
        "port": port,
        "protocol": "TCP",
        "targetPort": "grpc",
        "appProtocol": "kubernetes.io/h2c",
    }
    return {
        "type": "ClusterIP",
        "selector": pods,
        "ports": [grpc],
        "publishNotReadyAddresses": False,
    }


def _headless(spec: Object) -> Object:
    return spec | {"clusterIP": "None"}


def _callers(peers: list[Object], port: int) -> list[Object]:
    """Rules of a process: who may call it, and who may look at it."""
    return [
        {"from": peers, "ports": [_tcp(port)]},
        # Metrics and probes: no prompt and no secret is there.
        {"from": [_any_pod()], "ports": [_tcp(HTTP_PORT)]},
    ]


def _network_policy(factory: ChildFactory, component: Component, ingress: list[Object]) -> Object:
    resource = factory.resource
    spec = {
        "podSelector": {"matchLabels": selector(resource, component)},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    name = account(resource, component)
    return factory.make(
        "networking.k8s.io/v1", "NetworkPolicy", name, {"spec": spec}, of=(component, None)
    )


def _any_pod() -> Object:
    """Every pod of the cluster, as a peer."""
    return {"namespaceSelector": {}}


def _tcp(port: int) -> Object:
    return {"port": port, "protocol": "TCP"}
