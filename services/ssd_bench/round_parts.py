"""Where a round spends its time, from the metric ``ssd_round_seconds`` of a target."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ssd_bench.scrape import scrape

METRIC = "ssd_round_seconds"
PARTS = ("draft", "prepare", "verify", "sample", "stream", "wait", "commit", "noise", "host")
"""Values of its label ``part``, in the order of a round."""


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Seconds of all rounds of a target so far, by part, and the number of rounds."""

    seconds: Mapping[str, float]
    rounds: float


async def read_rounds(http_address: str) -> RoundSeconds:
    """Read the metric of a target."""
    return parse_rounds(await scrape(http_address))


def parse_rounds(text: str) -> RoundSeconds:
    """Return the seconds by part from a page of metrics."""
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == METRIC)
    found: dict[str, dict[str, float]] = {f"{METRIC}_sum": {}, f"{METRIC}_count": {}}
    for sample in family.samples:
        if sample.name in found:
            found[sample.name][sample.labels["part"]] = sample.value
    return RoundSeconds(found[f"{METRIC}_sum"], found[f"{METRIC}_count"].get("verify", 0.0))


def mean_ms(before: RoundSeconds, after: RoundSeconds) -> dict[str, float]:
    """Return the mean milliseconds of each part, of the rounds between two readings."""
    rounds = max(1.0, after.rounds - before.rounds)
    return {
        part: 1000 * (after.seconds.get(part, 0.0) - before.seconds.get(part, 0.0)) / rounds
        for part in PARTS
    }
