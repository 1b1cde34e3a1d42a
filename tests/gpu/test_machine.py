"""The GPUs, the versions of the libraries, and the bandwidth of a copy."""

import platform
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from packaging.requirements import Requirement
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import copy_bandwidth
from tests.gpu.packages import release, requirements

MIN_TORCH = (2, 11)
"""Oldest torch that can run the checks: a machine without a network may have no supported one."""
PACKAGES = ("transformers", "flash-attn", "vllm", "triton")


@pytest.mark.check("machine")
def test_torch_is_new_enough(environment: Environment, figures: dict[str, Figure]) -> None:
    figures |= {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_is_supported": is_supported(torch.__version__),
        **{name: _version(name) for name in PACKAGES},
    }
    if environment.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    figures["copy_gb_per_second"] = round(copy_bandwidth(environment) / 1e9, 1)
    check_torch()


def test_a_torch_is_supported_within_the_bounds_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = ("2.11.0+cu130", "2.13.0+cu130", "2.14.1")
    assert [is_supported(each) for each in versions] == [False, True, False]
    for each in versions:
        monkeypatch.setattr("torch.__version__", each)
        check_torch()


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1+cu126")
    with pytest.raises(AssertionError, match=r"torch is 2\.10\.1\+cu126, the check needs 2\.11"):
        check_torch()


def test_a_machine_with_an_old_torch_is_measured(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1+cu126")
    figures: dict[str, Figure] = {}
    with pytest.raises(AssertionError, match="torch is 2"):
        test_torch_is_new_enough(environment, figures)
    assert figures["torch"] == "2.10.1+cu126"
    assert figures["copy_gb_per_second"]


def check_torch() -> None:
    """Check that torch can run the checks."""
    needed = ".".join(map(str, MIN_TORCH))
    is_new = release(torch.__version__) >= MIN_TORCH
    assert is_new, f"torch is {torch.__version__}, the check needs {needed}"


def is_supported(torch_version: str) -> bool:
    """Return whether the package can be installed with a version of torch."""
    return Requirement(requirements()["torch"]).specifier.contains(torch_version, prereleases=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
