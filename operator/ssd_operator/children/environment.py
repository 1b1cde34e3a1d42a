"""Environment of engine pods: settings of the processes, and nothing else.

A process refuses a setting that it does not have, and a pinned image may be older than the
operator. So a variable is left out if its value is the process's own default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_operator.api import reserved
from ssd_operator.api.spec import DraftSpec, Object, Resource, Source, SsdEngine, TargetSpec
from ssd_operator.children.names import (
    DRAFT_PORT,
    HTTP_PORT,
    TARGET_PORT,
    Component,
    component_name,
    draft_deployment,
    server_name,
    spiffe_id,
)
from ssd_operator.children.placement import device_of

TERMINATION_LOG = "/dev/termination-log"
_HUB: Object = {"name": "HF_HOME", "value": reserved.HUB_FOLDER}
CLIENT_TOKENS, LINK_TOKENS, ADMIN_TOKENS = "clients", "links", "admins"
"""Keys of the Secret with tokens."""
TOKEN_KEYS = {
    Component.TARGET: (CLIENT_TOKENS, LINK_TOKENS, ADMIN_TOKENS),
    Component.DRAFT: (LINK_TOKENS, ADMIN_TOKENS),
}
"""Those that the pods of a component have. A draft has no token of a client."""
PROCESS_DEADLINE_MILLISECONDS = 20
"""The processes' own table deadline."""


