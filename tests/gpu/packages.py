"""The packages that the checks need, with the bounds of ``pyproject.toml``.

This module runs without any of them.
"""

import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

EXPECTED = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "jinja2": "jinja2",
}
"""Distributions by module that a GPU machine should have: the first two bring the others."""
ADDED = {
    "yaml": "pyyaml",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "google.rpc": "googleapis-common-protos",
    "google.protobuf": "protobuf",
    "prometheus_client": "prometheus-client",
    "opentelemetry.trace": "opentelemetry-api",
    "llguidance": "llguidance",
    "rich": "rich",
    "pytest": "pytest",
}
"""Distributions by module that a GPU machine may lack."""
REQUIRED = EXPECTED | ADDED
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("engine", "cli", "test")
"""Extras with the packages of ``REQUIRED``, besides the base."""


def requirements() -> dict[str, str]:
    """Return the requirements of the product, with their bounds, by distribution."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (*project["dependencies"], *(line for name in EXTRAS for line in extras[name]))
    return {re.split("[<>=]", line)[0]: line for line in lines}


def missing_requirements(required: Mapping[str, str] = REQUIRED) -> list[str]:
    """Return the requirements that are not installed, or with a version below their bound.

    The check ``machine`` compares the version of torch: nothing replaces the torch of a machine.
    """
    bounds = requirements()
    return [
        bounds[distribution]
        for module, distribution in required.items()
        if not _is_installed(module)
        or (distribution != "torch" and _is_too_old(distribution, bounds[distribution]))
    ]


def release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 11, 0) of ``2.11.0+cu130``."""
    found = re.match(r"\d+(\.\d+)*", text)
    assert found is not None, f"{text!r} is not a version"
    return tuple(map(int, found[0].split(".")))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _is_too_old(distribution: str, requirement: str) -> bool:
    """Return whether a version is below its bound; a module of unknown version counts as old."""
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return True
    return release(found) < release(requirement.partition(">=")[2])
