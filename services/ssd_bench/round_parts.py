"""Where a round spends its time, from the metric ``ssd_round_seconds`` of a target."""

from collections.abc import Mapping

METRIC = "ssd_round_seconds"
PARTS = ("draft", "prepare", "verify", "sample", "stream", "wait", "commit", "noise", "host")
"""Values of its label ``part``, in the order of a round."""


def mean_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the mean milliseconds of each part, of the rounds between two readings of a target.

    The readings are samples by their names, as ``scrape`` returns them.

    Raises:
        ValueError: the second reading is not of a target.
    """
    if f'{METRIC}_count{{part="verify"}}' not in after:
        raise ValueError(f"the metrics have no {METRIC}")

    def growth(kind: str, part: str) -> float:
        name = f'{METRIC}_{kind}{{part="{part}"}}'
        return after.get(name, 0.0) - before.get(name, 0.0)

    rounds = max(1.0, growth("count", "verify"))
    return {part: 1000 * growth("sum", part) / rounds for part in PARTS}
