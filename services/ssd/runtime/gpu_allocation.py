"""The GPUs that a process may use: those that are allocated to its container.

A container sees the GPUs that its runtime gives it, a privileged one all GPUs of its node. CUDA
then numbers all of them, and ``cuda:0`` can belong to another pod. The device plugin of Kubernetes
lists the allocated ones in ``NVIDIA_VISIBLE_DEVICES`` or as names of files in a folder; with CDI
there is no list. ``CUDA_VISIBLE_DEVICES`` restricts CUDA, also in ranks, which inherit it.

Nothing here initialises CUDA, which reads that variable when it starts.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ssd.engine_settings import EngineSettings
from ssd.errors import SettingsError
from ssd.observability.log import get_logger
from ssd.settings import gpu_lists, show_gpus

_log = get_logger("ssd")
MOUNTED = "/var/run/nvidia-container-devices"
"""Value of ``NVIDIA_VISIBLE_DEVICES`` if this folder has a file for each allocated GPU."""
DEVICES = Path("/dev")
"""Folder of device files."""
_ID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """What a process can find out about its GPUs without CUDA."""

    chosen: tuple[str, ...] | None
    """Ids or numbers of ``CUDA_VISIBLE_DEVICES``; None if it is not set."""
    allocated: tuple[str, ...]
    """Ids or numbers that the device plugin lists; empty without a list."""
    num_visible: int
    """GPUs whose device file the process has; 0 if the system has no such files."""
    is_pod: bool
    """Whether the operator created the pod, which then requests as many GPUs as it needs."""


def allocated_gpus(listed: str | None, mounted: Collection[str]) -> tuple[str, ...]:
    """Return the ids or numbers that the device plugin lists.

    Args:
        listed: ``NVIDIA_VISIBLE_DEVICES``; None if it is not set.
        mounted: names in the folder ``MOUNTED``.
    """
    names = sorted(mounted) if listed == MOUNTED else (listed or "").split(",")
    # Others are words: all, none, void.
    return tuple(name for name in names if name.startswith(_ID_PREFIXES) or name.isdecimal())


def own_gpus(view: GpuView, num_needed: int) -> tuple[str, ...] | None:
    """Return the ids with which to restrict CUDA; None if it sees no GPU of others.

    Args:
        view: of this process.
        num_needed: GPUs of the process, counted from ``cuda:0``.

    Raises:
        SettingsError: too few GPUs are allocated, or it is not known which GPUs are.
    """
    _check_number(view, num_needed)
    num_own = len(view.allocated) or num_needed
    if view.num_visible <= num_own:
        return None
    sees = f"the container sees {view.num_visible} GPUs"
    if not view.allocated:
        if view.chosen is not None or not view.is_pod:
            return None
        raise SettingsError(
            f"{sees}, {num_needed} are needed, and nothing lists those that are allocated to it; "
            "do not make it privileged, or set CUDA_VISIBLE_DEVICES to their ids"
        )
    if not all(gpu.startswith(_ID_PREFIXES) for gpu in view.allocated):
        raise SettingsError(
            f"{sees}, and the {num_own} allocated ones are listed by number, which CUDA may count "
            "in another order; list them by id (deviceIDStrategy uuid of the device plugin)"
        )
    if view.chosen is None:
        return view.allocated
    # CUDA also accepts the beginning of an id.
    if not all(any(gpu.startswith(prefix) for gpu in view.allocated) for prefix in view.chosen):
        raise SettingsError(
            f"{sees}, CUDA_VISIBLE_DEVICES is {','.join(view.chosen)}, and those that are "
            f"allocated to it are {','.join(view.allocated)}; name these, or leave it out"
        )
    return None


def use_own_gpus(settings: EngineSettings) -> None:
    """Restrict CUDA in this process, and in those that it starts, to the allocated GPUs.

    Called before anything initialises CUDA. On a CPU it does nothing.

    Raises:
        SettingsError: see ``own_gpus``.
    """
    kind, _, index = settings.device.partition(":")
    if kind != "cuda":
        return
    chosen, listed = gpu_lists()
    view = GpuView(
        chosen=None if chosen is None else tuple(filter(None, chosen.split(","))),
        allocated=allocated_gpus(listed, _names(Path(MOUNTED), "*")),
        num_visible=len(_names(DEVICES, "nvidia[0-9]*")),
        is_pod=bool(settings.node_name),
    )
    try:
        ids = own_gpus(view, int(index or 0) + settings.num_ranks)
    except SettingsError as error:
        raise SettingsError(f"device {settings.device!r} cannot be used here: {error}") from error
    if ids is not None:
        show_gpus(ids)
        _log.info("gpus_restricted", gpus=",".join(ids), visible=view.num_visible)


def _check_number(view: GpuView, num_needed: int) -> None:
    gpus, origin = view.allocated, "allocated"
    if view.chosen is not None:
        gpus, origin = view.chosen, "in CUDA_VISIBLE_DEVICES"
    elif not gpus:
        return
    if len(gpus) < num_needed:
        raise SettingsError(f"{num_needed} GPUs are needed, and {len(gpus)} are {origin}")


def _names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]
