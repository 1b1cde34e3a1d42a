"""The pods of targets and drafts: the only place that draws them.

A template holds nothing that scaling, policies or the operator's version change, so none of these
replaces a pod; ``ssd.dev/revision`` is the hash of the rest.

*Decision*: an init container fetches a model, although its pod holds the GPUs meanwhile. *Because*
an EmptyDir belongs to the pod and a HostPath to the node that the scheduler selects, so nothing can
be fetched before the pod is placed. *Not chosen*: a fetch pod without GPUs for the cache type PVC;
a volume that is bound to its first consumer would follow that pod to a zone without GPUs. The
chart's sample Job fills such a claim in advance. *Revisit when* fetches hold GPUs for longer than a
model loads, in spite of the Job.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ssd_operator.api import reserved
from ssd_operator.api.quantity import parse_quantity
from ssd_operator.api.spec import (
    Accelerator,
    Draft,
    Object,
    PodTemplate,
    Resource,
    Source,
    Target,
)
from ssd_operator.children import environment, node_folders, placement
from ssd_operator.children.config import OperatorConfig
from ssd_operator.children.names import (
    DRAFT_PORT,
    FETCH,
    HTTP_PORT,
    RESTART_ANNOTATION,
    REVISION_LABEL,
    TARGET_PORT,
    Component,
    account,
    labels_of,
)
from ssd_operator.children.node_folders import USER
from ssd_operator.children.objects import digest

REVISION_DIGITS = 10
PRE_STOP_SECONDS = 5
"""Endpoints forget a target for this long before it refuses new calls."""
KILL_SECONDS = 10
"""Grace of a process that a probe found hung: it does not drain, and the pod's own grace period,
which is made for drains, would keep it for minutes."""

_CPU_DEFAULTS = {
    Component.TARGET: {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "256Mi"},
    Component.DRAFT: {"cpu": "200m", "memory": "768Mi", "ephemeral-storage": "256Mi"},
}
_CPU_LIMITS = {"memory": "2Gi"}
_GPU_DEFAULTS = {
    Component.TARGET: {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "4Gi"},
    Component.DRAFT: {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "4Gi"},
}
_TRIED_IN_POD = (
    "serviceAccountName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "tolerations",
    "imagePullSecrets",
)
_TRIED_IN_CONTAINER = (
    "image",
    "imagePullPolicy",
    "command",
    "env",
    "volumeMounts",
    "terminationMessagePath",
    "terminationMessagePolicy",
)
"""What a preflight takes over from a target; what it may not hold is left out by not being here."""
_PREFLIGHT_RESOURCES: Object = {
    "requests": {"cpu": "100m", "memory": "0", "ephemeral-storage": "0"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""It comes beside what serves, so it reserves little; without any CPU it had one second of CPU time
in half a minute on a busy node. All are named, because a quota may ask for each."""
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_GPU_SHARED_MEMORY = {Component.TARGET: "8Gi", Component.DRAFT: "1Gi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pod:
    """What differs between the two kinds of pods."""

    component: Component
    cell: int | None
    """None in a Pool, which has no cells."""
    image: str
    port: int
    source: Source
    template: PodTemplate
    resources: Object
    startup_timeout_seconds: int
    grace_seconds: int
    affinity: Object
    environment: list[Object]
    lifecycle: Object


def target_template(resource: Resource, config: OperatorConfig, cell: int) -> Object:
    """Pod template of a cell's target."""
    target = resource.spec.target
    gpus = {target.gpu_resource: str(target.tensor_parallel_size)}
    resources = _resources(resource, Component.TARGET, target, gpus)
    pod = _Pod(
        component=Component.TARGET,
        cell=cell,
        image=target.image or config.target_image,
        port=TARGET_PORT,
        source=target.source,
        template=resource.spec.pod_template.overridden(target.pod_template),
        resources=resources,
        startup_timeout_seconds=target.startup_timeout_seconds,
        grace_seconds=target.drain_seconds + 30,
        affinity=placement.target_affinity(resource, cell),
        environment=environment.target_environment(resource, cell, _num_threads(resources)),
        lifecycle={"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    )
    return _template(resource, config, pod)


def draft_template(resource: Resource, config: OperatorConfig, cell: int | None) -> Object:
    """Pod template of a cell's drafts, or of the Pool's (``cell`` None)."""
    draft = resource.spec.draft
    resources = _resources(resource, Component.DRAFT, draft, {draft.gpu_resource: "1"})
    pod = _Pod(
        component=Component.DRAFT,
        cell=cell,
        image=draft.image or config.draft_image,
        port=DRAFT_PORT,
        source=draft.source,
        template=resource.spec.pod_template.overridden(draft.pod_template),
        resources=resources,
        startup_timeout_seconds=draft.startup_timeout_seconds,
        grace_seconds=draft.drain_seconds + 25,
        affinity=placement.draft_affinity(resource, cell),
        environment=environment.draft_environment(resource, cell, _num_threads(resources)),
        lifecycle={},
    )
    return _template(resource, config, pod)


def preflight_spec(deployment: Object, node: str) -> Object:
    """Spec of a pod that tries a target's image and settings, and loads nothing.

    It takes over what the image is pulled with and what the settings are made of. Where the target
    wants to be, and what it holds (GPUs, ports, privileges, a claim for its cache), is its own.

    Args:
        deployment: of the target, as it should be.
        node: where the present target runs.
    """
    template = deployment["spec"]["template"]["spec"]
    container = template["containers"][0]
    # The name of a node is a field: the label for it may hold another one.
    place = {"key": "metadata.name", "operator": "In", "values": [node]}
    here = {"nodeSelectorTerms": [{"matchFields": [place]}]}
    is_read_only = container["securityContext"]["readOnlyRootFilesystem"]
    return {key: template[key] for key in _TRIED_IN_POD if key in template} | {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": deployment["spec"]["progressDeadlineSeconds"],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": here}},
        "volumes": [
            {"name": each["name"], "emptyDir": {}} if each["name"] in ("cache", "tmp") else each
            for each in template["volumes"]
        ],
        "containers": [
            {key: container[key] for key in _TRIED_IN_CONTAINER}
            | {
                "name": "preflight",
                "args": ["--print-config"],
                "resources": _PREFLIGHT_RESOURCES,
                "securityContext": _unprivileged(is_read_only=is_read_only),
            }
        ],
    }


def _template(resource: Resource, config: OperatorConfig, pod: _Pod) -> Object:
    annotations = dict(pod.template.annotations)
    if restart := resource.annotations.get(RESTART_ANNOTATION):
        annotations[RESTART_ANNOTATION] = restart
    labels = dict(pod.template.labels) | labels_of(resource, pod.component, pod.cell)
    spec = _pod_spec(resource, config, pod)
    labels[REVISION_LABEL] = digest(
        {"labels": labels, "annotations": annotations, "spec": spec}, REVISION_DIGITS
    )
    return {"metadata": {"labels": labels} | _present(annotations=annotations), "spec": spec}


def _pod_spec(resource: Resource, config: OperatorConfig, pod: _Pod) -> Object:
    template, is_on_hub = pod.template, environment.is_on_hub(pod.source)
    spec: Object = {
        "serviceAccountName": account(resource, pod.component),
        "automountServiceAccountToken": False,
        # A Service called ssd-target would inject SSD_TARGET_PORT=tcp://…, a setting of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(resource, config, pod)],
        "volumes": [*_volumes(resource, pod), *template.volumes],
    }
    return spec | _present(
        affinity=pod.affinity,
        initContainers=[
            *node_folders.init_containers(resource, pod.image, config.image_pull_policy),
            *([_fetch_container(resource, config, pod)] if is_on_hub else []),
        ],
        nodeSelector=dict(template.node_selector),
        tolerations=[*placement.tolerations(resource), *template.tolerations],
        priorityClassName=template.priority_class_name,
        runtimeClassName=template.runtime_class_name,
        schedulerName=template.scheduler_name,
        imagePullSecrets=list(template.image_pull_secrets),
    )


def _container(resource: Resource, config: OperatorConfig, pod: _Pod) -> Object:
    container: Object = {
        "name": str(pod.component),
        "image": pod.image,
        "imagePullPolicy": config.image_pull_policy,
        # Said, though images know it: another process's image ends at once instead of serving.
        "command": ["python", "-m", f"ssd_{pod.component}"],
        "env": environment.merged(pod.environment, pod.template.env),
        "ports": [
            {"name": "grpc", "containerPort": pod.port, "protocol": "TCP"},
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
        ],
        "resources": pod.resources,
        "securityContext": _unprivileged(
            is_read_only=resource.spec.security.read_only_root_filesystem
        ),
        "startupProbe": _killing_probe(
            "/readyz", period=2, timeout=2, failures=math.ceil(pod.startup_timeout_seconds / 2)
        ),
        # The heart-beat of the step thread, never drafts or load: those restart nothing.
        "livenessProbe": _killing_probe("/livez", period=10, timeout=5, failures=6),
        "readinessProbe": _probe("/readyz", period=2, timeout=2, failures=2),
        "terminationMessagePath": environment.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*_volume_mounts(pod), *pod.template.volume_mounts],
    }
    return container | _present(lifecycle=pod.lifecycle)


