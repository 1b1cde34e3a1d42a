"""The process of a pod: what the engines of targets, and drafts, differ in. Pure.

Everything that depends on ``spec.target.engine`` is here: no other module compares its name.

*Decision*: four probes of ``/livez`` in 20 s without an answer within 5 s restart a process.
*Because* a stopped process is then killed within 30 s (measured: 26 to 29), and one that is only
short of CPU time answers: a thread that waits for no other one serves the page. A decoding target
with 1.6 % of a CPU, a thirtieth of its request, answered each of 57 probes in 3.5 s; with 0.3 %,
one of 22 took longer than 5 s. *Not chosen*: fewer or shorter probes, because a virtual machine can
stand still for seconds. *Revisit when* a process is restarted that was not stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ssd_operator.api.spec import Accelerator, Object, Resource
from ssd_operator.children.environment import (
    VLLM_PORT,
    engine_environment,
    vllm_arguments,
    vllm_environment,
)
from ssd_operator.children.objects import (
    DRAFT_PORT,
    GATEWAY_PORT,
    HTTP_PORT,
    TARGET_PORT,
    Component,
    Workload,
)
from ssd_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """One kind of process."""

    module: str
    """``python -m`` runs it. With ``--print-config`` it checks its settings and exits."""
    image: Callable[[OperatorSettings], str]
    """Image of pods whose resource sets none."""
    ports: Mapping[str, int]
    """Ports by name. The operator calls ``grpc``; ``http`` has probes and metrics."""
    api: Literal["grpc", "http"] = "grpc"
    """Name of the port that clients, or the targets of drafts, call. If it is ``http``, only they
    reach it; otherwise its pages contain no prompt, and any pod does."""
    endpoint: str = ""
    """Where clients call, with HOST for the name of the Service, and SCHEME for http or https."""
    tls_ports: frozenset[str] = frozenset({"grpc"})
    """Names of the ports that have the certificate of the resource, if it has one."""
    ready_page: str = "/readyz"
    live_page: str = "/livez"
    live_period: int = 5
    """Seconds between two probes of this page; one fails after 5 s without an answer."""
    live_failures: int = 4
    """Failed probes that restart a container."""
    shared_memory: Mapping[Accelerator, str] = field(default_factory=dict)
    """Maximum size of ``/dev/shm`` by device."""
    environment: Callable[[Workload], list[Object]] = lambda _: []
    arguments: Callable[[Workload], list[str]] = lambda _: []


_DRAFT = EngineProcess(
    module="ssd_draft",
    image=lambda settings: settings.draft_image,
    shared_memory={"nvidia": "1Gi", "cpu": "64Mi"},
    ports={"grpc": DRAFT_PORT, "http": HTTP_PORT},
    environment=engine_environment,
)
_GATEWAY = EngineProcess(
    module="ssd_gateway",
    image=lambda settings: settings.gateway_image,
    ports={"http": GATEWAY_PORT},
    api="http",
)
_TARGETS = {
    "ssd": EngineProcess(
        module="ssd_target",
        image=lambda settings: settings.target_image,
        shared_memory={"nvidia": "8Gi", "cpu": "64Mi"},
        ports={"grpc": TARGET_PORT, "http": HTTP_PORT},
        endpoint=f"HOST:{TARGET_PORT}",
        environment=engine_environment,
    ),
    "vllm": EngineProcess(
        module="ssd_vllm",
        image=lambda settings: settings.vllm_image,
        # Processes of vLLM exchange messages there, 160 MiB and more.
        shared_memory={"nvidia": "8Gi", "cpu": "1Gi"},
        ports={"grpc": TARGET_PORT, "http": VLLM_PORT},
        api="http",
        endpoint=f"SCHEME://HOST:{VLLM_PORT}/v1",
        tls_ports=frozenset({"grpc", "http"}),
        # This page answers once the model is loaded, and fails when the engine has died.
        ready_page="/health",
        live_page="/health",
        # The loop that tokenizes and serves requests answers it.
        live_period=10,
        live_failures=6,
        arguments=vllm_arguments,
        environment=vllm_environment,
    ),
}


def process_of(resource: Resource, component: Component) -> EngineProcess:
    """Return the process of a component's pods."""
    targets = _TARGETS[resource.spec.target.engine]
    return {Component.TARGET: targets, Component.DRAFT: _DRAFT}.get(component, _GATEWAY)


def has_tls(resource: Resource, component: Component, port: str) -> bool:
    """Whether a port of a component's pods has TLS."""
    is_secured = resource.spec.security.tls is not None
    return is_secured and port in process_of(resource, component).tls_ports
