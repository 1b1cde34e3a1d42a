"""The GPUs, the versions of the libraries, and the bandwidth of a copy."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ssd_bench.gpu_check.outcome import Environment, Figure, WrongResultError
from ssd_bench.gpu_check.timing import device_seconds

MIN_TORCH = (2, 13)
PACKAGES = ("transformers", "flash-attn", "vllm", "triton")
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


def check_machine(environment: Environment) -> dict[str, Figure]:
    """Report the machine; fail if torch is too old."""
    found = torch.__version__.split("+")[0].split(".")
    if (int(found[0]), int(found[1])) < MIN_TORCH:
        raise WrongResultError(
            f"torch is {torch.__version__}, and the product needs {MIN_TORCH[0]}.{MIN_TORCH[1]}"
        )
    figures: dict[str, Figure] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }
    if environment.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, _nccl_version())),
        }
    return figures | {"copy_gb_per_second": round(copy_bandwidth(environment) / 1e9, 1)}


def copy_bandwidth(environment: Environment) -> float:
    """Return the bytes that a large copy reads and writes in a second."""
    size = COPY_BYTES[environment.device]
    source = torch.zeros(size, dtype=torch.uint8, device=environment.target_device)
    copied = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: copied.copy_(source), environment)


def _nccl_version() -> tuple[int, ...]:
    found: tuple[int, ...] = torch.cuda.nccl.version()
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
