"""Pods of gateways. They run no engine: no pass counts or drains them. Pure."""

from ssd_operator.api import reserved
from ssd_operator.api.pod_template import PodTemplate
from ssd_operator.api.spec import Object
from ssd_operator.children.environment import ANY_ADDRESS, CLIENT_TOKENS, TERMINATION_LOG, variables
from ssd_operator.children.objects import (
    GATEWAY_PORT,
    TARGET_PORT,
    Workload,
    server_name,
    targets_service,
)
from ssd_operator.children.pods import (
    KILL,
    PRE_STOP,
    PRE_STOP_SECONDS,
    SCRATCH,
    Volume,
    container,
    container_ports,
    make_template,
    plain_pod,
    probe,
    secret_volume,
)
from ssd_operator.children.processes import process_of
from ssd_operator.children.resources import with_defaults

DRAIN_SECONDS = 60
"""Time after SIGTERM in which open streams may finish."""
_MARGIN_SECONDS = 15
_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
_LIMITS = {"memory": "1Gi"}
_KEYS_FOLDER = "/etc/ssd/keys"
_CA_FOLDER = "/etc/ssd/target-ca"


def gateway_template(workload: Workload) -> Object:
    """Pod template of the gateways of a resource."""
    gateway, process = workload.spec.gateway, process_of(workload.resource, workload.component)
    secrets, files = _secrets(workload)
    volumes = [SCRATCH, *secrets]
    settings = files | {
        "DRAIN_SECONDS": DRAIN_SECONDS,
        "HOST": ANY_ADDRESS,
        "PORT": GATEWAY_PORT,
        "TARGETS": f"{targets_service(workload.resource)}:{TARGET_PORT}",
        "TERMINATION_LOG": TERMINATION_LOG,
        "PLAYGROUND": None if gateway.playground else "false",
    }
    gateway_container = container(
        workload,
        str(workload.component),
        process.module,
        env=variables("SSD_GATEWAY", settings),
        volumeMounts=[volume.mount for volume in volumes],
        ports=container_ports(process.ports),
        resources=with_defaults(gateway.resources, _REQUESTS, _LIMITS),
        startupProbe=probe("/livez", 1, 2, 60) | KILL,
        livenessProbe=probe("/livez", 10, 5, 6) | KILL,
        readinessProbe=probe("/readyz", 2, 2, 2),
        lifecycle=PRE_STOP,
    )
    spec = plain_pod(
        workload,
        grace_seconds=PRE_STOP_SECONDS + DRAIN_SECONDS + _MARGIN_SECONDS,
        containers=[gateway_container],
        volumes=[volume.spec for volume in volumes],
        imagePullSecrets=list(workload.spec.pod_template.image_pull_secrets),
    )
    return make_template(workload, spec, PodTemplate())


def _secrets(workload: Workload) -> tuple[list[Volume], dict[str, object]]:
    """Volumes of Secrets, with the files that the gateway reads, and the settings of these."""
    resource, gateway, security = workload.resource, workload.spec.gateway, workload.spec.security
    volumes, settings = list[Volume](), dict[str, object]()
    if (keys := gateway.api_keys_secret_ref) is not None:
        volumes.append(secret_volume("keys", _KEYS_FOLDER, keys["name"], {"file": keys["key"]}))
        settings["API_KEYS_FILE"] = f"{_KEYS_FOLDER}/file"
    if (tls := security.tls) is not None:
        authority = {"ca": "ca.crt"}
        volumes.append(secret_volume("target-ca", _CA_FOLDER, tls.target_secret_name, authority))
        settings["TARGET_CA"] = f"{_CA_FOLDER}/ca"
        settings["TARGET_SERVER_NAME"] = server_name(resource.namespace, resource.name)
        if tls.mode == "Mutual" and (name := gateway.tls_secret_name):
            files, folder = {"crt": "tls.crt", "key": "tls.key"}, reserved.TLS_FOLDER
            volumes.append(secret_volume(reserved.TLS_VOLUME, folder, name, files))
            settings["TARGET_CERTIFICATE"] = f"{folder}/crt"
            settings["TARGET_KEY"] = f"{folder}/key"
    if (name := security.token_secret_name) is not None:
        files, folder = {"clients": CLIENT_TOKENS}, reserved.TOKENS_FOLDER
        volumes.append(secret_volume(reserved.TOKENS_VOLUME, folder, name, files))
        settings["TARGET_TOKEN_FILE"] = f"{folder}/clients"
    return volumes, settings
