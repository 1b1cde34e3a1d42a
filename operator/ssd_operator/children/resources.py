"""CPU, memory, disk and GPUs of pods. Pure."""

import math

from ssd_operator.api.fields import parse_quantity
from ssd_operator.api.spec import Object
from ssd_operator.children.objects import Component, Workload

_REQUESTS = {
    ("cpu", Component.TARGET): {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "256Mi"},
    ("cpu", Component.DRAFT): {"cpu": "200m", "memory": "768Mi", "ephemeral-storage": "256Mi"},
    ("nvidia", Component.TARGET): {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "4Gi"},
    ("nvidia", Component.DRAFT): {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "4Gi"},
}
_REQUESTS_BESIDE_GPUS = {"cpu": "16", "memory": "32Gi", "ephemeral-storage": "4Gi"}
"""Requests of a draft on CPUs of a GPU node, which the static CPU manager allocates to it alone."""
_PLAIN = ("cpu", "memory", "ephemeral-storage")


def engine_resources(workload: Workload) -> Object:
    """What the user gives, our defaults, and the GPUs."""
    spec, block, device = workload.spec, workload.block, workload.device
    is_beside_gpus = has_own_cpus(workload)
    own_requests = (
        _REQUESTS_BESIDE_GPUS if is_beside_gpus else _REQUESTS[device, workload.component]
    )
    if block.source.is_on_hub and spec.model_cache.size_limit:
        own_requests = own_requests | {"ephemeral-storage": str(spec.model_cache.size_limit)}
    num_gpus = spec.tensor_parallel_size if workload.is_target else 1
    gpus = {block.gpu_resource: str(num_gpus)} if device == "nvidia" else {}
    own_limits = {} if spec.is_gpu else {"memory": "2Gi"}
    resources = with_defaults(block.resources, own_requests, own_limits)
    requests, limits = resources.get("requests", {}), resources.get("limits", {}) | gpus
    if is_beside_gpus:
        # Equal requests and limits: the QoS class Guaranteed, which has CPUs of its own.
        equal = {key: {**limits, **requests}[key] for key in ("cpu", "memory")}
        requests, limits = equal | requests, equal | limits
    return present(requests=requests, limits=limits)


def without_gpus(resources: Object) -> Object:
    """Return resources without extended resources."""
    return present(
        **{
            part: {name: size for name, size in sizes.items() if name in _PLAIN}
            for part, sizes in resources.items()
        }
    )


def with_defaults(users: Object, requests: Object, limits: Object) -> Object:
    """Resources that the user gives, and defaults for other keys.

    A key named in requests or limits alone loses both defaults: a request above our own limit would
    be refused, and a limit without a request is also the request.
    """
    named = {*users.get("requests", {}), *users.get("limits", {})}
    defaults = {"requests": requests, "limits": limits}
    completed = {
        part: {key: size for key, size in sizes.items() if key not in named} | users.get(part, {})
        for part, sizes in defaults.items()
    }
    return present(**completed)


def has_own_cpus(workload: Workload) -> bool:
    """Whether the pods are drafts on the CPUs of GPU nodes."""
    return workload.spec.is_gpu and workload.device == "cpu"


def num_threads(workload: Workload) -> int:
    """Threads of a forward pass on a CPU: one per requested CPU, rounded up.

    If a draft has more than two CPUs of its own, one of them runs all other threads; see
    ``ssd.runtime.cpu_plan``.
    """
    resources = engine_resources(workload)
    requested = {**resources.get("limits", {}), **resources.get("requests", {})}["cpu"]
    num_cpus = max(1, math.ceil(parse_quantity(requested)))
    return num_cpus - 1 if has_own_cpus(workload) and num_cpus > 2 else num_cpus


def present(**fields: object) -> Object:
    """Fields that hold something: the API server stores no empty text, list or map."""
    return {name: value for name, value in fields.items() if value}