def _fetch_container(resource: Resource, config: OperatorConfig, pod: _Pod) -> Object:
    """Fetches a model of the hub into the cache. It reserves nothing beside what its engine does.

    What the user adds comes along: a proxy, or a certificate of the hub's mirror.
    """
    return {
        "name": FETCH,
        "image": pod.image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["python", "-m", "ssd.fetch"],
        "env": environment.merged(environment.fetch_environment(pod.source), pod.template.env),
        "resources": _present(
            **{
                part: {name: size for name, size in sizes.items() if name in _PLAIN_RESOURCES}
                for part, sizes in pod.resources.items()
            }
        ),
        "securityContext": _unprivileged(
            is_read_only=resource.spec.security.read_only_root_filesystem
        ),
        "terminationMessagePath": environment.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": reserved.SCRATCH_FOLDER},
            {"name": "cache", "mountPath": reserved.CACHE_FOLDER},
            *pod.template.volume_mounts,
        ],
    }


def _unprivileged(*, is_read_only: bool) -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": is_read_only,
    }


def _killing_probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    """A probe after whose failure the kubelet restarts the container."""
    probe = _probe(path, period=period, timeout=timeout, failures=failures)
    return probe | {"terminationGracePeriodSeconds": KILL_SECONDS}


def _probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _volumes(resource: Resource, pod: _Pod) -> list[Object]:
    is_gpu = resource.spec.accelerator is Accelerator.NVIDIA
    size = _GPU_SHARED_MEMORY[pod.component] if is_gpu else "64Mi"
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", **_cache(resource)},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    if claim := environment.volume_claim(pod.source):
        claimed = {"claimName": claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claimed})
    return volumes


