"""Autoscalers of others: they write the resource's scale, never a Deployment."""

from ssd_operator.api.spec import API_VERSION, KIND, Autoscaling, Object, Resource, ScalingMode
from ssd_operator.children.names import Component, account
from ssd_operator.children.objects import ChildFactory

METRIC = "ssd_desired_draft_replicas"
"""Of each target: the drafts that its running sequences would fill, a fraction."""
UP_PODS, UP_SECONDS = 2, 30
DOWN_PODS, DOWN_SECONDS = 1, 60
KEDA_POLLING_SECONDS = 15
KEDA_FAILURES = 3
"""Polls without an answer before KEDA falls back to its fixed number."""


def scalers(factory: ChildFactory) -> list[Object]:
    """The HPA or the ScaledObject ``<name>-draft``; nothing in the other modes."""
    resource = factory.resource
    autoscaling = resource.spec.draft.autoscaling
    if autoscaling is None:
        return []
    match autoscaling.mode:
        case ScalingMode.HPA:
            api, kind = "autoscaling/v2", "HorizontalPodAutoscaler"
            spec = _hpa_spec(resource, autoscaling)
        case ScalingMode.KEDA:
            api, kind = "keda.sh/v1alpha1", "ScaledObject"
            spec = _keda_spec(resource, autoscaling)
        case _:
            return []
    name = account(resource, Component.DRAFT)
    return [factory.make(api, kind, name, {"spec": spec}, of=(Component.DRAFT, None))]


def _scale_target(resource: Resource) -> Object:
    return {"apiVersion": API_VERSION, "kind": KIND, "name": resource.name}


def _hpa_spec(resource: Resource, autoscaling: Autoscaling) -> Object:
    # The labels are the PodMonitor's podTargetLabels, as an adapter hands them on.
    labels = {"ssd_dev_name": resource.name, "namespace": resource.namespace}
    external = {
        "metric": {"name": METRIC, "selector": {"matchLabels": labels}},
        "target": {"type": "AverageValue", "averageValue": _decimal(autoscaling)},
    }
    return {
        "scaleTargetRef": _scale_target(resource),
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "External", "external": external}],
        "behavior": _behavior(autoscaling),
    }


def _keda_spec(resource: Resource, autoscaling: Autoscaling) -> Object:
    labels = f'namespace="{resource.namespace}",ssd_dev_name="{resource.name}"'
    prometheus = {
        "serverAddress": autoscaling.keda_server_address,
        "query": f"sum({METRIC}{{{labels}}})",
        "threshold": _decimal(autoscaling),
    }
    return {
        "scaleTargetRef": _scale_target(resource),
        "pollingInterval": KEDA_POLLING_SECONDS,
        "minReplicaCount": autoscaling.min_replicas,
        "maxReplicaCount": autoscaling.max_replicas,
        "fallback": {
            "failureThreshold": KEDA_FAILURES,
            "replicas": autoscaling.keda_fallback_replicas,
        },
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": prometheus}],
    }


def _behavior(autoscaling: Autoscaling) -> Object:
    window = autoscaling.scale_down_stabilization_seconds
    return {
        "scaleUp": _rule(0, UP_PODS, UP_SECONDS),
        "scaleDown": _rule(window, DOWN_PODS, DOWN_SECONDS),
    }


def _rule(window_seconds: int, num_pods: int, period_seconds: int) -> Object:
    policy = {"type": "Pods", "value": num_pods, "periodSeconds": period_seconds}
    return {"stabilizationWindowSeconds": window_seconds, "policies": [policy]}


def _decimal(autoscaling: Autoscaling) -> str:
    """The occupancy in text: the metric counts drafts at occupancy 1."""
    return f"{autoscaling.target_occupancy:g}"
