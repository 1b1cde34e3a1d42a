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
    NAME_LABEL,
    Component,
    component_name,
    draft_cell,
    draft_cells,
    draft_deployment,
    selector,
    target_deployment,
)
from ssd_operator.children.network import network_policies, services
from ssd_operator.children.objects import ChildFactory
from ssd_operator.children.pods import engine_template
from ssd_operator.settings import OperatorSettings

METRIC = "ssd_desired_draft_replicas"
"""Of each target: the drafts that its running sequences would fill at occupancy 1, a fraction."""
_REVISION_HISTORY = 2
_PROGRESS_SECONDS = 600
"""A Deployment may take its start-up timeout and this long, for pulls and scheduling."""


def wanted(
    resource: Resource,
    settings: OperatorSettings,
    replicas: Mapping[int, int],
    kinds: Collection[str],
) -> list[Object]:
    """The children of a resource.

    Args:
        resource: as it was parsed.
        settings: of the installation.
        replicas: of each draft Deployment, by cell; a Pool has cell 0 only. Draining drafts are
            counted.
        kinds: those that are watched; objects of others are left out.

    Returns:
        Whole objects: accounts, policies, Services, targets, drafts, budgets, scalers, monitor.

    Raises:
        KeyError: a cell has no number.
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
