"""Objects of other autoscalers, which write the resource's scale and never a Deployment."""

from ssd_operator.api.spec import API_VERSION, KIND, Autoscaling, Keda, Object, ScalingMode
from ssd_operator.children.names import Component, component_name
from ssd_operator.children.objects import ChildFactory

METRIC = "ssd_desired_draft_replicas"
"""Of each target: the drafts that its running sequences would fill at occupancy 1, a fraction."""


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
    # The labels are the PodMonitor's podTargetLabels, as a metrics adapter exposes them.
    labels = {"ssd_dev_name": resource.name, "namespace": resource.namespace}
    external = {
        "metric": {"name": METRIC, "selector": {"matchLabels": labels}},
        "target": {"type": "AverageValue", "averageValue": _threshold(autoscaling)},
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
    prometheus = {
        "serverAddress": keda.server_address,
        "query": f"sum({METRIC}{{{labels}}})",
        "threshold": _threshold(autoscaling),
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


def _threshold(autoscaling: Autoscaling) -> str:
    """The occupancy without trailing zeros, as the API server stores it."""
    return f"{float(autoscaling.target_occupancy):g}"
