"""The figures, each defined once.

- tokens/s: tokens of a sequence after its first, divided by the time from its first to its last
  token; for a batch, the sum over its sequences.
- Tokens per round: output tokens / rounds.
- Hit rate: hits / rounds that needed a table. Late rate: late tables / the same rounds.
- Efficiency: median verify time / median round time of a sequence; for a batch, the median over its
  sequences.
- tokens/s per CPU: tokens/s of a batch / CPUs that run a model in this mode, drafts included.
- Parts of a round: where it spends its time, from the metric ``ssd_round_seconds`` of a target.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssd.types import SpeculationStatistics, TokenId

METRIC = "ssd_round_seconds"
PARTS = ("draft", "prepare", "verify", "sample", "stream", "wait", "commit", "noise", "host")
"""Values of its label ``part``, in the order of a round."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One finished sequence."""

    token_ids: tuple[TokenId, ...]
    statistics: SpeculationStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of one batch in one mode."""

    tokens_per_second: float
    """Sum over the batch."""
    tokens_per_second_each: float
    """Median over the sequences."""
    tokens_per_second_per_cpu: float
    """Sum over the batch, divided by the CPUs that the mode uses."""
    hit_rate: float | None
    late_rate: float | None
    backup_rate: float = 0.0
    """Rounds of n-grams, because a text repeats itself, / all rounds."""
    tokens_per_round: float
    verify_ms: float
    round_ms: float
    efficiency: float
    time_to_first_token_ms: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over repetitions."""

    median: float
    q1: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.q1:.3g}–{self.q3:.3g})"


def tokens_per_second(sequence: Continuation) -> float:
    """Return the decoding speed of one sequence; 0 if all tokens arrived at once."""
    seconds = sequence.statistics.decode_seconds
    return (len(sequence.token_ids) - 1) / seconds if seconds > 0 else 0.0


def batch_figures(batch: Sequence[Continuation], num_cpus: int) -> BatchFigures:
    """Return the figures of a batch that ran on ``num_cpus`` CPUs."""
    summed = sum(map(tokens_per_second, batch))
    stats = [sequence.statistics for sequence in batch]
    num_rounds = sum(item.rounds for item in stats)
    looked_up = sum(item.hits + item.misses + item.late for item in stats)
    return BatchFigures(
        tokens_per_second=summed,
        tokens_per_second_each=statistics.median(map(tokens_per_second, batch)),
        tokens_per_second_per_cpu=summed / num_cpus,
        hit_rate=sum(item.hits for item in stats) / looked_up if looked_up else None,
        late_rate=sum(item.late for item in stats) / looked_up if looked_up else None,
        backup_rate=sum(item.backup_rounds for item in stats) / num_rounds,
        tokens_per_round=sum(len(sequence.token_ids) for sequence in batch) / num_rounds,
        verify_ms=1000 * statistics.median(item.verify_seconds for item in stats),
        round_ms=1000 * statistics.median(item.round_seconds for item in stats),
        efficiency=statistics.median(item.verify_seconds / item.round_seconds for item in stats),
        time_to_first_token_ms=1000
        * statistics.median(item.time_to_first_token_seconds for item in stats),
    )


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles; all three equal a single value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


def spreads(repetitions: Sequence[BatchFigures]) -> dict[str, Spread]:
    """Return the spread of each figure that all repetitions have."""
    rows: list[dict[str, Any]] = [asdict(figures) for figures in repetitions]
    return {
        name: spread([row[name] for row in rows])
        for name in rows[0]
        if all(row[name] is not None for row in rows)
    }


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
