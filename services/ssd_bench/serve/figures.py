"""The figures of a load, each defined once. Pure.

- Inter-token time: time between two messages of a stream, the pause that a reader sees. A message
  of a speculative stream has several tokens; ``per_token_ms`` divides by their number.
- TTFT: time from sending a request to its first token, of requests that are sent in the window.
- tokens/s: tokens that arrive in the window / its duration. Goodput: those of requests that end as
  requested. Tokens of a request that fails later count for tokens/s only.
- Refusal time: time from sending a request to its RESOURCE_EXHAUSTED.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd_bench.serve.load import Load, RequestRecord

REFUSED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of a number of times, in milliseconds; all 0 without a time."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What the clients of a load measured."""

    seconds: float
    """Duration of the window."""
    requests: int
    """Requests that were sent, in the window and before."""
    outcomes: dict[str, int]
    """Number of requests by finish reason or gRPC code."""
    messages: dict[str, str]
    """First message of each gRPC code."""
    tokens_per_second: float
    goodput_tokens_per_second: float
    goodput_requests_per_second: float
    """Requests that ended as requested in the window."""
    time_to_first_token_ms: Percentiles
    inter_token_ms: Percentiles
    per_token_ms: Percentiles
    refusal_ms: Percentiles
    refusals_without_hint: int
    """Refusals without a time after which to retry."""
    hit_rate: float | None
    """Hits / rounds that needed a table, of complete requests; None if there is no such round."""
    client_lag_ms: Percentiles
    """Delays of the load generator itself, which are part of every time above."""
    unsent: int

    @property
    def num_errors(self) -> int:
        """Requests that did not end as requested, refusals included."""
        return sum(n for outcome, n in self.outcomes.items() if outcome not in ("stop", "length"))

    @property
    def p99_over_p50(self) -> float:
        """Inter-token p99 / p50; 0 without times."""
        return self.inter_token_ms.p99 / self.inter_token_ms.p50 if self.inter_token_ms.p50 else 0.0


def percentiles(seconds: Iterable[float] | NDArray[np.float64]) -> Percentiles:
    """Return the percentiles of times in seconds."""
    ms = np.fromiter(seconds, dtype=np.float64) * 1000
    if not ms.size:
        return Percentiles()
    p50, p90, p99 = (float(each) for each in np.percentile(ms, [50, 90, 99]))
    return Percentiles(count=ms.size, p50=p50, p90=p90, p99=p99, max=float(ms.max()))


def gaps(
    records: Sequence[RequestRecord], begun_at: float, ended_at: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return all messages of a window that follow another one of their stream.

    Returns:
        Arrival of each, seconds since the previous message of its stream, and number of tokens.
    """
    arrived: list[NDArray[np.float64]] = [np.empty(0)]
    seconds: list[NDArray[np.float64]] = [np.empty(0)]
    tokens: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for record in records:
        times = np.array(record.arrived_at, dtype=np.float64)
        inside = (times[1:] >= begun_at) & (times[1:] < ended_at)
        arrived.append(times[1:][inside])
        seconds.append(np.diff(times)[inside])
        tokens.append(np.array(record.num_tokens, dtype=np.int64)[1:][inside])
    return np.concatenate(arrived), np.concatenate(seconds), np.concatenate(tokens)


def load_figures(load: Load) -> LoadFigures:
    """Return the figures of a load."""
    seconds = load.ended_at - load.begun_at
    complete = [each for each in load.records if each.is_complete]
    refused = [each for each in load.records if each.outcome == REFUSED]
    _, between, tokens = gaps(load.records, load.begun_at, load.ended_at)
    begun = [each for each in load.records if load.begun_at <= each.sent_at < load.ended_at]
    messages = {each.outcome: each.message for each in reversed(load.records) if each.message}
    return LoadFigures(
        seconds=seconds,
        requests=len(load.records),
        outcomes=dict(sorted(Counter(each.outcome for each in load.records).items())),
        messages=messages,
        tokens_per_second=_num_tokens(load, load.records) / seconds,
        goodput_tokens_per_second=_num_tokens(load, complete) / seconds,
        goodput_requests_per_second=sum(
            load.begun_at <= each.ended_at < load.ended_at for each in complete
        )
        / seconds,
        time_to_first_token_ms=percentiles(
            each.arrived_at[0] - each.sent_at for each in begun if each.arrived_at
        ),
        inter_token_ms=percentiles(between),
        per_token_ms=percentiles(between / np.maximum(tokens, 1)),
        refusal_ms=percentiles(each.ended_at - each.sent_at for each in refused),
        refusals_without_hint=sum(each.retry_after_seconds is None for each in refused),
        hit_rate=_hit_rate(complete),
        client_lag_ms=percentiles(load.lag_seconds),
        unsent=load.num_unsent,
    )


def _num_tokens(load: Load, records: Sequence[RequestRecord]) -> int:
    """Return the number of tokens that arrived in the window."""
    total = 0
    for record in records:
        times = np.array(record.arrived_at, dtype=np.float64)
        inside = (times >= load.begun_at) & (times < load.ended_at)
        total += int(np.array(record.num_tokens, dtype=np.int64)[inside].sum())
    return total


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    found = [each.statistics for each in records if each.statistics is not None]
    looked_up = sum(each.hits + each.misses + each.late for each in found)
    return sum(each.hits for each in found) / looked_up if looked_up else None
