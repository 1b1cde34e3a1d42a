"""What a load of ``ssd bench serve`` is, and what it showed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssd_bench.resources import Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What guidellm sends."""

    prompt_tokens: int
    output_tokens: int
    streams: int = 0
    """Clients that each have one request open; 0: requests arrive at a rate."""
    is_overload: bool = False
    """Whether refusals are expected."""
    rate: float = 0.0
    """Requests/s of ``--rates``, at random times (Poisson); refusals are a result. 0: others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a load showed."""

    load: str
    requests: Mapping[str, int]
    """Requests by guidellm's outcome: successful, errored, incomplete."""
    refusals: int
    """Refused requests of any client, from the target's metric."""
    requests_per_second: float
    texts: int
    """Texts that were compared during and after the load."""
    problems: Sequence[str]
    """Failed checks."""
    rate: float = 0.0
    """Requests/s of a load of ``--rates``; 0 for other loads."""
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Percentiles of TTFT and ITL of complete requests, as in guidellm's report."""
    growth: Sequence[Growth] = field(default_factory=tuple)


LATENCIES = {"TTFT": "time_to_first_token_ms", "ITL": "inter_token_latency_ms"}
PERCENTILES = ("p50", "p95", "p99")
