"""Pods of gateways. They run no engine: no pass counts or drains them. Pure."""

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.environment import CLIENT_TOKENS, TERMINATION_LOG, variables
from ssd_operator.children.names import (
    GATEWAY_PORT,
    TARGET_PORT,
    Component,
    server_name,
    targets_service,
)
from ssd_operator.children.pods import (
    KILL,
    container,
    make_template,
    mount,
    plain_pod,
    probe,
    secret_volume,
    with_defaults,
)
from ssd_operator.children.processes import process_of
from ssd_operator.settings import OperatorSettings

DRAIN_SECONDS = 60
"""Time after SIGTERM in which open streams may finish."""
_PRE_STOP_SECONDS = 5
"""Endpoints remove a gateway during this time, before it accepts no more connections."""
_MARGIN_SECONDS = 15
_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
_LIMITS = {"memory": "512Mi"}
_KEYS_FOLDER = "/etc/ssd/keys"
_CA_FOLDER = "/etc/ssd/target-ca"
_FOLDERS = {
    "keys": _KEYS_FOLDER,
    "target-ca": _CA_FOLDER,
    reserved.TLS_VOLUME: reserved.TLS_FOLDER,
    reserved.TOKENS_VOLUME: reserved.TOKENS_FOLDER,
}
"""Where the volume of a Secret is mounted."""


def gateway_template(resource: Resource, settings: OperatorSettings) -> Object:
    """Pod template of the gateways of a resource."""
    gateway, secrets = resource.spec.gateway, _secrets(resource)
    files = {each["name"] for each in secrets}
    # Without subPath: the kubelet replaces the files when the Secret changes.
    mounts = [
        mount("tmp", reserved.SCRATCH_FOLDER),
        *(mount(each["name"], _FOLDERS[each["name"]]) | {"readOnly": True} for each in secrets),
    ]
    made = container(
        str(Component.GATEWAY),
        "ssd_gateway",
        gateway.image or process_of(resource, Component.GATEWAY).image(settings),
        settings,
        env=_environment(resource, files),
        volumeMounts=mounts,
        ports=[{"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
        resources=with_defaults(gateway.resources, _REQUESTS, _LIMITS),
        startupProbe=probe("/livez", 1, 2, 60) | KILL,
        livenessProbe=probe("/livez", 10, 5, 6) | KILL,
        readinessProbe=probe("/readyz", 2, 2, 2),
        lifecycle={"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
    )
    spec = plain_pod(
        resource,
        Component.GATEWAY,
        grace_seconds=_PRE_STOP_SECONDS + DRAIN_SECONDS + _MARGIN_SECONDS,
        containers=[made],
        volumes=[{"name": "tmp", "emptyDir": {}}, *secrets],
        imagePullSecrets=list(resource.spec.pod_template.image_pull_secrets),
    )
    return make_template(resource, Component.GATEWAY, spec)


def _secrets(resource: Resource) -> list[Object]:
    """Volumes of Secrets; each has the files that the gateway reads, and no others."""
    gateway, security = resource.spec.gateway, resource.spec.security
    found = []
    if (keys := gateway.api_keys_secret_ref) is not None:
        found.append(secret_volume("keys", keys["name"], {"file": keys["key"]}))
    if (tls := security.tls) is not None:
        found.append(secret_volume("target-ca", tls.target_secret_name, {"ca": "ca.crt"}))
        if tls.mode == "Mutual" and gateway.tls_secret_name:
            files = {"crt": "tls.crt", "key": "tls.key"}
            found.append(secret_volume(reserved.TLS_VOLUME, gateway.tls_secret_name, files))
    if (tokens := security.token_secret_name) is not None:
        files = {"clients": CLIENT_TOKENS}
        found.append(secret_volume(reserved.TOKENS_VOLUME, tokens, files))
    return found


def _environment(resource: Resource, files: set[str]) -> list[Object]:
    """Settings of a gateway with these volumes of Secrets."""
    settings: dict[str, object] = {
        "DRAIN_SECONDS": DRAIN_SECONDS,
        # A pod is reached by its own address, of either family: the process takes this for both.
        "HOST": "0.0.0.0",  # noqa: S104
        "PORT": GATEWAY_PORT,
        "TARGETS": f"{targets_service(resource)}:{TARGET_PORT}",
        "TERMINATION_LOG": TERMINATION_LOG,
        "PLAYGROUND": None if resource.spec.gateway.playground else "false",
    }
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
    return variables("SSD_GATEWAY", settings)
