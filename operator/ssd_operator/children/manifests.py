"""All objects that a resource owns, in the order in which they are applied. Pure."""

from collections.abc import Collection, Iterator, Mapping

from ssd_operator.api.spec import API_VERSION, KIND, Object, Resource
from ssd_operator.children.gateway import ANY_POD, clients_of, gateway_objects, tcp
from ssd_operator.children.names import (
    CELL_LABEL,
    COMPONENT_LABEL,
    GATEWAY,
    NAME_LABEL,
    Component,
    component_name,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
    target_deployment,
    targets_service,
)
from ssd_operator.children.objects import KINDS, ChildFactory
from ssd_operator.children.pods import engine_template
from ssd_operator.children.processes import process_of
from ssd_operator.settings import OperatorSettings

METRIC = "ssd_desired_draft_replicas"
"""Of each target: the drafts that its running sequences would fill at occupancy 1, a fraction."""
_PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""
_ANY_TCP_PORT: Object = {"protocol": "TCP"}


def wanted(
    resource: Resource,
    settings: OperatorSettings,
    replicas: Mapping[int, int],
    kinds: Collection[str],
) -> list[Object]:
    """The children of a resource: whole objects of the kinds that are watched.

    Args:
        resource: whose children.
        settings: of the installation.
        replicas: of each draft Deployment, by cell; a Pool has cell 0 only. Draining drafts are
            counted.
        kinds: those that are watched.
    """
    factory = ChildFactory(resource=resource, settings=settings)
    objects = [
        *_accounts(factory),
        *_network_policies(factory),
        *_services(factory),
        *_deployments(factory, replicas),
        *_budgets(factory, replicas),
        *_scalers(factory),
        *_monitors(factory),
        *(gateway_objects(factory) if resource.spec.gateway.enabled else ()),
    ]
    order = tuple(KINDS)
    objects.sort(key=lambda each: order.index(each["kind"]))
    return [each for each in objects if each["kind"] in kinds]


def _accounts(factory: ChildFactory) -> Iterator[Object]:
    """Identities; no token of theirs is mounted anywhere."""
    for each in Component:
        name = component_name(factory.resource, each)
        yield factory.make("ServiceAccount", name, each, automountServiceAccountToken=False)


def _network_policies(factory: ChildFactory) -> Iterator[Object]:
    """Who may reach targets and drafts; none if the resource disables them."""
    resource, namespace = factory.resource, factory.settings.pod_namespace
    operator: Object = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "ssd-operator"}},
    }
    targets: Object = {"podSelector": {"matchLabels": selector(resource, Component.TARGET)}}
    clients = clients_of(resource)
    gateways: Object = {"podSelector": {"matchLabels": selector(resource, GATEWAY)}}
    # Gateways are always clients.
    own = [gateways] if resource.spec.gateway.enabled and resource.spec.security.clients else []
    callers = {Component.TARGET: [*clients, *own], Component.DRAFT: [targets]}
    drafts: Object = {"podSelector": {"matchLabels": selector(resource, Component.DRAFT)}}
    peers = {Component.TARGET: drafts, Component.DRAFT: targets}
    is_collective = resource.spec.transport.channel == "Collective"
    for each in Component if resource.spec.security.network_policy else ():
        process = process_of(resource, each)
        # Pages that no client calls are metrics and probes, without a prompt or a secret.
        allowed: dict[str, list[Object]] = {"grpc": [], "http": [ANY_POD]}
        allowed[process.api] = callers[each]
        allowed["grpc"] = [*allowed["grpc"], operator]
        spec = {
            "podSelector": {"matchLabels": selector(resource, each)},
            "policyTypes": ["Ingress"],
            "ingress": [
                *(
                    {"from": allowed[name], "ports": [tcp(port)]}
                    for name, port in process.ports.items()
                ),
                # gloo and NCCL listen on ports that the system selects.
                *([{"from": [peers[each]], "ports": [_ANY_TCP_PORT]}] if is_collective else []),
            ],
        }
        yield factory.make("NetworkPolicy", component_name(resource, each), each, spec=spec)


def _services(factory: ChildFactory) -> Iterator[Object]:
    """The endpoint, the headless Service for clients that balance, and what targets resolve.

    A target resolves the Service of its drafts every 2 s; there is no other registration. Services
    leave out pods that are not ready, so targets open no link to a draining draft.
    """
    resource = factory.resource
    rows: list[tuple[str, Component, int | None]] = [
        (resource.name, Component.TARGET, None),
        (targets_service(resource), Component.TARGET, None),
        *(
            (draft_deployment(resource, cell), Component.DRAFT, draft_cell(resource, cell))
            for cell in draft_cells(resource)
        ),
    ]
    for name, component, cell in rows:
        process = process_of(resource, component)
        protocol = "kubernetes.io/h2c" if resource.spec.security.tls is None else "https"
        protocols = {"appProtocol": protocol} if process.api == "grpc" else {}
        port = {"name": process.api} | tcp(process.ports[process.api])
        spec = {
            "type": "ClusterIP",
            "selector": selector(resource, component, cell),
            "ports": [port | {"targetPort": process.api} | protocols],
            "publishNotReadyAddresses": False,
        }
        headless = {} if name == resource.name else {"clusterIP": "None"}
        yield factory.make("Service", name, component, cell, spec=spec | headless)


