"""The gateways of a resource: Deployment, Service, policy, budget and account. Pure."""

from collections.abc import Iterator

from ssd_operator.api import reserved
from ssd_operator.api.gateway import Gateway
from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.environment import CLIENT_TOKENS, TERMINATION_LOG
from ssd_operator.children.names import (
    GATEWAY,
    GATEWAY_PORT,
    RESTART_ANNOTATION,
    REVISION_LABEL,
    TARGET_PORT,
    component_name,
    labels_of,
    selector,
    server_name,
    targets_service,
)
from ssd_operator.children.objects import ChildFactory, digest
from ssd_operator.children.pods import (
    KILL,
    POD_SECURITY,
    REVISION_DIGITS,
    SECRET_MODE,
    mount,
    present,
    probe,
    unprivileged,
)

ANY_POD: Object = {"namespaceSelector": {}}
"""Every pod of the cluster, as a peer."""
DRAIN_SECONDS = 60
"""Time after SIGTERM in which open streams may finish."""
_PRE_STOP_SECONDS = 5
"""Endpoints remove a gateway during this time, before it accepts no more connections."""
_MARGIN_SECONDS = 15
_PROGRESS_SECONDS = 600
_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
_LIMITS = {"memory": "512Mi"}
_KEYS_FOLDER = "/etc/ssd/keys"
_CA_FOLDER = "/etc/ssd/target-ca"


def clients_of(resource: Resource) -> list[Object]:
    """Peers that may call the API; every pod if the resource names none."""
    return [dict(each) for each in resource.spec.security.clients] or [ANY_POD]


def tcp(port: int) -> Object:
    """A port of a policy or Service."""
    return {"port": port, "protocol": "TCP"}


def gateway_objects(factory: ChildFactory) -> Iterator[Object]:
    """All objects of the gateways of a resource that enables them."""
    resource, gateway = factory.resource, factory.resource.spec.gateway
    name, pods = component_name(resource, GATEWAY), selector(resource, GATEWAY)
    yield factory.make("ServiceAccount", name, GATEWAY, automountServiceAccountToken=False)
    if resource.spec.security.network_policy:
        policy = {
            "podSelector": {"matchLabels": pods},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": clients_of(resource), "ports": [tcp(GATEWAY_PORT)]}],
        }
        yield factory.make("NetworkPolicy", name, GATEWAY, spec=policy)
    service = {
        "type": "ClusterIP",
        "selector": pods,
        "ports": [{"name": "http"} | tcp(GATEWAY_PORT) | {"targetPort": "http"}],
        "publishNotReadyAddresses": False,
    }
    yield factory.make("Service", name, GATEWAY, spec=service)
    deployment = {
        "replicas": gateway.replicas,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "paused": False,
        "selector": {"matchLabels": pods},
        "template": _template(factory),
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": _PROGRESS_SECONDS,
    }
    yield factory.make("Deployment", name, GATEWAY, spec=deployment)
    if gateway.replicas > 1:
        budget = {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": pods},
        }
        yield factory.make("PodDisruptionBudget", name, GATEWAY, spec=budget)


def _template(factory: ChildFactory) -> Object:
    resource = factory.resource
    annotations: dict[str, str] = {}
    if restart := resource.annotations.get(RESTART_ANNOTATION):
        annotations[RESTART_ANNOTATION] = restart
    labels = labels_of(resource, GATEWAY)
    volumes: list[Object] = [{"name": "tmp", "emptyDir": {}}]
    for name, (_, source) in _secrets(resource).items():
        volumes.append({"name": name, "secret": source | {"defaultMode": SECRET_MODE}})
    spec: Object = {
        "serviceAccountName": component_name(resource, GATEWAY),
        "automountServiceAccountToken": False,
        # A Service called ssd-gateway would inject SSD_GATEWAY_PORT=tcp://…, a setting of ours.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _PRE_STOP_SECONDS + DRAIN_SECONDS + _MARGIN_SECONDS,
        "securityContext": POD_SECURITY,
        "containers": [_container(factory)],
        "volumes": volumes,
    } | present(imagePullSecrets=list(resource.spec.pod_template.image_pull_secrets))
    labels[REVISION_LABEL] = digest(
        {"labels": labels, "annotations": annotations, "spec": spec}, REVISION_DIGITS
    )
    return {"metadata": {"labels": labels} | present(annotations=annotations), "spec": spec}


