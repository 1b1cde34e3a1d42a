"""The attention backends of a device."""

from ssd.engine.attention.backend import AUTO, BACKENDS
from ssd.engine.attention.paged import PAGED, paged_problem
from ssd.errors import SettingsError


def check_attention(name: str, device: str, dtype: str) -> None:
    """Refuse a backend that cannot run with a device and a dtype on any machine.

    Whether a package is installed is known only on the machine where the process runs.

    Raises:
        SettingsError: there is no such backend, or the device or the dtype excludes it.
    """
    if name == AUTO:
        return
    known = sorted({AUTO, *BACKENDS, *PAGED})
    if name not in known:
        raise SettingsError(f"attention: {name!r} is not one of {', '.join(known)}")
    if device.startswith("cuda") and name not in PAGED:
        problem: str | None = f"it runs on CPUs, and the device is {device}"
    else:
        problem = paged_problem(name, device, dtype) if name in PAGED else None
    if problem is not None:
        raise SettingsError(f"attention {name}: {problem}; set attention to auto")
