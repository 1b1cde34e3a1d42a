"""Pod templates of targets, drafts and gateways; no other module builds them.

A template contains nothing that scaling, policies or the operator's version change, so none of
these replaces a pod; ``ssd.dev/revision`` is the hash of the rest.

*Decision*: an init container fetches a model, although its pod holds the GPUs meanwhile. *Because*
an EmptyDir belongs to the pod and a HostPath to the node that the scheduler selects, so nothing can
be fetched before the pod is placed. *Not chosen*: a fetch pod without GPUs for the cache type PVC;
a volume that is bound to its first consumer would follow that pod to a zone without GPUs. The
chart's sample Job fills such a claim in advance. *Revisit when* fetches hold GPUs for longer than a
model loads, in spite of the Job.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from ssd_operator.api import reserved
from ssd_operator.api.pod_template import PodTemplate
from ssd_operator.api.spec import Object
from ssd_operator.children import environment, placement
from ssd_operator.children.objects import (
    FETCH,
    GATEWAY_PORT,
    RESTART_ANNOTATION,
    REVISION_LABEL,
    SCHEME_ANNOTATION,
    TARGET_PORT,
    Component,
    Workload,
    child_name,
    digest,
    server_name,
    targets_service,
)
from ssd_operator.children.processes import has_tls, process_of
from ssd_operator.children.resources import (
    engine_resources,
    has_own_cpus,
    present,
    with_defaults,
    without_gpus,
)

_REVISION_DIGITS = 10
_PRE_STOP_SECONDS = 5
_PRE_STOP: Object = {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}}
"""Endpoints remove a target or a gateway during this time, before it refuses new calls."""
_KILL: Object = {"terminationGracePeriodSeconds": 10}
"""Grace period of a process that does not start: it does not drain, and the grace period of the
pod, which allows a drain, would keep it for minutes."""
_KILL_AT_ONCE: Object = {"terminationGracePeriodSeconds": 1}
"""Grace period of a process that hangs: it receives no SIGTERM."""

_MARGIN_SECONDS = {Component.TARGET: 30, Component.DRAFT: 25, Component.GATEWAY: 15}
"""Time from the longest drain to the kill of the process."""
_GATEWAY_DRAIN_SECONDS = 60
"""Time after SIGTERM in which open streams of a gateway may finish."""
_GATEWAY_REQUESTS: Object = {"cpu": "100m", "memory": "128Mi"}
_GATEWAY_LIMITS: Object = {"memory": "1Gi"}
_KEYS_FOLDER = "/etc/ssd/keys"
_CA_FOLDER = "/etc/ssd/target-ca"
USER = 10001
"""uid and gid of the images' user ``ssd``."""
_POD_SECURITY: Object = {
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
PREFLIGHT_CONTAINER = "preflight"
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_PREFLIGHT_REQUESTS: Object = {"cpu": "100m", "memory": "0", "ephemeral-storage": "0"}
"""A preflight runs beside serving pods, so it reserves little; without any CPU it received 1 s of
CPU time in half a minute on a busy node. All are named, because a quota may require each."""
_PREFLIGHT_LIMITS: Object = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}
_SECRET_MODE = 0o440
"""The process reads files of Secrets as their group."""


class _Volume(NamedTuple):
    """A volume and its folder in the containers."""

    name: str
    folder: str
    source: Object
    is_read_only: bool = False

    @property
    def spec(self) -> Object:
        """The volume of a pod."""
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> Object:
        """A mount without subPath: the kubelet replaces its files when a Secret changes."""
        read_only = {"readOnly": True} if self.is_read_only else {}
        return {"name": self.name, "mountPath": self.folder} | read_only


_SCRATCH = _Volume("tmp", reserved.SCRATCH_FOLDER, {"emptyDir": {}})


def _engine_volumes(workload: Workload) -> list[_Volume]:
    """Volumes of an engine's pods, without the user's own; scratch and cache first."""
    block, cache, security = workload.block, workload.spec.model_cache, workload.spec.security
    size = process_of(workload.resource, workload.component).shared_memory[workload.device]
    caches: dict[str, Object] = {
        "PVC": {"persistentVolumeClaim": {"claimName": cache.claim_name}},
        "HostPath": {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}},
        "EmptyDir": {"emptyDir": present(sizeLimit=str(cache.size_limit or ""))},
    }
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    volumes = [
        _SCRATCH,
        _Volume("cache", reserved.CACHE_FOLDER, caches[cache.type]),
        _Volume("shm", reserved.SHARED_MEMORY, memory),
    ]
    if claim := block.source.claim:
        claimed = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        volumes.append(_Volume("models", reserved.MODELS_FOLDER, claimed, is_read_only=True))
    if (tls := security.tls) is not None:
        secret = tls.target_secret_name if workload.is_target else tls.draft_secret_name
        volumes.append(_secret_volume(reserved.TLS_VOLUME, reserved.TLS_FOLDER, secret))
    if (name := security.token_secret_name) is not None:
        # A draft has no token of a client.
        clients = [environment.CLIENT_TOKENS] if workload.is_target else []
        files = {key: key for key in (*clients, environment.LINK_TOKENS, environment.ADMIN_TOKENS)}
        volumes.append(_secret_volume(reserved.TOKENS_VOLUME, reserved.TOKENS_FOLDER, name, files))
    return volumes


