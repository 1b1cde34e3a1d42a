"""The extras of the distribution that commands need, and the line that names a missing one.

The base installation has only what clients need. This module imports none of the packages, so that
the command can report each of them.
"""

from collections.abc import Iterable
from importlib.util import find_spec

MODULES = {
    "cli": ("typer", "rich", "prompt_toolkit", "tokenizers", "huggingface_hub"),
    "engine": (
        *("torch", "openvino", "safetensors", "tokenizers", "jinja2", "llguidance"),
        *("huggingface_hub", "opentelemetry"),
    ),
    "gateway": ("starlette", "uvicorn", "pydantic"),
    "distill": ("transformers",),
}
"""Modules that an extra installs; ``pyproject.toml`` has the distributions."""


def missing_module(extras: Iterable[str]) -> str:
    """Return the first module of some extras that is not installed; empty if there is none."""
    modules = (module for extra in extras for module in MODULES[extra])
    return next((module for module in modules if find_spec(module) is None), "")


def how_to_install(module: str, extras: Iterable[str]) -> str:
    """Return a line that names a missing module and the command that installs it."""
    return (
        f"{module} is not installed: run 'make setup' in a checkout, or "
        f"pip install 'ssd-serving[{','.join(extras)}]'"
    )


def extra_of(module: str) -> str:
    """Return the extra that installs a module; empty if none does."""
    return next((extra for extra, modules in MODULES.items() if module in modules), "")
