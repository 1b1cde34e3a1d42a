"""The figures of one finished generation, each defined once."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ssd.types import FinishReason, GenerationChunk, SpeculationStatistics, TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a generation took. Seconds and ratios; a ratio without a denominator is None."""

    mode: str
    seed: int
    tokens: int
    """New tokens."""
    tokens_per_second: float | None
    """Tokens after the first, over the time from the first to the last."""
    time_to_first_token_seconds: float
    wall_seconds: float
    rounds: int
    hits: int
    misses: int
    late: int
    hit_rate: float | None
    """Hits over rounds that needed a table."""
    tokens_per_round: float | None
    verify_seconds: float
    """Median forward pass of the target."""
    round_seconds: float
    """Median time from round to round."""
    efficiency: float | None
    """Verify over round: 1 when drafting, network and host work are hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished continuation."""

    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
            "statistics": asdict(self.figures),
        }


@dataclass(slots=True)
class Collector:
    """Gathers the chunks of one continuation."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    seed: int = 0
    last: GenerationChunk | None = None

    def add(self, chunk: GenerationChunk) -> None:
        """Take the next chunk."""
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        if chunk.seed is not None:
            self.seed = chunk.seed
        self.last = chunk

    def finish(self) -> Generation:
        """Return the continuation; the last chunk must have carried the ending."""
        assert self.last is not None
        assert self.last.finish_reason is not None
        assert self.last.statistics is not None
        return Generation(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.last.finish_reason,
            figures=figures(len(self.token_ids), self.seed, self.last.statistics),
        )


def figures(num_tokens: int, seed: int, statistics: SpeculationStatistics) -> Figures:
    """Return the figures of a continuation of ``num_tokens`` tokens."""
    looked_up = statistics.hits + statistics.misses + statistics.late
    return Figures(
        mode=str(statistics.mode),
        seed=seed,
        tokens=num_tokens,
        tokens_per_second=_ratio(num_tokens - 1, statistics.decode_seconds),
        time_to_first_token_seconds=statistics.time_to_first_token_seconds,
        wall_seconds=statistics.wall_seconds,
        rounds=statistics.rounds,
        hits=statistics.hits,
        misses=statistics.misses,
        late=statistics.late,
        hit_rate=_ratio(statistics.hits, looked_up),
        tokens_per_round=_ratio(num_tokens, statistics.rounds),
        verify_seconds=statistics.verify_seconds,
        round_seconds=statistics.round_seconds,
        efficiency=_ratio(statistics.verify_seconds, statistics.round_seconds),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
