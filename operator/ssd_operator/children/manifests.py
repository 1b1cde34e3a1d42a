"""All objects that a resource owns, in the order in which they are applied. Pure."""

from collections.abc import Iterator, Mapping

from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.gateway import gateway_template
from ssd_operator.children.names import (
    Component,
    component_name,
    components_of,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
    target_deployment,
    targets_service,
)
from ssd_operator.children.objects import KINDS, ChildFactory
from ssd_operator.children.pods import engine_template
from ssd_operator.children.processes import has_tls, process_of
from ssd_operator.settings import OperatorSettings

_PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""
_ANY_POD: Object = {"namespaceSelector": {}}
"""Every pod of the cluster, as a peer."""
_RECREATE: Object = {"type": "Recreate"}
"""No node has spare GPUs for a second target."""


def wanted(
    resource: Resource,
    settings: OperatorSettings,
    replicas: Mapping[int, int],
) -> list[Object]:
    """The children of a resource: whole objects.

    Args:
        resource: whose children.
        settings: of the installation.
        replicas: of each draft Deployment, by cell; a Pool has cell 0 only. Draining drafts are
            counted.
    """
    factory = ChildFactory(resource=resource, settings=settings)
    objects = [
        *_accounts(factory),
        *_network_policies(factory),
        *_services(factory),
        *_deployments(factory, replicas),
        *_budgets(factory, replicas),
    ]
    order = tuple(KINDS)
    return sorted(objects, key=lambda each: order.index(each["kind"]))


def _accounts(factory: ChildFactory) -> Iterator[Object]:
    """Identities; no token of theirs is mounted anywhere."""
    for each in components_of(factory.resource):
        name = component_name(factory.resource, each)
        yield factory.make("ServiceAccount", name, each, automountServiceAccountToken=False)


def _network_policies(factory: ChildFactory) -> Iterator[Object]:
    """Who may reach the pods; none if the resource disables them."""
    resource = factory.resource
    if not resource.spec.security.network_policy:
        return
    namespace = {"kubernetes.io/metadata.name": factory.settings.pod_namespace}
    operator = _pods({"app.kubernetes.io/name": "ssd-operator"}) | {
        "namespaceSelector": {"matchLabels": namespace}
    }
    targets, drafts, gateways = (_pods(selector(resource, each)) for each in Component)
    given = [dict(each) for each in resource.spec.security.clients]
    clients = given or [_ANY_POD]
    # Gateways are always clients.
    own = [gateways] if given and resource.spec.gateway.enabled else []
    callers = {
        Component.TARGET: [*clients, *own],
        Component.DRAFT: [targets],
        Component.GATEWAY: clients,
    }
    for each in components_of(resource):
        process = process_of(resource, each)
        # Pages that no client calls are metrics and probes, without a prompt or a secret.
        allowed = {"grpc": [operator], "http": [_ANY_POD]}
        allowed[process.api] = callers[each] + ([operator] if process.api == "grpc" else [])
        ingress = [
            {"from": allowed[name], "ports": [_tcp(port)]} for name, port in process.ports.items()
        ]
        if resource.spec.transport.channel == "Collective" and each is not Component.GATEWAY:
            # gloo and NCCL listen on ports that the system selects.
            peer = drafts if each is Component.TARGET else targets
            ingress.append({"from": [peer], "ports": [{"protocol": "TCP"}]})
        spec = _pods(selector(resource, each)) | {"policyTypes": ["Ingress"], "ingress": ingress}
        yield factory.make("NetworkPolicy", component_name(resource, each), each, spec=spec)


def _services(factory: ChildFactory) -> Iterator[Object]:
    """The endpoint, the headless Service for clients that balance, and what targets resolve.

    A target resolves the Service of its drafts every 2 s; there is no other registration. Services
    leave out pods that are not ready, so targets open no link to a draining draft.
    """
    resource = factory.resource
    gateway = component_name(resource, Component.GATEWAY)
    rows: list[tuple[str, Component, int | None]] = [
        (resource.name, Component.TARGET, None),
        (targets_service(resource), Component.TARGET, None),
        *(
            (draft_deployment(resource, cell), Component.DRAFT, draft_cell(resource, cell))
            for cell in draft_cells(resource)
        ),
        *([(gateway, Component.GATEWAY, None)] if resource.spec.gateway.enabled else []),
    ]
    for name, component, cell in rows:
        process = process_of(resource, component)
        plain = {"appProtocol": "kubernetes.io/h2c"} if process.api == "grpc" else {}
        is_tls = has_tls(resource, component, process.api)
        protocols = {"appProtocol": "https"} if is_tls else plain
        port = {"name": process.api} | _tcp(process.ports[process.api])
        spec = {
            "type": "ClusterIP",
            "selector": selector(resource, component, cell),
            "ports": [port | {"targetPort": process.api} | protocols],
            "publishNotReadyAddresses": False,
        }
        headless = {} if name in (resource.name, gateway) else {"clusterIP": "None"}
        yield factory.make("Service", name, component, cell, spec=spec | headless)


def _deployments(factory: ChildFactory, replicas: Mapping[int, int]) -> Iterator[Object]:
    resource, spec = factory.resource, factory.resource.spec
    for cell in range(spec.num_cells):
        yield _deployment(factory, Component.TARGET, cell, 1, _RECREATE)
    for cell in draft_cells(resource):
        own_cell = draft_cell(resource, cell)
        yield _deployment(factory, Component.DRAFT, own_cell, replicas[cell], _rolling(0, 1))
    if spec.gateway.enabled:
        number = spec.gateway.replicas
        yield _deployment(factory, Component.GATEWAY, None, number, _rolling(1, 0))


def _deployment(
    factory: ChildFactory, component: Component, cell: int | None, replicas: int, strategy: Object
) -> Object:
    resource, settings = factory.resource, factory.settings
    if component is Component.GATEWAY:
        name, seconds = component_name(resource, component), 0
        template = gateway_template(resource, settings)
    else:
        is_target = component is Component.TARGET
        name = (target_deployment if is_target else draft_deployment)(resource, cell or 0)
        process = resource.spec.target if is_target else resource.spec.draft
        seconds = process.startup_timeout_seconds
        template = engine_template(resource, settings, component, cell)
    spec = {
        "replicas": replicas,
        "strategy": strategy,
        "paused": False,
        "selector": {"matchLabels": selector(resource, component, cell)},
        "template": template,
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": seconds + _PROGRESS_SECONDS,
    }
    return factory.make("Deployment", name, component, cell, spec=spec)


def _budgets(factory: ChildFactory, replicas: Mapping[int, int]) -> Iterator[Object]:
    """One pod at a time, from two on.

    A lone target has none, nor have the drafts of a cell: their replacement waits for the target to
    move, so a budget would block a node drain for ever.
    """
    resource, spec = factory.resource, factory.resource.spec
    numbers = {
        Component.TARGET: spec.num_cells,
        Component.DRAFT: replicas[0] if spec.draft.sharing == "Pool" else 0,
        Component.GATEWAY: spec.gateway.replicas,
    }
    for each in components_of(resource):
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(resource, each)},
        }
        if numbers[each] > 1:
            name = component_name(resource, each)
            yield factory.make("PodDisruptionBudget", name, each, spec=budget)


def _pods(labels: Mapping[str, str]) -> Object:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _tcp(port: int) -> Object:
    return {"port": port, "protocol": "TCP"}


def _rolling(surge: int, unavailable: int) -> Object:
    limits = {"maxSurge": surge, "maxUnavailable": unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": limits}
