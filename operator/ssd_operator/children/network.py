"""Services, and who may call what."""

from ssd_operator.api.spec import Object
from ssd_operator.children.names import (
    DRAFT_PORT,
    HTTP_PORT,
    TARGET_PORT,
    Component,
    component_name,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
)
from ssd_operator.children.objects import ChildFactory

_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that every namespace has."""
_OPERATOR_LABELS = {"app.kubernetes.io/name": "ssd-operator"}
"""Labels of the operator's pod."""


def services(factory: ChildFactory) -> list[Object]:
    """The endpoint, the headless Service for clients that balance, and what targets resolve.

    A target resolves the Service of its drafts every 2 s; there is no other registration. Services
    leave out pods that are not ready, so targets open no link to a draining draft.
    """
    resource, target = factory.resource, Component.TARGET
    of_targets = _service_spec(selector(resource, target), TARGET_PORT)
    headless = {"clusterIP": "None"}
    specs: list[tuple[str, Component, int | None, Object]] = [
        (resource.name, target, None, of_targets),
        (f"{resource.name}-targets", target, None, of_targets | headless),
    ]
    for cell in draft_cells(resource):
        own_cell = draft_cell(resource, cell)
        spec = _service_spec(selector(resource, Component.DRAFT, own_cell), DRAFT_PORT)
        specs.append((draft_deployment(resource, cell), Component.DRAFT, own_cell, spec | headless))
    return [
        factory.make("Service", name, {"spec": spec}, of=(component, cell))
        for name, component, cell, spec in specs
    ]


def network_policies(factory: ChildFactory) -> list[Object]:
    """Who may reach targets and drafts; none if the resource disables them."""
    resource = factory.resource
    if not resource.spec.security.network_policy:
        return []
    namespace = {_NAMESPACE_NAME: factory.settings.pod_namespace}
    operator: Object = {
        "namespaceSelector": {"matchLabels": namespace},
        "podSelector": {"matchLabels": dict(_OPERATOR_LABELS)},
    }
    targets: Object = {"podSelector": {"matchLabels": selector(resource, Component.TARGET)}}
    clients: list[Object] = [dict(each) for each in resource.spec.security.clients]
    return [
        _network_policy(
            factory, Component.TARGET, [*(clients or [_any_pod()]), operator], TARGET_PORT
        ),
        _network_policy(factory, Component.DRAFT, [targets, operator], DRAFT_PORT),
    ]


def _service_spec(pods: dict[str, str], port: int) -> Object:
    grpc = {"targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}
    return {
        "type": "ClusterIP",
        "selector": pods,
        "ports": [{"name": "grpc"} | _tcp(port) | grpc],
        "publishNotReadyAddresses": False,
    }


def _network_policy(
    factory: ChildFactory, component: Component, callers: list[Object], port: int
) -> Object:
    spec = {
        "podSelector": {"matchLabels": selector(factory.resource, component)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": callers, "ports": [_tcp(port)]},
            # Metrics and probes, which contain no prompt and no secret.
            {"from": [_any_pod()], "ports": [_tcp(HTTP_PORT)]},
        ],
    }
    name = component_name(factory.resource, component)
    return factory.make("NetworkPolicy", name, {"spec": spec}, of=(component, None))


def _any_pod() -> Object:
    """Every pod of the cluster, as a peer."""
    return {"namespaceSelector": {}}


def _tcp(port: int) -> Object:
    return {"port": port, "protocol": "TCP"}
