"""The versions of vLLM that the plugin supports, and what it uses of them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ssd.errors import SetupError

SUPPORTED = ("0.32",)
"""First two numbers of the versions."""


def check_version(version: str) -> None:
    """Check the version of vLLM.

    Raises:
        SetupError: the plugin does not support it.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise SetupError(
            f"ssd_vllm supports vLLM {', '.join(SUPPORTED)}, found {version}; install one of them, "
            "or another version of ssd-serving"
        )


def check_parameters(used: Mapping[Callable[..., Any], tuple[str, ...]]) -> None:
    """Check that functions have the parameters that the plugin gives or reads.

    Raises:
        SetupError: one differs, although the version is supported.
    """
    for function, names in used.items():
        parameters = tuple(inspect.signature(function).parameters)
        if parameters[: len(names)] != names:
            raise SetupError(
                f"{function.__qualname__} of this vLLM has the parameters {', '.join(parameters)}; "
                f"expected {', '.join(names)}"
            )
