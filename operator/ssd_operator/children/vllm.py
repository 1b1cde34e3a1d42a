"""Arguments and variables of a target with engine vllm. Pure.

The process is ``python -m ssd_vllm``: vLLM's own server, whose arguments are vLLM's. Its worker of
rank 0 connects to the drafts and serves ``AdminService`` on the gRPC port, which only the operator
calls. Its middleware checks the tokens of clients (``ssd_vllm.gate``).
"""

import json

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object, Resource
from ssd_operator.children.environment import (
    PROCESS_DEADLINE_MILLISECONDS,
    hub_environment,
    model_folder,
    security_settings,
    unless_default,
)
from ssd_operator.children.names import DRAFT_PORT, TARGET_PORT, Component, draft_deployment

VLLM_PORT = 8000
"""Of the OpenAI API, ``/health`` and ``/metrics``."""


def vllm_environment(resource: Resource, num_threads: int) -> list[Object]:
    """Variables of vLLM; the user's are added to them."""
    threads = {"name": "OMP_NUM_THREADS", "value": str(num_threads)}
    own = [] if resource.spec.is_gpu else [threads]
    return own + hub_environment(resource.spec.target.source)


def vllm_arguments(resource: Resource, cell: int, operator: str) -> list[str]:
    """Arguments of vLLM: the user's, then those of fields of the resource, which win.

    Args:
        resource: whose target.
        cell: of the target.
        operator: name in the operator's certificate.
    """
    spec, source = resource.spec, resource.spec.target.source
    name = source.uri.removeprefix("hf://")
    speculation = {
        "method": "custom_class",
        "model": "ssd_vllm.Proposer",
        "num_speculative_tokens": spec.speculation.lookahead,
    }
    plugin = {
        "drafts": [f"{draft_deployment(resource, cell)}:{DRAFT_PORT}"],
        "admin_port": TARGET_PORT,
        # The operator calls the address of the pod; the NetworkPolicy admits no other client.
        "admin_host": "0.0.0.0",  # noqa: S104
        "allow_insecure": True,
        "branches": spec.speculation.branches,
        "fan_out": unless_default(spec.speculation.fan_out.lower(), "adaptive"),
        "backup": unless_default(spec.speculation.backup.lower(), "ngram"),
        "draft_deadline_ms": unless_default(
            spec.draft_deadline_milliseconds, PROCESS_DEADLINE_MILLISECONDS
        ),
        **{
            name.lower(): value
            for name, value in security_settings(resource, Component.TARGET, operator).items()
        },
    }
    given = {name: value for name, value in plugin.items() if value is not None}
    settings = {
        "model": name if source.revision else model_folder(source),
        "revision": source.revision,
        "served-model-name": spec.model.name or resource.name,
        "port": VLLM_PORT,
        "ssl-certfile": f"{reserved.TLS_FOLDER}/tls.crt" if spec.security.tls else None,
        "ssl-keyfile": f"{reserved.TLS_FOLDER}/tls.key" if spec.security.tls else None,
        "dtype": unless_default(spec.model.dtype, "auto"),
        "max-model-len": spec.model.max_model_len,
        # One rank on each GPU of the pod.
        "tensor-parallel-size": unless_default(spec.tensor_parallel_size, 1),
        "shutdown-timeout": spec.target.drain_seconds,
        "worker-cls": "ssd_vllm.Worker",
        "speculative-config": json.dumps(speculation),
        "additional-config": json.dumps({"ssd": given}),
    }
    own = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    return [*spec.target.args, *own]
