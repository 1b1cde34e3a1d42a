"""What torch.compile needs: a C compiler, a limit of shapes, and sums of one order."""

from collections.abc import Callable
from shutil import which
from typing import Any, TypeVar, cast

import torch
import torch.compiler.config

from ssd.errors import SettingsError

MAX_SHAPES = 256
"""Limit of compilations of one function. Every pass shape compiles it, and torch allows only 8 by
default; beyond the limit, it raises."""
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_by_shape(
    function: Function, backend: str = "inductor", *, has_one_order: bool = True
) -> Function:
    """Return the function, compiled as a whole for each shape of its arguments.

    With ``has_one_order``, sums have one order for all shapes. Otherwise torch selects kernels by
    measured times, and a row can have other bits in another batch or after a restart. Torch before
    2.13, with which only ``make gpu-check`` runs, has no option for it and no limit of a function.
    """
    arguments: dict[str, Any] = {"dynamic": False, "fullgraph": True, "backend": backend}
    if torch.__version__ < "2.13":
        torch.compiler.config.recompile_limit = MAX_SHAPES
    else:
        arguments["recompile_limit"] = MAX_SHAPES
        if has_one_order and backend == "inductor":
            arguments["options"] = {"batch_invariant": True}
    return cast("Function", torch.compile(function, **arguments))


def has_c_compiler() -> bool:
    """Return whether there is a C compiler, with which Triton builds the launchers of kernels."""
    return which("cc") is not None or which("gcc") is not None


def require_compiler(device: str, setting: str, alternative: str) -> None:
    """Check that there is a C compiler, which the kernels of ``setting`` need with CUDA.

    The error proposes ``alternative``.

    Raises:
        SettingsError: the device has CUDA, and there is no C compiler.
    """
    if device.startswith("cuda") and not has_c_compiler():
        raise SettingsError(
            f"{setting} needs a C compiler, and there is neither cc nor gcc; install one, or "
            f"{alternative}"
        )