def _secret_volume(
    name: str, folder: str, secret: str, files: Mapping[str, str] | None = None
) -> _Volume:
    """A volume of a Secret, with these of its keys by name of the file, or with all."""
    items = [{"key": key, "path": path} for path, key in (files or {}).items()]
    source = {"secretName": secret, "defaultMode": _SECRET_MODE} | present(items=items)
    return _Volume(name, folder, {"secret": source}, is_read_only=True)


def engine_template(workload: Workload) -> Object:
    """Pod template of a cell's target or drafts."""
    block, template = workload.block, _template(workload)
    inits = [_fetch_container(workload)] if block.source.is_on_hub else []
    if workload.spec.model_cache.host_path:
        inits.insert(0, _folder_container(workload))
    spec = _plain_pod(
        workload,
        grace_seconds=block.drain_seconds + _MARGIN_SECONDS[workload.component],
        containers=[_engine_container(workload)],
        volumes=[*(volume.spec for volume in _engine_volumes(workload)), *template.volumes],
        affinity=placement.affinity(workload),
        initContainers=inits,
        nodeSelector=template.node_selector,
        tolerations=[*placement.tolerations(workload.resource), *template.tolerations],
        priorityClassName=template.priority_class_name,
        runtimeClassName=template.runtime_class_name,
        schedulerName=template.scheduler_name,
        imagePullSecrets=list(template.image_pull_secrets),
    )
    return _make_template(workload, spec, template)


def gateway_template(workload: Workload) -> Object:
    """Pod template of the gateways of a resource. They run no engine, and no pass drains them."""
    gateway, process = workload.spec.gateway, process_of(workload.resource, workload.component)
    secrets, files = _gateway_secrets(workload)
    volumes = [_SCRATCH, *secrets]
    settings = files | {
        "DRAIN_SECONDS": _GATEWAY_DRAIN_SECONDS,
        "HOST": environment.ANY_ADDRESS,
        "PORT": GATEWAY_PORT,
        "TARGETS": f"{targets_service(workload.resource)}:{TARGET_PORT}",
        "TERMINATION_LOG": environment.TERMINATION_LOG,
        "PLAYGROUND": None if gateway.playground else "false",
    }
    gateway_container = _container(
        workload,
        str(workload.component),
        process.module,
        env=environment.variables("SSD_GATEWAY", settings),
        volumeMounts=[volume.mount for volume in volumes],
        ports=_container_ports(process.ports),
        resources=with_defaults(gateway.resources, _GATEWAY_REQUESTS, _GATEWAY_LIMITS),
        startupProbe=_probe("/livez", 1, 2, 60) | _KILL,
        livenessProbe=_probe("/livez", 10, 5, 6) | _KILL,
        readinessProbe=_probe("/readyz", 2, 2, 2),
        lifecycle=_PRE_STOP,
    )
    margin = _MARGIN_SECONDS[Component.GATEWAY]
    spec = _plain_pod(
        workload,
        grace_seconds=_PRE_STOP_SECONDS + _GATEWAY_DRAIN_SECONDS + margin,
        containers=[gateway_container],
        volumes=[volume.spec for volume in volumes],
        imagePullSecrets=list(workload.spec.pod_template.image_pull_secrets),
    )
    return _make_template(workload, spec, PodTemplate())


