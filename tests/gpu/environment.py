"""Where a check runs, what it found, and the list of checks in the order in which they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

Figure = float | int | str | bool
"""A measured value. Names of figures end in their unit."""
NO_GPU = (
    "torch finds no GPU: gpu-check needs an NVIDIA GPU (36 GB of memory for all checks), its "
    "driver and a torch with CUDA; --on cpu runs the same checks with small models"
)
CHECKS: Mapping[str, float] = MappingProxyType(
    {
        "machine": 30.0,
        "attention flex": 75.0,
        "bits of flex": 40.0,
        "attention flash_attn": 30.0,
        "graphs": 110.0,
        "tokens of the embedded pair": 130.0,
        "passes of llama": 125.0,
        "logits of llama": 90.0,
        "tokens of llama": 140.0,
        "channel collective": 50.0,
        "tokens of two ranks": 50.0,
        "tables of llama": 160.0,
        "speed of llama": 160.0,
        "logits of qwen3": 60.0,
        "tokens of qwen3": 80.0,
        "compiled layers of llama": 50.0,
        "peer transformers": 40.0,
        "peer vllm": 40.0,
        "attention flex, other shapes": 40.0,
    }
)
"""Seconds of each check, which also has the time that earlier checks did not use. The most
valuable checks run first, for machines with little time. Most of the time compiles kernels: each
shape of a pass needs one of FlexAttention, which takes up to 7 s."""
PEER = "peer "
"""Beginning of the names of checks that measure another product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a check runs."""

    device: str
    """``cuda`` or ``cpu``."""
    scratch: Path
    """A folder that all checks of a run share."""

    @property
    def is_cuda(self) -> bool:
        """Whether there are GPUs; else models are small."""
        return self.device == "cuda"

    @property
    def target_device(self) -> str:
        """Device of targets."""
        return "cuda:0" if self.is_cuda else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check."""

    status: Literal["passed", "failed", "timed out", "skipped"]
    """A check that timed out may be right: compilers can be slow. It has the figures that it had
    measured."""
    reason: str = ""
    """Why it did not pass."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0


class Figures(dict[str, Figure]):
    """Figures of a check by name; reports each change by ``[]=`` and ``|=``."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def __setitem__(self, name: str, value: Figure) -> None:
        super().__setitem__(name, value)
        self._changed()

    # Checks use this one of the overloads of dict.
    def __ior__(self, found: Mapping[str, Figure]) -> Self:  # type: ignore[override, misc]
        super().__ior__(found)
        self._changed()
        return self