def _deployments(factory: ChildFactory, replicas: Mapping[int, int]) -> Iterator[Object]:
    resource = factory.resource
    # Recreate: no node has spare GPUs for a second pod of this size.
    recreate = {"type": "Recreate"}
    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    rows = [
        *((Component.TARGET, cell, 1, recreate) for cell in range(resource.spec.num_cells)),
        *(
            (Component.DRAFT, draft_cell(resource, cell), replicas[cell], one_by_one)
            for cell in draft_cells(resource)
        ),
    ]
    for component, cell, number, strategy in rows:
        is_target = component is Component.TARGET
        process = resource.spec.target if is_target else resource.spec.draft
        spec = {
            "replicas": number,
            "strategy": strategy,
            "paused": False,
            "selector": {"matchLabels": selector(resource, component, cell)},
            "template": engine_template(resource, factory.settings, component, cell),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": process.startup_timeout_seconds + _PROGRESS_SECONDS,
        }
        name = (target_deployment if is_target else draft_deployment)(resource, cell or 0)
        yield factory.make("Deployment", name, component, cell, spec=spec)


def _budgets(factory: ChildFactory, replicas: Mapping[int, int]) -> Iterator[Object]:
    """One pod at a time, from two on.

    A lone target has none, nor have the drafts of a cell: their replacement waits for the target to
    move, so a budget would block a node drain for ever.
    """
    resource = factory.resource
    num_pooled = replicas[0] if resource.spec.draft.sharing == "Pool" else 0
    numbers = {Component.TARGET: resource.spec.num_cells, Component.DRAFT: num_pooled}
    for each, number in numbers.items():
        spec = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(resource, each)},
        }
        if number > 1:
            name = component_name(resource, each)
            yield factory.make("PodDisruptionBudget", name, each, spec=spec)


def _scalers(factory: ChildFactory) -> Iterator[Object]:
    """The HPA or the ScaledObject ``<name>-draft``; none in the other modes."""
    resource, scaling = factory.resource, factory.resource.spec.draft.autoscaling
    if scaling is None or scaling.mode not in ("HPA", "KEDA"):
        return
    # Without trailing zeros, as the API server stores it.
    occupancy = f"{float(scaling.target_occupancy):g}"
    window = scaling.scale_down_stabilization_seconds
    behavior = {"scaleUp": _rule(0, 2, 30), "scaleDown": _rule(window, 1, 60)}
    if scaling.mode == "HPA":
        # The labels are the PodMonitor's podTargetLabels, as a metrics adapter exposes them.
        labels = {"ssd_dev_name": resource.name, "namespace": resource.namespace}
        external = {
            "metric": {"name": METRIC, "selector": {"matchLabels": labels}},
            "target": {"type": "AverageValue", "averageValue": occupancy},
        }
        kind = "HorizontalPodAutoscaler"
        spec: Object = {
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "External", "external": external}],
            "behavior": behavior,
        }
    else:
        assert scaling.keda is not None, "a rule of the definition requires it"
        chosen = f'namespace="{resource.namespace}",ssd_dev_name="{resource.name}"'
        metadata = {
            "serverAddress": scaling.keda.server_address,
            "query": f"sum({METRIC}{{{chosen}}})",
            "threshold": occupancy,
        }
        trigger = {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}
        kind = "ScaledObject"
        spec = {
            "pollingInterval": 15,
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            # Polls without an answer before KEDA uses its fixed number.
            "fallback": {"failureThreshold": 3, "replicas": scaling.keda.fallback_replicas},
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [trigger],
        }
    spec["scaleTargetRef"] = {"apiVersion": API_VERSION, "kind": KIND, "name": resource.name}
    yield factory.make(kind, component_name(resource, Component.DRAFT), Component.DRAFT, spec=spec)


def _rule(window_seconds: int, num_pods: int, period_seconds: int) -> Object:
    policy = {"type": "Pods", "value": num_pods, "periodSeconds": period_seconds}
    return {"stabilizationWindowSeconds": window_seconds, "policies": [policy]}


def _monitors(factory: ChildFactory) -> Iterator[Object]:
    resource = factory.resource
    spec = {
        "selector": {"matchLabels": selector(resource)},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
        "podTargetLabels": [NAME_LABEL, COMPONENT_LABEL, CELL_LABEL],
    }
    if resource.spec.observability.pod_monitor:
        yield factory.make("PodMonitor", resource.name, spec=spec)
