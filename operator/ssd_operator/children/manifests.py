"""All objects that a resource owns, in the order in which they are applied. Pure."""

from collections.abc import Collection, Mapping

from ssd_operator.api.spec import (
    API_VERSION,
    KIND,
    Autoscaling,
    Keda,
    Object,
    Resource,
    ScalingMode,
    Sharing,
)
from ssd_operator.children.names import (
    CELL_LABEL,
    COMPONENT_LABEL,
    DRAFT_PORT,
    HTTP_PORT,
    NAME_LABEL,
    TARGET_PORT,
    Component,
    component_name,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
    target_deployment,
)
from ssd_operator.children.objects import ChildFactory
from ssd_operator.children.pods import engine_template
from ssd_operator.settings import OperatorSettings

METRIC = "ssd_desired_draft_replicas"
"""Of each target: the drafts that its running sequences would fill at occupancy 1, a fraction."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that every namespace has."""
_OPERATOR_LABELS = {"app.kubernetes.io/name": "ssd-operator"}
"""Labels of the operator's pod."""
_REVISION_HISTORY = 2
_PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""


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
        *network_policies(factory),
        *services(factory),
        *(_targets(factory, cell) for cell in range(resource.spec.num_cells)),
        *(_drafts(factory, cell, replicas[cell]) for cell in draft_cells(resource)),
        *_budgets(factory, replicas),
        *scalers(factory),
        *_monitors(factory),
    ]
    return [each for each in objects if each["kind"] in kinds]


def _accounts(factory: ChildFactory) -> list[Object]:
    """Identities; no token of theirs is mounted anywhere."""
    body = {"automountServiceAccountToken": False}
    return [
        factory.make(
            "ServiceAccount", component_name(factory.resource, each), body, of=(each, None)
        )
        for each in Component
    ]


def _targets(factory: ChildFactory, cell: int) -> Object:
    # Recreate: no node has spare GPUs for a second pod of this size.
    rollout = {"replicas": 1, "strategy": {"type": "Recreate"}}
    name = target_deployment(factory.resource, cell)
    timeout = factory.resource.spec.target.startup_timeout_seconds
    return _deployment(factory, name, (Component.TARGET, cell), timeout, rollout)


def _drafts(factory: ChildFactory, cell: int, num_replicas: int) -> Object:
    one_by_one = {"maxSurge": 0, "maxUnavailable": 1}
    strategy = {"type": "RollingUpdate", "rollingUpdate": one_by_one}
    rollout = {"replicas": num_replicas, "strategy": strategy}
    of = (Component.DRAFT, draft_cell(factory.resource, cell))
    name = draft_deployment(factory.resource, cell)
    timeout = factory.resource.spec.draft.startup_timeout_seconds
    return _deployment(factory, name, of, timeout, rollout)


def _deployment(
    factory: ChildFactory,
    name: str,
    of: tuple[Component, int | None],
    startup_timeout_seconds: int,
    rollout: Object,
) -> Object:
    spec = rollout | {
        "paused": False,
        "selector": {"matchLabels": selector(factory.resource, *of)},
        "template": engine_template(factory.resource, factory.settings, *of),
        "revisionHistoryLimit": _REVISION_HISTORY,
        "progressDeadlineSeconds": startup_timeout_seconds + _PROGRESS_SECONDS,
    }
    return factory.make("Deployment", name, {"spec": spec}, of=of)


def _budgets(factory: ChildFactory, replicas: Mapping[int, int]) -> list[Object]:
    """One pod at a time, from two on.

    A lone target has none, nor have the drafts of a cell: their replacement waits for the target to
    move, so a budget would block a node drain for ever.
    """
    resource, protected = factory.resource, []
    if resource.spec.num_cells > 1:
        protected.append(Component.TARGET)
    if resource.spec.draft.sharing is Sharing.POOL and replicas[0] > 1:
        protected.append(Component.DRAFT)
    return [_budget(factory, component) for component in protected]


def _budget(factory: ChildFactory, component: Component) -> Object:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(factory.resource, component)},
    }
    name, of = component_name(factory.resource, component), (component, None)
    return factory.make("PodDisruptionBudget", name, {"spec": spec}, of=of)


def _monitors(factory: ChildFactory) -> list[Object]:
    resource = factory.resource
    if not resource.spec.observability.pod_monitor:
        return []
    spec = {
        "selector": {"matchLabels": selector(resource)},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
        "podTargetLabels": [NAME_LABEL, COMPONENT_LABEL, CELL_LABEL],
    }
    return [factory.make("PodMonitor", resource.name, {"spec": spec})]


def scalers(factory: ChildFactory) -> list[Object]:
    """The HPA or the ScaledObject ``<name>-draft``; none in the other modes."""
    autoscaling = factory.resource.spec.draft.autoscaling
    if autoscaling is not None and autoscaling.mode is ScalingMode.HPA:
        kind = "HorizontalPodAutoscaler"
        spec = _hpa_spec(factory, autoscaling)
    elif autoscaling is not None and autoscaling.mode is ScalingMode.KEDA and autoscaling.keda:
        kind = "ScaledObject"
        spec = _keda_spec(factory, autoscaling, autoscaling.keda)
    else:
        return []
    spec["scaleTargetRef"] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": factory.resource.name,
    }
    name = component_name(factory.resource, Component.DRAFT)
    return [factory.make(kind, name, {"spec": spec}, of=(Component.DRAFT, None))]


def _hpa_spec(factory: ChildFactory, autoscaling: Autoscaling) -> Object:
    resource = factory.resource
    occupancy = f"{float(autoscaling.target_occupancy):g}"
    # The labels are the PodMonitor's podTargetLabels, as a metrics adapter exposes them.
    labels = {"ssd_dev_name": resource.name, "namespace": resource.namespace}
    external = {
        "metric": {"name": METRIC, "selector": {"matchLabels": labels}},
        "target": {
            "type": "AverageValue",
            "averageValue": occupancy,
        },
    }
    return {
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "External", "external": external}],
        "behavior": _behavior(autoscaling),
    }


def _keda_spec(factory: ChildFactory, autoscaling: Autoscaling, keda: Keda) -> Object:
    resource = factory.resource
    labels = f'namespace="{resource.namespace}",ssd_dev_name="{resource.name}"'
    # Without trailing zeros, as the API server stores it.
    occupancy = f"{float(autoscaling.target_occupancy):g}"
    prometheus = {
        "serverAddress": keda.server_address,
        "query": f"sum({METRIC}{{{labels}}})",
        "threshold": occupancy,
    }
    return {
        "pollingInterval": 15,
        "minReplicaCount": autoscaling.min_replicas,
        "maxReplicaCount": autoscaling.max_replicas,
        # Polls without an answer before KEDA uses its fixed number.
        "fallback": {"failureThreshold": 3, "replicas": keda.fallback_replicas},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": prometheus}],
    }


def _behavior(autoscaling: Autoscaling) -> Object:
    window = autoscaling.scale_down_stabilization_seconds
    return {"scaleUp": _rule(0, 2, 30), "scaleDown": _rule(window, 1, 60)}


def _rule(window_seconds: int, num_pods: int, period_seconds: int) -> Object:
    policy = {"type": "Pods", "value": num_pods, "periodSeconds": period_seconds}
    return {"stabilizationWindowSeconds": window_seconds, "policies": [policy]}


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
