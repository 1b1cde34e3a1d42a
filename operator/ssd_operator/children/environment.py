"""Environment of engine pods: settings of the processes, and nothing else.

A process refuses a setting that it does not have, and a pinned image may be older than the
operator. So a variable is left out if its value is the process's own default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object, Source, SsdEngine
from ssd_operator.children.objects import (
    DRAFT_PORT,
    HTTP_PORT,
    TARGET_PORT,
    Component,
    Workload,
    child_name,
    drafts_name,
    server_name,
    spiffe_id,
)
from ssd_operator.children.resources import num_threads

TERMINATION_LOG = "/dev/termination-log"
_HUB: Object = {"name": "HF_HOME", "value": reserved.HUB_FOLDER}
CLIENT_TOKENS, LINK_TOKENS, ADMIN_TOKENS = "clients", "links", "admins"
"""Keys of the Secret with tokens."""
ANY_ADDRESS = "0.0.0.0"  # noqa: S104
"""A pod is reached by its own address, of either family: processes take this for both."""
_PROCESS_DEADLINE_MILLISECONDS = 20
"""The processes' own table deadline."""


def engine_environment(workload: Workload) -> list[Object]:
    """Settings of a target or a draft."""
    spec, block, prefix = workload.spec, workload.block, f"SSD_{workload.component.upper()}"
    is_gpu = workload.device == "nvidia"
    settings = {
        "MODEL": _model(block.source),
        "HOST": ANY_ADDRESS,
        "PORT": TARGET_PORT if workload.is_target else DRAFT_PORT,
        "HTTP_PORT": HTTP_PORT,
        "DEVICE": "cuda" if is_gpu else "cpu",
        "DTYPE": unless_default(spec.model.dtype, "auto"),
        "WEIGHTS": unless_default(block.weights.lower(), "auto"),
        "DRAIN_SECONDS": block.drain_seconds,
        "MAX_MODEL_LEN": spec.model.max_model_len,
        "LOOKAHEAD": spec.speculation.lookahead,
        "BRANCHES": spec.speculation.branches,
        "THREADS": None if is_gpu else num_threads(workload),
        # Drafts of a pool have no collective channel: its targets may belong to others.
        "CHANNEL": unless_default(spec.transport.channel.lower(), "grpc"),
        "REFLECTION": "true" if spec.observability.reflection else None,
        "TERMINATION_LOG": TERMINATION_LOG,
    }
    if workload.is_target:
        engine = spec.target.ssd or SsdEngine()
        settings |= {
            "MODEL_NAME": spec.model.name or workload.resource.name,
            "DRAFTS": f"{drafts_name(workload.resource, workload.cell or 0)}:{DRAFT_PORT}",
            # Each GPU of the pod has one rank.
            "TENSOR_PARALLEL_SIZE": unless_default(spec.tensor_parallel_size, 1),
            "MAX_NUM_SEQS": engine.max_num_seqs,
            "MAX_QUEUE": engine.max_queue,
            "DETERMINISTIC": "true" if engine.deterministic else None,
            "MAX_ROUND_TRIP_US": spec.transport.max_round_trip_microseconds,
            **target_settings(workload),
        }
    else:
        settings |= {
            "MAX_SESSIONS": spec.draft.sequences_per_replica,
            **_security_settings(workload),
        }
    fields = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
    environment = variables(prefix, settings) + [
        {"name": f"{prefix}_{name}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    if workload.cell is not None:
        environment.append({"name": f"{prefix}_CELL", "value": str(workload.cell)})
    return environment + hub_environment(block.source)


def target_settings(workload: Workload) -> dict[str, object]:
    """Settings of speculation and security, which the engines of targets share."""
    speculation, deadline = workload.spec.speculation, workload.spec.draft_deadline_milliseconds
    return {
        "BRANCHES": speculation.branches,
        "FAN_OUT": unless_default(speculation.fan_out.lower(), "adaptive"),
        "BACKUP": unless_default(speculation.backup.lower(), "ngram"),
        "DRAFT_DEADLINE_MS": unless_default(deadline, _PROCESS_DEADLINE_MILLISECONDS),
        **_security_settings(workload),
    }


def hub_environment(source: Source) -> list[Object]:
    """Variables of a process whose model is on the hub; empty for other sources."""
    # The engine reads what was fetched, and sends no request to the hub.
    return [_HUB, {"name": "HF_HUB_OFFLINE", "value": "1"}] if source.is_on_hub else []


def fetch_environment(source: Source) -> list[Object]:
    """Settings of the container that fetches a model. No other container has the hub's token."""
    settings: dict[str, object] = {"MODEL": _model(source), "TERMINATION_LOG": TERMINATION_LOG}
    environment = [*variables("SSD_FETCH", settings), _HUB]
    if source.token_secret_ref is not None:
        # By reference: the operator never reads its value.
        reference = {"secretKeyRef": dict(source.token_secret_ref)}
        environment.append({"name": "HF_TOKEN", "valueFrom": reference})
    return environment


def merged(ours: Sequence[Object], users: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Our variables and the user's, which have precedence unless their name is reserved."""
    allowed = (variable for variable in users if variable["name"] not in reserved.ENV)
    theirs = {variable["name"]: dict(variable) for variable in allowed}
    overridden = [theirs.pop(variable["name"], variable) for variable in ours]
    return overridden + list(theirs.values())


def unless_default(value: object, default: object) -> object:
    """Return a value that differs from the default of the process, else None."""
    return None if value == default else value


def variables(prefix: str, settings: Mapping[str, object]) -> list[Object]:
    """Settings as variables of a container, without those that are None."""
    return [
        {"name": f"{prefix}_{name}", "value": str(value)}
        for name, value in sorted(settings.items())
        if value is not None
    ]


def _model(source: Source) -> str:
    """The source as our processes spell it."""
    return f"{source.uri}@{source.revision}" if source.revision else source.folder


def _security_settings(workload: Workload) -> dict[str, object]:
    """Files and names of the security block; none of the values is a secret."""
    resource, security = workload.resource, workload.spec.security
    settings = dict[str, object]()
    if (tls := security.tls) is not None:
        authority = f"{reserved.TLS_FOLDER}/ca.crt"
        settings["TLS_CERTIFICATE"] = f"{reserved.TLS_FOLDER}/tls.crt"
        settings["TLS_KEY"] = f"{reserved.TLS_FOLDER}/tls.key"
        if workload.is_target:
            settings["LINK_CA"] = authority
            # The drafts of all cells have one certificate.
            drafts = f"{resource.pool_prefix or resource.prefix}-{Component.DRAFT}"
            settings["LINK_SERVER_NAME"] = server_name(resource.namespace, drafts)
        if tls.mode == "Mutual":
            target = spiffe_id(resource.namespace, child_name(resource, Component.TARGET))
            callers = ",".join(tls.client_names) if workload.is_target else target
            settings["TLS_CLIENT_CA"] = authority
            settings["CALLER_NAMES"] = callers or None
            settings["ADMIN_NAMES"] = spiffe_id(
                workload.settings.pod_namespace, workload.settings.service_account
            )
    if security.token_secret_name is not None:
        settings["TOKEN_FILE"] = _tokens(CLIENT_TOKENS if workload.is_target else LINK_TOKENS)
        settings["ADMIN_TOKEN_FILE"] = _tokens(ADMIN_TOKENS)
        if workload.is_target:
            settings["LINK_TOKEN_FILE"] = _tokens(LINK_TOKENS)
    return settings


def _tokens(key: str) -> str:
    return f"{reserved.TOKENS_FOLDER}/{key}"
