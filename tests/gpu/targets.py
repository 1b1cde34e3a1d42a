"""The speed targets of the product, and whether a run met them.

A target that is missed does not fail a run: results that are wrong do. Targets are for one H100 or
H200 with the shapes of an 8B target and a 1B draft, so a run on a CPU measures none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.gpu.environment import Figure, Outcome

PASSES, TOKENS, SPEED = "passes of llama", "tokens of llama", "speed of llama"
TEMPERATURES = ("t0", "t1")
Result = Literal["met", "not met", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedGoal:
    """A bound of figures of one check."""

    name: str
    check: str
    figures: Sequence[str]
    """All of them must keep the bound."""
    bound: float
    is_minimum: bool = False
    needs_own_gpus: bool = False
    """On a GPU that target and draft share, the figure is something else."""


TARGETS = (
    *(
        SpeedGoal(
            name=f"verify at batch {batch}, divided by weights at copy bandwidth",
            check=PASSES,
            figures=(f"verify_{batch}_over_weights",),
            bound=1.25,
        )
        for batch in (1, 2, 4, 8, 16)
    ),
    SpeedGoal(
        name="round minus verify at batch 1, ms",
        check=TOKENS,
        figures=tuple(f"ssd_{each}_round_minus_verify_ms" for each in TEMPERATURES),
        bound=0.3,
        needs_own_gpus=True,
    ),
    SpeedGoal(
        name="efficiency at batch 1",
        check=TOKENS,
        figures=tuple(f"ssd_{each}_efficiency" for each in TEMPERATURES),
        bound=0.95,
        is_minimum=True,
        needs_own_gpus=True,
    ),
    *(
        SpeedGoal(
            name=f"efficiency at batch {batch}",
            check=SPEED,
            figures=(f"ssd_{batch}_efficiency",),
            bound=bound,
            is_minimum=True,
            needs_own_gpus=True,
        )
        for batch, bound in ((8, 0.90), (16, 0.85))
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a target is met."""

    target: str
    bound: str
    result: Result
    value: float | None
    """The figure furthest from the bound; also if it does not count."""
    reason: str = ""
    """Why the target is not measured."""


def verdicts(outcomes: Mapping[str, Outcome], device: str) -> list[Verdict]:
    """Compare the figures of a run with all targets.

    Args:
        outcomes: by check.
        device: of the run, ``cuda`` or ``cpu``.
    """
    return [_verdict(each, outcomes.get(each.check), device) for each in TARGETS]


def _verdict(target: SpeedGoal, outcome: Outcome | None, device: str) -> Verdict:
    figures: Mapping[str, Figure] = outcome.figures if outcome else {}
    values = [figures.get(name) for name in target.figures]
    numbers = [float(each) for each in values if isinstance(each, int | float)]
    is_complete = len(numbers) == len(values)
    value = (min if target.is_minimum else max)(numbers) if is_complete else None
    reason = _why_not_measured(target, outcome, device)
    result: Result = "not measured"
    if value is None:
        reason = reason or "the check has no such figure"
    elif not reason:
        is_met = value >= target.bound if target.is_minimum else value <= target.bound
        result = "met" if is_met else "not met"
    return Verdict(
        target=target.name,
        bound=f"{'>=' if target.is_minimum else '<='} {target.bound:g}",
        result=result,
        value=value,
        reason=reason,
    )


def _why_not_measured(target: SpeedGoal, outcome: Outcome | None, device: str) -> str:
    if outcome is None:
        return f"{target.check!r} has not run"
    if outcome.status != "passed":
        return f"{target.check!r} {outcome.status}"
    if device != "cuda":
        return "small models on a CPU"
    if target.needs_own_gpus and outcome.figures.get("shares_gpu"):
        return "target and draft share a GPU"
    return ""
