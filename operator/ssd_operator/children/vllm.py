"""Arguments and variables of a target with engine vllm. Pure.

The process is ``python -m ssd_vllm``: vLLM's own server, whose arguments are vLLM's. Its worker of
rank 0 connects to the drafts and serves ``AdminService`` on the gRPC port, which only the operator
calls. Its middleware checks the tokens of clients (``ssd_vllm.gate``).
"""

import json

from ssd_operator.api import reserved
from ssd_operator.api.spec import Object
from ssd_operator.children.environment import (
    ANY_ADDRESS,
    hub_environment,
    target_settings,
    unless_default,
)
from ssd_operator.children.objects import DRAFT_PORT, TARGET_PORT, Workload, drafts_name
from ssd_operator.children.resources import num_threads

VLLM_PORT = 8000
"""Port of the OpenAI API, ``/health`` and ``/metrics``."""


def vllm_environment(workload: Workload) -> list[Object]:
    """Variables of vLLM; the user's are added to them."""
    threads = {"name": "OMP_NUM_THREADS", "value": str(num_threads(workload))}
    return ([] if workload.spec.is_gpu else [threads]) + hub_environment(workload.block.source)


def vllm_arguments(workload: Workload) -> list[str]:
    """Arguments of vLLM: the user's, then those of fields of the resource, which win."""
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
        **{name.lower(): value for name, value in target_settings(workload).items()},
    }
    plugin_settings = {name: value for name, value in plugin.items() if value is not None}
    settings = {
        "model": source.uri.removeprefix("hf://") if source.revision else source.folder,
        "revision": source.revision,
        "served-model-name": spec.model.name or workload.resource.name,
        "port": VLLM_PORT,
        "ssl-certfile": f"{reserved.TLS_FOLDER}/tls.crt" if spec.security.tls else None,
        "ssl-keyfile": f"{reserved.TLS_FOLDER}/tls.key" if spec.security.tls else None,
        "dtype": unless_default(spec.model.dtype, "auto"),
        "max-model-len": spec.model.max_model_len,
        # Each GPU of the pod has one rank.
        "tensor-parallel-size": unless_default(spec.tensor_parallel_size, 1),
        "shutdown-timeout": spec.target.drain_seconds,
        "worker-cls": "ssd_vllm.Worker",
        "speculative-config": json.dumps(speculation),
        "additional-config": json.dumps({"ssd": plugin_settings}),
    }
    arguments = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    return [*spec.target.args, *arguments]