def _gateway_secrets(workload: Workload) -> tuple[list[_Volume], dict[str, object]]:
    """Volumes of Secrets, with the files that the gateway reads, and the settings of these."""
    resource, gateway, security = workload.resource, workload.spec.gateway, workload.spec.security
    volumes, settings = list[_Volume](), dict[str, object]()
    if (keys := gateway.api_keys_secret_ref) is not None:
        volumes.append(_secret_volume("keys", _KEYS_FOLDER, keys["name"], {"file": keys["key"]}))
        settings["API_KEYS_FILE"] = f"{_KEYS_FOLDER}/file"
    if (tls := security.tls) is not None:
        authority = {"ca": "ca.crt"}
        volumes.append(_secret_volume("target-ca", _CA_FOLDER, tls.target_secret_name, authority))
        settings["TARGET_CA"] = f"{_CA_FOLDER}/ca"
        settings["TARGET_SERVER_NAME"] = server_name(resource.namespace, resource.name)
        if tls.mode == "Mutual" and (name := gateway.tls_secret_name):
            files, folder = {"crt": "tls.crt", "key": "tls.key"}, reserved.TLS_FOLDER
            volumes.append(_secret_volume(reserved.TLS_VOLUME, folder, name, files))
            settings["TARGET_CERTIFICATE"] = f"{folder}/crt"
            settings["TARGET_KEY"] = f"{folder}/key"
    if (name := security.token_secret_name) is not None:
        files, folder = {"clients": environment.CLIENT_TOKENS}, reserved.TOKENS_FOLDER
        volumes.append(_secret_volume(reserved.TOKENS_VOLUME, folder, name, files))
        settings["TARGET_TOKEN_FILE"] = f"{folder}/clients"
    return volumes, settings


def _make_template(workload: Workload, spec: Object, added: PodTemplate) -> Object:
    """A template of pods with this spec, the labels and annotations of the user, and ours."""
    restart = workload.resource.annotations.get(RESTART_ANNOTATION)
    annotations = added.annotations | ({RESTART_ANNOTATION: restart} if restart else {})
    if has_tls(workload.resource, workload.component, "http"):
        annotations = annotations | {SCHEME_ANNOTATION: "https"}
    labels = added.labels | workload.labels | workload.engine_label
    hashed = {"labels": labels, "annotations": annotations, "spec": spec}
    labels = labels | {REVISION_LABEL: digest(hashed, _REVISION_DIGITS)}
    return {"metadata": {"labels": labels} | present(annotations=annotations), "spec": spec}


def _plain_pod(workload: Workload, grace_seconds: int, **fields: object) -> Object:
    """Spec of a pod without privileges; empty ``fields`` are left out."""
    return {
        "serviceAccountName": child_name(workload.resource, workload.component),
        "automountServiceAccountToken": False,
        # A Service called ssd-target would inject SSD_TARGET_PORT=tcp://…, a setting of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": _POD_SECURITY,
        **present(**fields),
    }


def preflight_spec(deployment: Object, node: str, *, reserves_little: bool = True) -> Object:
    """Spec of a pod that tests a target's image and settings, and loads nothing.

    It is a copy of the target without its placement and without what it holds: GPUs, ports,
    privileges, a claim for its cache. If it reserves little, the LimitRange of a namespace may
    forbid it: by a minimum, or by a ratio of limits to requests.
    """
    template = deployment["spec"]["template"]["spec"]
    engine = template["containers"][0]
    is_read_only = engine["securityContext"]["readOnlyRootFilesystem"]
    requests = _PREFLIGHT_REQUESTS if reserves_little else _PREFLIGHT_LIMITS
    preflight = _without(engine, "ports", "lifecycle", *_PROBES) | {
        "name": PREFLIGHT_CONTAINER,
        "args": [*engine.get("args", ()), "--print-config"],
        "resources": {"requests": {**requests}, "limits": {**_PREFLIGHT_LIMITS}},
        "securityContext": _unprivileged(is_read_only=is_read_only),
    }
    return _without(template, "initContainers", "nodeSelector", "priorityClassName") | {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": deployment["spec"]["progressDeadlineSeconds"],
        "terminationGracePeriodSeconds": 1,
        "affinity": affinity_to(node),
        "volumes": [
            {"name": volume["name"], "emptyDir": {}}
            if volume["name"] in ("cache", "tmp")
            else volume
            for volume in template["volumes"]
        ],
        "containers": [preflight],
    }


