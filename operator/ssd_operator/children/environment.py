"""Variables and arguments of pods: settings of the processes, and nothing else. Pure.

A process refuses a setting that it does not have, and a pinned image may be older than the
operator. So a variable is left out if its value is the process's own default.

A target with engine vllm is ``python -m ssd_vllm``: vLLM's own server, whose arguments are vLLM's.
Its worker of rank 0 connects to the drafts and serves ``AdminService`` on the gRPC port, which only
the operator calls. Its middleware checks the tokens of clients (``ssd_vllm.gate``).
"""

import json
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
VLLM_PORT = 8000
"""Port of the OpenAI API of vLLM, ``/health`` and ``/metrics``."""


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
        "DTYPE": _unless_default(spec.model.dtype, "auto"),
        "WEIGHTS": _unless_default(block.weights.lower(), "auto"),
        "DRAIN_SECONDS": block.drain_seconds,
        "MAX_MODEL_LEN": spec.model.max_model_len,
        "LOOKAHEAD": spec.speculation.lookahead,
        "BRANCHES": spec.speculation.branches,
        "THREADS": None if is_gpu else num_threads(workload),
        # Drafts of a pool have no collective channel: its targets may belong to others.
        "CHANNEL": _unless_default(spec.transport.channel.lower(), "grpc"),
        "REFLECTION": "true" if spec.observability.reflection else None,
        "TERMINATION_LOG": TERMINATION_LOG,
    }
    if workload.is_target:
        engine = spec.target.ssd or SsdEngine()
        settings |= {
            "MODEL_NAME": spec.model.name or workload.resource.name,
            "DRAFTS": f"{drafts_name(workload.resource, workload.cell or 0)}:{DRAFT_PORT}",
            # Each GPU of the pod has one rank.
            "TENSOR_PARALLEL_SIZE": _unless_default(spec.tensor_parallel_size, 1),
            "MAX_NUM_SEQS": engine.max_num_seqs,
            "MAX_QUEUE": engine.max_queue,
            "DETERMINISTIC": "true" if engine.deterministic else None,
            "MAX_ROUND_TRIP_US": spec.transport.max_round_trip_microseconds,
            **_target_settings(workload),
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
    return environment + _hub_environment(block.source)


def vllm_environment(workload: Workload) -> list[Object]:
    """Variables of vLLM; the user's are added to them."""
    threads = {"name": "OMP_NUM_THREADS", "value": str(num_threads(workload))}
    return ([] if workload.spec.is_gpu else [threads]) + _hub_environment(workload.block.source)


def vllm_arguments(workload: Workload) -> list[str]:
    """Arguments of vLLM: the user's, then the fields of the resource, which win."""
    spec, source = workload.spec, workload.block.source
    speculation = {
        "method": "custom_class",
        "model": "ssd_vllm.Proposer",
        "num_speculative_tokens": spec.speculation.lookahead,
    }
    plugin = {
        "drafts": [f"{drafts_name(workload.resource, workload.cell or 0)}:{DRAFT_PORT}"],
        "admin_port": TARGET_PORT,
        # The operator calls the address of the pod; the NetworkPolicy admits no other client.
        "admin_host": ANY_ADDRESS,
        "allow_insecure": True,
        **{name.lower(): value for name, value in _target_settings(workload).items()},
    }
    plugin_settings = {name: value for name, value in plugin.items() if value is not None}
    settings = {
        "model": source.uri.removeprefix("hf://") if source.revision else source.folder,
        "revision": source.revision,
        "served-model-name": spec.model.name or workload.resource.name,
        "port": VLLM_PORT,
        "ssl-certfile": f"{reserved.TLS_FOLDER}/tls.crt" if spec.security.tls else None,
        "ssl-keyfile": f"{reserved.TLS_FOLDER}/tls.key" if spec.security.tls else None,
        "dtype": _unless_default(spec.model.dtype, "auto"),
        "max-model-len": spec.model.max_model_len,
        # Each GPU of the pod has one rank.
        "tensor-parallel-size": _unless_default(spec.tensor_parallel_size, 1),
        "shutdown-timeout": spec.target.drain_seconds,
        "worker-cls": "ssd_vllm.Worker",
        "speculative-config": json.dumps(speculation),
        "additional-config": json.dumps({"ssd": plugin_settings}),
    }
    arguments = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    return [*spec.target.args, *arguments]


def _target_settings(workload: Workload) -> dict[str, object]:
    """Settings of speculation and security, which the engines of targets share."""
    speculation, deadline = workload.spec.speculation, workload.spec.draft_deadline_milliseconds
    return {
        "BRANCHES": speculation.branches,
        "FAN_OUT": _unless_default(speculation.fan_out.lower(), "adaptive"),
        "BACKUP": _unless_default(speculation.backup.lower(), "ngram"),
        "DRAFT_DEADLINE_MS": _unless_default(deadline, _PROCESS_DEADLINE_MILLISECONDS),
        **_security_settings(workload),
    }


def _hub_environment(source: Source) -> list[Object]:
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


def _unless_default(value: object, default: object) -> object:
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