def _container(factory: ChildFactory) -> Object:
    resource, gateway = factory.resource, factory.resource.spec.gateway
    mounts = [mount("tmp", reserved.SCRATCH_FOLDER)]
    # Without subPath: the kubelet replaces the files when the Secret changes.
    for name, (folder, _) in _secrets(resource).items():
        mounts.append(mount(name, folder) | {"readOnly": True})
    return {
        "name": GATEWAY,
        "image": gateway.image or factory.settings.gateway_image,
        "imagePullPolicy": factory.settings.image_pull_policy,
        # With a command, an image of another process fails at once instead of serving.
        "command": ["python", "-m", "ssd_gateway"],
        "env": _environment(resource, gateway),
        "securityContext": unprivileged(is_read_only=True),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
        "resources": _resources(gateway),
        "startupProbe": probe("/livez", 1, 2, 60) | KILL,
        "livenessProbe": probe("/livez", 10, 5, 6) | KILL,
        "readinessProbe": probe("/readyz", 2, 2, 2),
        "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
    }


def _secrets(resource: Resource) -> dict[str, tuple[str, Object]]:
    """Folder and source of each volume of a Secret, by the name of the volume."""
    gateway, security = resource.spec.gateway, resource.spec.security
    found: dict[str, tuple[str, Object]] = {}

    def add(volume: str, folder: str, secret: str, **paths: str) -> None:
        items = [{"key": key, "path": path} for path, key in paths.items()]
        found[volume] = (folder, {"secretName": secret, "items": items})

    if (keys := gateway.api_keys_secret_ref) is not None:
        add("keys", _KEYS_FOLDER, keys["name"], file=keys["key"])
    if (tls := security.tls) is not None:
        add("target-ca", _CA_FOLDER, tls.target_secret_name, ca="ca.crt")
        if tls.mode == "Mutual" and gateway.tls_secret_name:
            name = gateway.tls_secret_name
            add(reserved.TLS_VOLUME, reserved.TLS_FOLDER, name, crt="tls.crt", key="tls.key")
    if security.token_secret_name is not None:
        name = security.token_secret_name
        add(reserved.TOKENS_VOLUME, reserved.TOKENS_FOLDER, name, clients=CLIENT_TOKENS)
    return found


def _environment(resource: Resource, gateway: Gateway) -> list[Object]:
    files = {name: folder for name, (folder, _) in _secrets(resource).items()}
    settings: dict[str, object] = {
        "DRAIN_SECONDS": DRAIN_SECONDS,
        # A pod is reached by its own address, of either family: the process takes this for both.
        "HOST": "0.0.0.0",  # noqa: S104
        "PORT": GATEWAY_PORT,
        "TARGETS": f"{targets_service(resource)}:{TARGET_PORT}",
        "TERMINATION_LOG": TERMINATION_LOG,
    }
    if not gateway.playground:
        settings["PLAYGROUND"] = "false"
    if "keys" in files:
        settings["API_KEYS_FILE"] = f"{_KEYS_FOLDER}/file"
    if "target-ca" in files:
        settings["TARGET_CA"] = f"{_CA_FOLDER}/ca"
        settings["TARGET_SERVER_NAME"] = server_name(resource.namespace, resource.name)
    if reserved.TLS_VOLUME in files:
        settings["TARGET_CERTIFICATE"] = f"{reserved.TLS_FOLDER}/crt"
        settings["TARGET_KEY"] = f"{reserved.TLS_FOLDER}/key"
    if reserved.TOKENS_VOLUME in files:
        settings["TARGET_TOKEN_FILE"] = f"{reserved.TOKENS_FOLDER}/clients"
    return [
        {"name": f"SSD_GATEWAY_{name}", "value": str(value)}
        for name, value in sorted(settings.items())
    ]


def _resources(gateway: Gateway) -> Object:
    """Defaults, except for each key that the user names in requests or limits."""
    requests: Object = dict(gateway.resources.get("requests", {}))
    limits: Object = dict(gateway.resources.get("limits", {}))
    named = {*requests, *limits}
    return present(
        requests={key: size for key, size in _REQUESTS.items() if key not in named} | requests,
        limits={key: size for key, size in _LIMITS.items() if key not in named} | limits,
    )