def affinity_to(node: str) -> Object:
    """Affinity of a pod that may run on this node alone."""
    # The name of a node is a field: the label for it may hold another one.
    place = {"key": "metadata.name", "operator": "In", "values": [node]}
    here = {"nodeSelectorTerms": [{"matchFields": [place]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": here}}


def _without(fields: Object, *names: str) -> Object:
    return {name: value for name, value in fields.items() if name not in names}


def _template(workload: Workload) -> PodTemplate:
    """What the user adds to the pods of an engine."""
    return workload.spec.pod_template.overridden(workload.block.pod_template)


def _engine_container(workload: Workload) -> Object:
    process = process_of(workload.resource, workload.component)
    mounts = [volume.mount for volume in _engine_volumes(workload)]
    if workload.block.source.is_on_hub:
        # Weights that pods share: an engine compiles beside them and never writes to them.
        hub = {"mountPath": reserved.HUB_FOLDER, "subPath": reserved.HUB_SUBFOLDER}
        mounts.insert(2, {"name": "cache", **hub, "readOnly": True})
    startup_failures = math.ceil(workload.block.startup_timeout_seconds / 2)
    # The kubelet does not check the certificate.
    scheme = {"scheme": "HTTPS"} if has_tls(workload.resource, workload.component, "http") else {}
    ready, live, period = process.ready_page, process.live_page, process.live_period
    # The heartbeat of the step thread, never drafts or load: those restart nothing.
    liveness = _probe(live, period, 5, process.live_failures, **scheme) | _KILL_AT_ONCE
    name, variables = str(workload.component), process.environment(workload)
    return {
        **_extended_container(workload, name, process.module, variables, mounts),
        **present(args=process.arguments(workload)),
        "ports": _container_ports(process.ports),
        "resources": engine_resources(workload),
        "startupProbe": _probe(ready, 2, 2, startup_failures, **scheme) | _KILL,
        "livenessProbe": liveness,
        "readinessProbe": _probe(ready, 2, 2, 2, **scheme),
        **present(lifecycle=_PRE_STOP if workload.is_target else {}),
    }


def _fetch_container(workload: Workload) -> Object:
    """Fetches a model of the hub into the cache; it reserves no more than its engine.

    It has the user's variables and mounts: a proxy, or a certificate of the hub's mirror.
    """
    variables = environment.fetch_environment(workload.block.source)
    scratch, cache, *_ = (volume.mount for volume in _engine_volumes(workload))
    fetch = _extended_container(workload, FETCH, "ssd.fetch", variables, [scratch, cache])
    return fetch | {"resources": without_gpus(engine_resources(workload))}


def _folder_container(workload: Workload) -> Object:
    """Gives the node's cache folder, which the kubelet makes as root, to our user."""
    capabilities = {"drop": ["ALL"], "add": ["CHOWN"]}
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0, "capabilities": capabilities}
    _, cache, *_ = (volume.mount for volume in _engine_volumes(workload))
    # With one container without limits, no container of the pod has CPUs of its own.
    resources = without_gpus(engine_resources(workload)) if has_own_cpus(workload) else {}
    return present(resources=resources) | {
        "name": "cache",
        "image": _image(workload),
        "imagePullPolicy": workload.settings.image_pull_policy,
        "command": ["python", "-c", _OPEN_CACHE],
        "securityContext": _unprivileged(is_read_only=True) | root,
        "volumeMounts": [cache],
    }


def _extended_container(
    workload: Workload, name: str, module: str, variables: list[Object], mounts: list[Object]
) -> Object:
    """A container with the variables and mounts of the user."""
    template = _template(workload)
    is_read_only = workload.spec.security.read_only_root_filesystem
    return _container(
        workload,
        name,
        module,
        env=environment.merged(variables, template.env),
        securityContext=_unprivileged(is_read_only=is_read_only),
        volumeMounts=[*mounts, *template.volume_mounts],
    )


def _container(workload: Workload, name: str, module: str, **fields: object) -> Object:
    """A container without rights that runs one of our modules."""
    return {
        "name": name,
        "image": _image(workload),
        "imagePullPolicy": workload.settings.image_pull_policy,
        # With a command, an image of another process fails at once instead of serving.
        "command": ["python", "-m", module],
        "securityContext": _unprivileged(is_read_only=True),
        "terminationMessagePath": environment.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **fields,
    }


def _image(workload: Workload) -> str:
    """The image of the resource, else that of the installation."""
    spec, process = workload.spec, process_of(workload.resource, workload.component)
    blocks = {Component.TARGET: spec.target, Component.DRAFT: spec.draft}
    return blocks.get(workload.component, spec.gateway).image or process.image(workload.settings)


def _unprivileged(*, is_read_only: bool) -> Object:
    """Security context of a container without rights."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": is_read_only,
    }


def _container_ports(ports: Mapping[str, int]) -> list[Object]:
    return [
        {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
    ]


def _probe(path: str, period: int, timeout: int, failures: int, **get: object) -> Object:
    """A probe of a page of the port ``http``; times in seconds, ``get`` are fields of httpGet."""
    return {
        "httpGet": {"path": path, "port": "http", **get},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
