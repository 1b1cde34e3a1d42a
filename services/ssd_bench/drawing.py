"""Access to the module of plots, which needs an extra."""

from importlib import import_module
from types import ModuleType

from ssd.errors import SetupError


def plots() -> ModuleType:
    """Return the module that draws plots, before anything is measured.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        return import_module("ssd_bench.plots")
    except ModuleNotFoundError as error:
        raise SetupError(
            "the plot needs matplotlib, which is not installed: run 'make setup', or "
            "pip install 'ssd-serving[bench]'"
        ) from error
