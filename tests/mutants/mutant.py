"""A small mistake in the code."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: ``before`` becomes ``after`` in a file below ``services/``."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]
