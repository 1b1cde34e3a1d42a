"""What a check gets, and what it returns."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

Figure = float | int | str | bool
"""A measured value. Names of figures end in their unit."""


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
    """Of a check that timed out, nothing is known: compilers can be slow."""
    reason: str = ""
    """Why it did not pass."""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return a JSON object, which ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the object of ``to_json``."""
        return cls(**json.loads(text))


class SkipError(Exception):
    """The check cannot run here; the message is the reason."""


class WrongResultError(Exception):
    """A result is wrong; the message names it."""
