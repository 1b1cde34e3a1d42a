"""The figures of one generation, each defined once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ssd.ports import Clock, SystemClock
from ssd.rpc.pool_codec import LinkStatus
from ssd.types import (
    FinishReason,
    GenerationChunk,
    Mode,
    PositionLogprobs,
    SpeculationStatistics,
    TokenId,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times and ratios of a generation; a ratio with denominator 0 is None.

    Figures that the target measures are None for a partial generation.
    """

    mode: str | None = None
    """How the rounds ran; the requested mode can be ``auto``."""
    seed: int
    tokens: int
    """Number of new tokens."""
    tokens_per_second: float | None
    """Tokens after the first, divided by the time from the first to the last."""
    time_to_first_token_seconds: float
    wall_seconds: float
    rounds: int | None = None
    hits: int | None = None
    misses: int | None = None
    late: int | None = None
    paused_rounds: int | None = None
    """Rounds for which the target had turned speculation off, because plain decoding is faster."""
    backup_rounds: int | None = None
    """Rounds in which n-grams proposed, because the text repeats itself: no table was needed."""
    hit_rate: float | None = None
    """Hits divided by rounds that needed a table."""
    tokens_per_round: float | None = None
    verify_seconds: float | None = None
    """Median time of the target's forward pass."""
    round_seconds: float | None = None
    """Median time of a round, start to start."""
    efficiency: float | None = None
    """verify_seconds / round_seconds: 1 if drafting, network and host work are hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished or partial continuation."""

    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason
    figures: Figures
    error: str = ""
    """Message of the error that ended it; empty if none did."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Log-probabilities of each token, if the request asked for them."""
    others: tuple["Generation", ...] = ()
    """The other continuations of the prompt, if the request asked for several."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; ``error`` is present only after an error.

        ``logprobs`` and ``choices``, the other continuations, are present if there are any.
        ``logprobs`` has an entry for each token, as OpenAI's API, with the token id.

        ``statistics`` of a partial generation contains only the figures that were measured.
        """
        statistics = asdict(self.figures)
        if self.figures.rounds is None:
            statistics = {name: value for name, value in statistics.items() if value is not None}
        content: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
            "statistics": statistics,
        }
        if self.logprobs:
            content["logprobs"] = [
                {
                    **_token(position.selected),
                    "top_logprobs": [_token(token) for token in position.top],
                }
                for position in self.logprobs
            ]
        if self.others:
            content["choices"] = [other.as_json() for other in self.others]
        return content | {"error": self.error} if self.error else content


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, **token.as_json()}


@dataclass(slots=True)
class Collector:
    """Collects the chunks of a continuation, and those of the others of its prompt."""

    clock: Clock = field(default_factory=SystemClock)
    is_echo: bool = False
    """Whether the first chunk of each continuation is the prompt; its tokens are not counted."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    others: dict[int, "Collector"] = field(default_factory=dict)
    """Collectors of the continuations after the first one, by their number."""
    seed: int = 0
    last: GenerationChunk | None = None
    started_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0

    def start(self) -> None:
        """Record the time at which the request is sent."""
        self.started_at = self.clock.now()

    def add(self, chunk: GenerationChunk) -> None:
        """Add the next chunk."""
        if chunk.choice:
            other = self.others.setdefault(
                chunk.choice, Collector(self.clock, self.is_echo, started_at=self.started_at)
            )
            other.add(replace(chunk, choice=0))
            return
        self.texts.append(chunk.text)
        if chunk.seed is not None:
            self.seed = chunk.seed
        if self.is_echo and len(self.texts) == 1:
            return
        self.last_at = self.clock.now()
        if not self.token_ids:
            self.first_at = self.last_at
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.last = chunk

    def finish(self) -> Generation:
        """Return the continuation. The last chunk must have a finish reason and statistics."""
        others = tuple(self.others[number].finish() for number in sorted(self.others))
        return replace(self._whole(), others=others)

    def partial(self, error: str = "") -> Generation:
        """Return the continuation so far, with the times that this client measured.

        Args:
            error: message of the error that ended it; empty: the user cancelled it.
        """
        others = tuple(self.others[number].partial(error) for number in sorted(self.others))
        if self.last is not None and self.last.finish_reason is not None:
            # Only other continuations were cut off.
            return replace(self._whole(), others=others)
        first_at, last_at = (
            (self.first_at, self.last_at) if self.token_ids else (self.started_at, self.started_at)
        )
        measured = Figures(
            seed=self.seed,
            tokens=len(self.token_ids),
            tokens_per_second=_ratio(len(self.token_ids) - 1, last_at - first_at),
            time_to_first_token_seconds=first_at - self.started_at,
            wall_seconds=last_at - self.started_at,
        )
        reason = FinishReason.FAILED if error else FinishReason.CANCELLED
        return replace(self._generation(measured, reason, error), others=others)

    @property
    def has_tokens(self) -> bool:
        """Whether a token of any continuation has arrived."""
        return bool(self.token_ids) or any(other.has_tokens for other in self.others.values())

    def _whole(self) -> Generation:
        assert self.last is not None
        assert self.last.finish_reason is not None
        assert self.last.statistics is not None
        measured = figures(len(self.token_ids), self.seed, self.last.statistics)
        return self._generation(measured, self.last.finish_reason)

    def _generation(self, measured: Figures, reason: FinishReason, error: str = "") -> Generation:
        return Generation(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            figures=measured,
            error=error,
            logprobs=tuple(self.logprobs),
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
        paused_rounds=statistics.paused_rounds,
        backup_rounds=statistics.backup_rounds,
        hit_rate=_ratio(statistics.hits, looked_up),
        tokens_per_round=_ratio(num_tokens, statistics.rounds),
        verify_seconds=statistics.verify_seconds,
        round_seconds=statistics.round_seconds,
        efficiency=_ratio(statistics.verify_seconds, statistics.round_seconds),
    )


def beside_request(measured: Figures, requested: Mode) -> Figures:
    """Return figures for a reader, in which a requested mode that no round used is not replaced.

    A short text ends before its session with a draft is open, and its rounds ran plainly.
    """
    unused = {Mode.SPECULATIVE: "no table used", Mode.SYNCHRONOUS: "no proposal used"}
    if measured.mode != Mode.AUTOREGRESSIVE or requested not in unused:
        return measured
    return replace(measured, mode=f"{requested} ({unused[requested]})")


def why_not_speculative(measured: Figures, links: Sequence[LinkStatus]) -> str:
    """Return why a generation had no hit, from its counters and the links of the target."""
    misses, late = measured.misses or 0, measured.late or 0
    if measured.backup_rounds and not misses + late:
        return f"n-grams proposed in {measured.backup_rounds} rounds, and none was accepted"
    if measured.paused_rounds and not misses + late:
        return (
            f"the target turned it off in {measured.paused_rounds} of {measured.rounds} rounds, "
            "because plain decoding is faster; --mode speculative forces it"
        )
    if late:
        return (
            f"{late} of {late + misses} tables were late: the draft is slower than the target; "
            "fewer --branches may help"
        )
    if misses:
        return f"none of {misses} tables contained the outcome of its round"
    if any(link.state == "active" for link in links):
        return "the draft is linked, but the text ended before its session was open"
    states = [f"{link.address} is {link.state} ({link.reason or 'no reason'})" for link in links]
    return f"no draft is in use: {', '.join(states)}" if states else "no draft is linked"


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
