"""Speed targets of the GPU check: met, not met, or not measured with the reason."""

import pytest
from tests.gpu.environment import Figure, Outcome
from tests.gpu.targets import PASSES, SPEED, TARGETS, TOKENS, Verdict, verdicts


def passed(**figures: Figure) -> Outcome:
    return Outcome(status="passed", figures=figures)


ALL = {
    PASSES: passed(**{f"verify_{batch}_over_weights": 1.25 for batch in (1, 2, 4, 8, 16)}),
    TOKENS: passed(
        shares_gpu=False,
        ssd_t0_round_minus_verify_ms=0.1,
        ssd_t1_round_minus_verify_ms=0.31,
        ssd_t0_efficiency=0.97,
        ssd_t1_efficiency=0.95,
    ),
    SPEED: passed(shares_gpu=False, ssd_8_efficiency=0.91, ssd_16_efficiency=0.5),
}


def by_name(outcomes: dict[str, Outcome], device: str = "cuda") -> dict[str, Verdict]:
    return {each.target: each for each in verdicts(outcomes, device)}


def test_each_target_is_compared_with_its_worst_figure() -> None:
    found = by_name(ALL)
    assert len(found) == len(TARGETS)
    results = {name: (each.result, each.value) for name, each in found.items()}
    assert results["round minus verify at batch 1, ms"] == ("not met", 0.31)
    assert results["efficiency at batch 1"] == ("met", 0.95)
    assert results["efficiency at batch 8"] == ("met", 0.91)
    assert results["efficiency at batch 16"] == ("not met", 0.5)
    assert sum(result == ("met", 1.25) for result in results.values()) == 5


@pytest.mark.parametrize(
    ("outcomes", "device", "reason", "value"),
    [
        ({}, "cuda", "'speed of llama' has not run", None),
        ({SPEED: Outcome(status="skipped")}, "cuda", "'speed of llama' skipped", None),
        ({SPEED: passed()}, "cuda", "the check has no such figure", None),
        (ALL, "cpu", "small models on a CPU", 0.91),
        (
            {SPEED: passed(shares_gpu=True, ssd_8_efficiency=0.4)},
            "cuda",
            "target and draft share a GPU",
            0.4,
        ),
    ],
)
def test_a_target_that_is_not_measured_has_a_reason_and_its_number(
    outcomes: dict[str, Outcome], device: str, reason: str, value: float | None
) -> None:
    found = by_name(outcomes, device)["efficiency at batch 8"]
    assert (found.result, found.reason, found.value) == ("not measured", reason, value)