def _volume_mounts(pod: _Pod) -> list[Object]:
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": reserved.SCRATCH_FOLDER},
        {"name": "cache", "mountPath": reserved.CACHE_FOLDER},
    ]
    if environment.is_on_hub(pod.source):
        # Weights that pods share: an engine compiles beside them and never writes to them.
        where = {"mountPath": reserved.HUB_FOLDER, "subPath": reserved.HUB_SUBFOLDER}
        mounts.append({"name": "cache", **where, "readOnly": True})
    mounts.append({"name": "shm", "mountPath": reserved.SHARED_MEMORY})
    if environment.volume_claim(pod.source):
        mounts.append({"name": "models", "mountPath": reserved.MODELS_FOLDER, "readOnly": True})
    return mounts


def _cache(resource: Resource) -> Object:
    cache = resource.spec.model_cache
    match cache.type:
        case "PVC":
            return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
        case "HostPath":
            return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
        case _:
            return {"emptyDir": _present(sizeLimit=cache.size_limit)}


def _resources(
    resource: Resource, component: Component, process: Target | Draft, gpus: Mapping[str, str]
) -> Object:
    """Defaults, except for each key that the user names, and the GPUs.

    A key named in requests or limits alone loses both defaults: a request above our own limit would
    be refused, and a limit without a request is also the request.
    """
    requests: Mapping[str, str] = process.resources.get("requests", {})
    limits: Mapping[str, str] = process.resources.get("limits", {})
    is_gpu = resource.spec.accelerator is Accelerator.NVIDIA
    default_requests = (_GPU_DEFAULTS if is_gpu else _CPU_DEFAULTS)[component]
    if environment.is_on_hub(process.source) and resource.spec.model_cache.size_limit:
        disk = {"ephemeral-storage": resource.spec.model_cache.size_limit}
        default_requests = default_requests | disk
    default_limits = {} if is_gpu else _CPU_LIMITS
    named = {*requests, *limits}
    return _present(
        requests={key: default_requests[key] for key in default_requests if key not in named}
        | dict(requests),
        limits={key: default_limits[key] for key in default_limits if key not in named}
        | dict(limits)
        | (dict(gpus) if is_gpu else {}),
    )


def _num_threads(resources: Object) -> int:
    """One thread per requested core, rounded up."""
    requested = resources.get("requests", {}).get("cpu")
    if requested is None:
        requested = resources["limits"]["cpu"]
    return max(1, math.ceil(parse_quantity(requested)))


def _present(**fields: object) -> Object:
    """Fields that hold something: the API server stores no empty text, list or map."""
    return {name: value for name, value in fields.items() if value}
