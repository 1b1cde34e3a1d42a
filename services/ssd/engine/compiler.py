"""What torch.compile needs: a C compiler, and a limit of shapes."""

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


def compiled_by_shape(function: Function, backend: str = "inductor") -> Function:
    """Return the function, compiled as a whole for each shape of its arguments.

    The limit is that of the process: torch before 2.13 has none for one function.
    """
    torch.compiler.config.recompile_limit = MAX_SHAPES
    compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
    return cast("Function", compiled)


def has_c_compiler() -> bool:
    """Return whether there is a C compiler, with which Triton builds the launchers of kernels."""
    return which("cc") is not None or which("gcc") is not None


def require_compiler(device: str, setting: str, alternative: str) -> None:
    """Check what generated kernels need. Without CUDA, no kernels are generated.

    Args:
        device: of the passes.
        setting: what generates kernels.
        alternative: what to do without a compiler.

    Raises:
        SettingsError: the device has CUDA, and there is no C compiler.
    """
    if device.startswith("cuda") and not has_c_compiler():
        raise SettingsError(
            f"{setting} needs a C compiler, and there is neither cc nor gcc; install one, or "
            f"{alternative}"
        )