def engine_environment(
    resource: Resource,
    component: Component,
    cell: int | None,
    num_threads: int,
    operator: str,
) -> list[Object]:
    """Settings of a target or a draft.

    Args:
        resource: whose process.
        component: target or draft.
        cell: of the process; None for the drafts of a Pool.
        num_threads: of a forward pass on a CPU.
        operator: name in the operator's certificate.
    """
    spec, prefix = resource.spec, f"SSD_{component.upper()}"
    is_gpu = device_of(resource, component) == "nvidia"
    is_target = component is Component.TARGET
    process: TargetSpec | DraftSpec = spec.target if is_target else spec.draft
    settings = {
        "MODEL": _model(process.source),
        # A pod is reached by its own address, of either family: the processes take this for both.
        "HOST": "0.0.0.0",  # noqa: S104
        "PORT": TARGET_PORT if is_target else DRAFT_PORT,
        "HTTP_PORT": HTTP_PORT,
        "DEVICE": "cuda" if is_gpu else "cpu",
        "DTYPE": unless_default(spec.model.dtype, "auto"),
        "WEIGHTS": unless_default(process.weights.lower(), "auto"),
        "DRAIN_SECONDS": process.drain_seconds,
        "MAX_MODEL_LEN": spec.model.max_model_len,
        "LOOKAHEAD": spec.speculation.lookahead,
        "BRANCHES": spec.speculation.branches,
        "THREADS": None if is_gpu else num_threads,
        "REFLECTION": "true" if spec.observability.reflection else None,
        "TERMINATION_LOG": TERMINATION_LOG,
        **security_settings(resource, component, operator),
        **(
            _target_settings(resource, cell or 0)
            if is_target
            else {"MAX_SESSIONS": spec.draft.sequences_per_replica}
        ),
    }
    fields = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
    found = variables(prefix, settings) + [
        {"name": f"{prefix}_{name}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    if cell is not None:
        found.append({"name": f"{prefix}_CELL", "value": str(cell)})
    return found + hub_environment(process.source)


def hub_environment(source: Source) -> list[Object]:
    """Variables of a process whose model is on the hub; empty for other sources."""
    # The engine reads what was fetched, and sends no request to the hub.
    return [_HUB, {"name": "HF_HUB_OFFLINE", "value": "1"}] if is_on_hub(source) else []


def is_on_hub(source: Source) -> bool:
    """Whether the model is fetched before the engine starts."""
    return source.uri.startswith("hf://")


def fetch_environment(source: Source) -> list[Object]:
    """Settings of the container that fetches a model. No other container has the hub's token."""
    settings: dict[str, object] = {"MODEL": _model(source), "TERMINATION_LOG": TERMINATION_LOG}
    found = [*variables("SSD_FETCH", settings), _HUB]
    if source.token_secret_ref is not None:
        # By reference: the operator never reads its value.
        reference = {"secretKeyRef": dict(source.token_secret_ref)}
        found.append({"name": "HF_TOKEN", "valueFrom": reference})
    return found


def merged(ours: Sequence[Object], users: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Our variables and the user's, which have precedence unless their name is reserved."""
    theirs = {each["name"]: dict(each) for each in users if each["name"] not in reserved.ENV}
    kept = [theirs.pop(each["name"], each) for each in ours]
    return kept + list(theirs.values())


def volume_claim(source: Source) -> str:
    """Claim of a ``pvc://claim/path`` source; empty for others."""
    return _claim_and_path(source)[0]


def _claim_and_path(source: Source) -> tuple[str, str]:
    if not source.uri.startswith("pvc://"):
        return "", ""
    claim, _, path = source.uri.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def _model(source: Source) -> str:
    """The source as our processes spell it."""
    return f"{source.uri}@{source.revision}" if source.revision else model_folder(source)


def model_folder(source: Source) -> str:
    """Folder of a claim in the pod; the name of an embedded model as it is."""
    claim, path = _claim_and_path(source)
    return f"{reserved.MODELS_FOLDER}/{path}".rstrip("/") if claim else source.uri


def unless_default(value: object, default: object) -> object:
    """Return a value that differs from the default of the process, else None."""
    return None if value == default else value


def _target_settings(resource: Resource, cell: int) -> dict[str, object]:
    spec, engine = resource.spec, resource.spec.target.ssd or SsdEngine()
    return {
        "MODEL_NAME": spec.model.name or resource.name,
        "DRAFTS": f"{draft_deployment(resource, cell)}:{DRAFT_PORT}",
        # One rank on each GPU of the pod.
        "TENSOR_PARALLEL_SIZE": unless_default(spec.tensor_parallel_size, 1),
        "MAX_NUM_SEQS": engine.max_num_seqs,
        "MAX_QUEUE": engine.max_queue,
        "DETERMINISTIC": "true" if engine.deterministic else None,
        "CHANNEL": unless_default(spec.transport.channel.lower(), "grpc"),
        "MAX_ROUND_TRIP_US": spec.transport.max_round_trip_microseconds,
        "FAN_OUT": unless_default(spec.speculation.fan_out.lower(), "adaptive"),
        "BACKUP": unless_default(spec.speculation.backup.lower(), "ngram"),
        "DRAFT_DEADLINE_MS": unless_default(
            spec.draft_deadline_milliseconds, PROCESS_DEADLINE_MILLISECONDS
        ),
    }


def security_settings(resource: Resource, component: Component, operator: str) -> dict[str, object]:
    """Files and names of the security block; none of the values is a secret."""
    tls, settings = resource.spec.security.tls, dict[str, object]()
    is_target = component is Component.TARGET
    if tls is not None:
        authority = f"{reserved.TLS_FOLDER}/ca.crt"
        settings["TLS_CERTIFICATE"] = f"{reserved.TLS_FOLDER}/tls.crt"
        settings["TLS_KEY"] = f"{reserved.TLS_FOLDER}/tls.key"
        if is_target:
            settings["LINK_CA"] = authority
            settings["LINK_SERVER_NAME"] = server_name(
                resource.namespace, component_name(resource, Component.DRAFT)
            )
        if tls.mode == "Mutual":
            target = spiffe_id(resource.namespace, component_name(resource, Component.TARGET))
            callers = ",".join(tls.client_names) if is_target else target
            settings["TLS_CLIENT_CA"] = authority
            settings["CALLER_NAMES"] = callers or None
            settings["ADMIN_NAMES"] = operator
    if resource.spec.security.token_secret_name is not None:
        settings["TOKEN_FILE"] = _tokens(CLIENT_TOKENS if is_target else LINK_TOKENS)
        settings["ADMIN_TOKEN_FILE"] = _tokens(ADMIN_TOKENS)
        if is_target:
            settings["LINK_TOKEN_FILE"] = _tokens(LINK_TOKENS)
    return settings


def _tokens(key: str) -> str:
    return f"{reserved.TOKENS_FOLDER}/{key}"


def variables(prefix: str, settings: Mapping[str, object]) -> list[Object]:
    """Settings as variables of a container, without those that are None."""
    return [
        {"name": f"{prefix}_{name}", "value": str(value)}
        for name, value in sorted(settings.items())
        if value is not None
    ]
