"""Pod templates of targets and drafts; no other module builds them.

A template contains nothing that scaling, policies or the operator's version change, so none of
these replaces a pod; ``ssd.dev/revision`` is the hash of the rest.

*Decision*: an init container fetches a model, although its pod holds the GPUs meanwhile. *Because*
an EmptyDir belongs to the pod and a HostPath to the node that the scheduler selects, so nothing can
be fetched before the pod is placed. *Not chosen*: a fetch pod without GPUs for the cache type PVC;
a volume that is bound to its first consumer would follow that pod to a zone without GPUs. The
chart's sample Job fills such a claim in advance. *Revisit when* fetches hold GPUs for longer than a
model loads, in spite of the Job.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ssd_operator.api import reserved
from ssd_operator.api.fields import parse_quantity
from ssd_operator.api.pod_template import PodTemplate
from ssd_operator.api.spec import DraftSpec, Object, Resource, Source, TargetSpec
from ssd_operator.children import environment, placement
from ssd_operator.children.environment import is_on_hub, volume_claim
from ssd_operator.children.names import (
    FETCH,
    RESTART_ANNOTATION,
    REVISION_LABEL,
    SCHEME_ANNOTATION,
    Component,
    component_name,
    labels_of,
    spiffe_id,
)
from ssd_operator.children.objects import digest
from ssd_operator.children.processes import Start, has_tls, process_of
from ssd_operator.settings import OperatorSettings

REVISION_DIGITS = 10
_PRE_STOP_SECONDS = 5
"""Endpoints remove a target during this time, before it refuses new calls."""
KILL: Object = {"terminationGracePeriodSeconds": 10}
"""Grace period of a process that does not start: it does not drain, and the grace period of the
pod, which allows a drain, would keep it for minutes."""
_KILL_AT_ONCE: Object = {"terminationGracePeriodSeconds": 1}
"""Grace period of a process that hangs: it receives no SIGTERM."""

_MARGIN_SECONDS = {Component.TARGET: 30, Component.DRAFT: 25}
"""From the longest drain to the kill of the process."""
USER = 10001
"""uid and gid of the images' user ``ssd``."""
_SECRET_FOLDERS = {
    reserved.TLS_VOLUME: reserved.TLS_FOLDER,
    reserved.TOKENS_VOLUME: reserved.TOKENS_FOLDER,
}
SECRET_MODE = 0o440
"""The process reads files of Secrets as their group."""
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
# A folder that a person has prepared, or that holds files, keeps its owner.
_OPEN_CACHE = (
    f"import os; p = {reserved.CACHE_FOLDER!r}; "
    f"os.stat(p).st_uid or os.listdir(p) or os.chown(p, {USER}, {USER})"
)
_REQUESTS = {
    ("cpu", Component.TARGET): {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "256Mi"},
    ("cpu", Component.DRAFT): {"cpu": "200m", "memory": "768Mi", "ephemeral-storage": "256Mi"},
    ("nvidia", Component.TARGET): {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "4Gi"},
    ("nvidia", Component.DRAFT): {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "4Gi"},
}
_REQUESTS_BESIDE_GPUS = {"cpu": "16", "memory": "32Gi", "ephemeral-storage": "4Gi"}
"""Of a draft on CPUs of a GPU node, which the static CPU manager allocates to it alone."""
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_PREFLIGHT_RESOURCES: Object = {
    "requests": {"cpu": "100m", "memory": "0", "ephemeral-storage": "0"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""It runs beside the serving pods, so it reserves little; without any CPU it received one second of
CPU time in half a minute on a busy node. All are named, because a quota may require each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What the parts of one pod template depend on."""

    resource: Resource
    settings: OperatorSettings
    component: Component
    cell: int | None
    process: TargetSpec | DraftSpec
    template: PodTemplate
    image: str
    resources: Object


def engine_template(
    resource: Resource, settings: OperatorSettings, component: Component, cell: int | None
) -> Object:
    """Pod template of a cell's target or drafts; ``cell`` is None for the drafts of a Pool."""
    spec = resource.spec
    is_target = component is Component.TARGET
    process = spec.target if is_target else spec.draft
    engine = _Engine(
        resource=resource,
        settings=settings,
        component=component,
        cell=cell,
        process=process,
        template=spec.pod_template.overridden(process.pod_template),
        image=process.image or process_of(resource, component).image(settings),
        resources=_resources(resource, component, process),
    )
    return make_template(resource, component, _pod_spec(engine), cell, engine.template)


def make_template(
    resource: Resource,
    component: Component,
    spec: Object,
    cell: int | None = None,
    added: PodTemplate | None = None,
) -> Object:
    """A template of pods with this spec, the labels and annotations of the user, and ours."""
    added = added or PodTemplate()
    restart = resource.annotations.get(RESTART_ANNOTATION)
    annotations = added.annotations | ({RESTART_ANNOTATION: restart} if restart else {})
    if has_tls(resource, component, "http"):
        annotations = annotations | {SCHEME_ANNOTATION: "https"}
    labels = added.labels | labels_of(resource, component, cell)
    hashed = {"labels": labels, "annotations": annotations, "spec": spec}
    labels = labels | {REVISION_LABEL: digest(hashed, REVISION_DIGITS)}
    return {"metadata": {"labels": labels} | present(annotations=annotations), "spec": spec}


def plain_pod(
    resource: Resource, component: Component, grace_seconds: int, **fields: object
) -> Object:
    """Spec of a pod without privileges; empty ``fields`` are left out."""
    return {
        "serviceAccountName": component_name(resource, component),
        "automountServiceAccountToken": False,
        # A Service called ssd-target would inject SSD_TARGET_PORT=tcp://…, a setting of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": POD_SECURITY,
        **present(**fields),
    }


def preflight_spec(deployment: Object, node: str) -> Object:
    """Spec of a pod that tests a target's image and settings, and loads nothing.

    It is a copy of the target without its placement and without what it holds: GPUs, ports,
    privileges, a claim for its cache.
    """
    template = deployment["spec"]["template"]["spec"]
    engine = template["containers"][0]
    is_read_only = engine["securityContext"]["readOnlyRootFilesystem"]
    container = _without(engine, "ports", "lifecycle", *_PROBES) | {
        "name": "preflight",
        "args": [*engine.get("args", ()), "--print-config"],
        "resources": copy.deepcopy(_PREFLIGHT_RESOURCES),
        "securityContext": unprivileged(is_read_only=is_read_only),
    }
    return _without(template, "initContainers", "nodeSelector", "priorityClassName") | {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": deployment["spec"]["progressDeadlineSeconds"],
        "terminationGracePeriodSeconds": 1,
        "affinity": affinity_to(node),
        "volumes": [
            {"name": each["name"], "emptyDir": {}} if each["name"] in ("cache", "tmp") else each
            for each in template["volumes"]
        ],
        "containers": [container],
    }


def affinity_to(node: str) -> Object:
    """Affinity of a pod that may run on this node alone."""
    # The name of a node is a field: the label for it may hold another one.
    place = {"key": "metadata.name", "operator": "In", "values": [node]}
    here = {"nodeSelectorTerms": [{"matchFields": [place]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": here}}


def _without(fields: Object, *names: str) -> Object:
    return {name: value for name, value in fields.items() if name not in names}


def _pod_spec(engine: _Engine) -> Object:
    resource, template, process = engine.resource, engine.template, engine.process
    inits = [_fetch_container(engine)] if is_on_hub(process.source) else []
    if resource.spec.model_cache.host_path:
        inits.insert(0, _folder_container(engine))
    return plain_pod(
        resource,
        engine.component,
        grace_seconds=process.drain_seconds + _MARGIN_SECONDS[engine.component],
        containers=[_engine_container(engine)],
        volumes=[*_volumes(resource, engine.component, process.source), *template.volumes],
        affinity=placement.affinity(resource, engine.component, engine.cell),
        initContainers=inits,
        nodeSelector=template.node_selector,
        tolerations=[*placement.tolerations(resource), *template.tolerations],
        priorityClassName=template.priority_class_name,
        runtimeClassName=template.runtime_class_name,
        schedulerName=template.scheduler_name,
        imagePullSecrets=list(template.image_pull_secrets),
    )


def _engine_container(engine: _Engine) -> Object:
    process, component = engine.process, engine.component
    kind = process_of(engine.resource, component)
    start = Start(
        resource=engine.resource,
        cell=engine.cell,
        num_threads=_num_threads(engine),
        operator=spiffe_id(engine.settings.pod_namespace, engine.settings.service_account),
    )
    mounts = [mount("tmp", reserved.SCRATCH_FOLDER), mount("cache", reserved.CACHE_FOLDER)]
    if is_on_hub(process.source):
        # Weights that pods share: an engine compiles beside them and never writes to them.
        hub = {"subPath": reserved.HUB_SUBFOLDER, "readOnly": True}
        mounts.append(mount("cache", reserved.HUB_FOLDER) | hub)
    mounts.append(mount("shm", reserved.SHARED_MEMORY))
    if volume_claim(process.source):
        mounts.append(mount("models", reserved.MODELS_FOLDER) | {"readOnly": True})
    # Without subPath: the kubelet replaces the files when the Secret changes.
    mounts += [
        mount(each["name"], _SECRET_FOLDERS[each["name"]]) | {"readOnly": True}
        for each in _secrets(engine.resource, component)
    ]
    sleep = {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}}
    startup_failures = math.ceil(process.startup_timeout_seconds / 2)
    # The kubelet does not check the certificate.
    scheme: Object = {"scheme": "HTTPS"} if has_tls(engine.resource, component, "http") else {}
    return {
        **_container(engine, str(component), kind.module, kind.environment(start), mounts),
        **present(args=kind.arguments(start)),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in kind.ports.items()
        ],
        "resources": engine.resources,
        "startupProbe": probe(kind.ready_page, 2, 2, startup_failures, **scheme) | KILL,
        # The heartbeat of the step thread, never drafts or load: those restart nothing.
        "livenessProbe": probe(kind.live_page, kind.live_period, 5, kind.live_failures, **scheme)
        | _KILL_AT_ONCE,
        "readinessProbe": probe(kind.ready_page, 2, 2, 2, **scheme),
        **present(lifecycle=sleep if component is Component.TARGET else {}),
    }


def _fetch_container(engine: _Engine) -> Object:
    """Fetches a model of the hub into the cache; it reserves no more than its engine.

    It has the user's variables and mounts: a proxy, or a certificate of the hub's mirror.
    """
    variables = environment.fetch_environment(engine.process.source)
    mounts = [mount("tmp", reserved.SCRATCH_FOLDER), mount("cache", reserved.CACHE_FOLDER)]
    made = _container(engine, FETCH, "ssd.fetch", variables, mounts)
    return made | {"resources": _resources_without_gpus(engine)}


def _folder_container(engine: _Engine) -> Object:
    """Gives the node's cache folder, which the kubelet makes as root, to our user."""
    capabilities = {"drop": ["ALL"], "add": ["CHOWN"]}
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0, "capabilities": capabilities}
    # With one container without limits, no container of the pod has CPUs of its own.
    resources = _resources_without_gpus(engine) if _has_own_cpus(engine) else {}
    return present(resources=resources) | {
        "name": "cache",
        "image": engine.image,
        "imagePullPolicy": engine.settings.image_pull_policy,
        "command": ["python", "-c", _OPEN_CACHE],
        "securityContext": unprivileged(is_read_only=True) | root,
        "volumeMounts": [mount("cache", reserved.CACHE_FOLDER)],
    }


def _container(
    engine: _Engine, name: str, module: str, variables: list[Object], mounts: list[Object]
) -> Object:
    is_read_only = engine.resource.spec.security.read_only_root_filesystem
    return container(
        name,
        module,
        engine.image,
        engine.settings,
        env=environment.merged(variables, engine.template.env),
        securityContext=unprivileged(is_read_only=is_read_only),
        volumeMounts=[*mounts, *engine.template.volume_mounts],
    )


def container(
    name: str, module: str, image: str, settings: OperatorSettings, **fields: object
) -> Object:
    """A container without rights that runs one of our modules."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        # With a command, an image of another process fails at once instead of serving.
        "command": ["python", "-m", module],
        "securityContext": unprivileged(is_read_only=True),
        "terminationMessagePath": environment.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **fields,
    }


def unprivileged(*, is_read_only: bool) -> Object:
    """Security context of a container without rights."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": is_read_only,
    }


def probe(path: str, period: int, timeout: int, failures: int, **get: object) -> Object:
    """A probe of a page of the port ``http``; times in seconds, ``get`` are fields of httpGet."""
    return {
        "httpGet": {"path": path, "port": "http", **get},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _has_own_cpus(engine: _Engine) -> bool:
    """Whether the pod is a draft on the CPUs of a GPU node."""
    return engine.component is Component.DRAFT and engine.resource.spec.has_cpu_drafts_of_gpus


def _resources_without_gpus(engine: _Engine) -> Object:
    resources = {
        part: {name: size for name, size in sizes.items() if name in _PLAIN_RESOURCES}
        for part, sizes in engine.resources.items()
    }
    return present(**resources)


def _resources(resource: Resource, component: Component, process: TargetSpec | DraftSpec) -> Object:
    """What the user gives, our defaults, and the GPUs."""
    spec, device = resource.spec, placement.device_of(resource, component)
    is_beside_gpus = spec.is_gpu and device == "cpu"
    own_requests = dict(_REQUESTS_BESIDE_GPUS if is_beside_gpus else _REQUESTS[device, component])
    own_limits = {} if spec.is_gpu else {"memory": "2Gi"}
    if is_on_hub(process.source) and spec.model_cache.size_limit:
        own_requests["ephemeral-storage"] = str(spec.model_cache.size_limit)
    num_gpus = spec.tensor_parallel_size if component is Component.TARGET else 1
    gpus = {process.gpu_resource: str(num_gpus)} if device == "nvidia" else {}
    made = with_defaults(process.resources, own_requests, own_limits)
    requests, limits = made.get("requests", {}), made.get("limits", {}) | gpus
    if is_beside_gpus:
        # Equal requests and limits: the QoS class Guaranteed, which has CPUs of its own.
        equal = {key: {**limits, **requests}[key] for key in ("cpu", "memory")}
        requests, limits = equal | requests, equal | limits
    return present(requests=requests, limits=limits)


def with_defaults(given: Object, requests: Object, limits: Object) -> Object:
    """Resources that the user gives, and defaults for other keys.

    A key named in requests or limits alone loses both defaults: a request above our own limit would
    be refused, and a limit without a request is also the request.
    """
    named = {*given.get("requests", {}), *given.get("limits", {})}
    defaults = {"requests": requests, "limits": limits}
    made = {
        part: {key: size for key, size in sizes.items() if key not in named} | given.get(part, {})
        for part, sizes in defaults.items()
    }
    return present(**made)


def _num_threads(engine: _Engine) -> int:
    """One thread per requested CPU, rounded up.

    If a draft has more than two CPUs of its own, one of them runs all other threads; see
    ``ssd.runtime.cpu_plan``.
    """
    requested = engine.resources.get("requests", {}).get("cpu")
    if requested is None:
        requested = engine.resources["limits"]["cpu"]
    num_cpus = max(1, math.ceil(parse_quantity(requested)))
    return num_cpus - 1 if _has_own_cpus(engine) and num_cpus > 2 else num_cpus


def present(**fields: object) -> Object:
    """Fields that hold something: the API server stores no empty text, list or map."""
    return {name: value for name, value in fields.items() if value}


def _volumes(resource: Resource, component: Component, source: Source) -> list[Object]:
    """Volumes of a pod, without the user's own."""
    cache = resource.spec.model_cache
    size = process_of(resource, component).shared_memory[placement.device_of(resource, component)]
    caches: dict[str, Object] = {
        "PVC": {"persistentVolumeClaim": {"claimName": cache.claim_name}},
        "HostPath": {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}},
        "EmptyDir": {"emptyDir": present(sizeLimit=str(cache.size_limit or ""))},
    }
    found: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", **caches[cache.type]},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    if claim := volume_claim(source):
        claimed = {"claimName": claim, "readOnly": True}
        found.append({"name": "models", "persistentVolumeClaim": claimed})
    return found + _secrets(resource, component)


def _secrets(resource: Resource, component: Component) -> list[Object]:
    """Volumes of certificates and tokens."""
    security, found = resource.spec.security, list[Object]()
    if (tls := security.tls) is not None:
        is_target = component is Component.TARGET
        name = tls.target_secret_name if is_target else tls.draft_secret_name
        found.append(secret_volume(reserved.TLS_VOLUME, name))
    if security.token_secret_name is not None:
        files = {key: key for key in environment.TOKEN_KEYS[component]}
        found.append(secret_volume(reserved.TOKENS_VOLUME, security.token_secret_name, files))
    return found


def secret_volume(name: str, secret: str, files: Mapping[str, str] | None = None) -> Object:
    """A volume of a Secret, with these of its keys by name of the file, or with all."""
    items = [{"key": key, "path": path} for path, key in (files or {}).items()]
    return {
        "name": name,
        "secret": {"secretName": secret, "defaultMode": SECRET_MODE} | present(items=items),
    }


def mount(name: str, path: str) -> Object:
    """Mount of a volume."""
    return {"name": name, "mountPath": path}
