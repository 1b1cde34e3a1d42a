"""Metrics of target, draft and the plugin of vLLM; ``/metrics`` serves them."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric

_FAST_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_SLOW_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)

_fast_histogram = partial(Histogram, buckets=_FAST_SECONDS)
_slow_histogram = partial(Histogram, buckets=_SLOW_SECONDS)
_summed_gauge = partial(Gauge, multiprocess_mode="livesum")
_newest_gauge = partial(Gauge, multiprocess_mode="mostrecent")
"""The two kinds differ in how gauges of several processes of one server become one, as in vLLM with
``ssd_vllm``."""

OUTCOMES = (
    *("stop", "length", "cancelled", "deadline"),
    *("invalid", "denied", "overloaded", "unavailable", "error"),
)
"""Outcomes of a call of Generate; each call has one."""
REQUESTS_TOTAL = Counter(
    "ssd_requests",
    "Ended requests by outcome. Complete: stop, length. Ended early: cancelled (by the client or "
    "a drain), deadline (of the client or the target, or a client that does not read). Refused: "
    "invalid (bad input), denied (credentials), overloaded (a limit is reached), unavailable "
    "(loading or draining). "
    "Failed: error. Error rate: sum(rate(ssd_requests_total{outcome='error'}[5m])) / "
    "sum(rate(ssd_requests_total[5m])).",
    ["outcome"],
)
QUEUE_SECONDS = _slow_histogram(
    "ssd_queue_seconds",
    "Seconds from the arrival of a request to the place of each continuation in the batch, "
    "including tokenisation.",
)
TIME_TO_FIRST_TOKEN_SECONDS = _slow_histogram(
    "ssd_time_to_first_token_seconds",
    "Seconds from the arrival of a request to the first token of each continuation that has one.",
)
INTER_TOKEN_SECONDS = _fast_histogram(
    "ssd_inter_token_seconds",
    "Seconds between two messages of a stream, divided by the number of tokens in the second.",
)
E2E_SECONDS = _slow_histogram(
    "ssd_e2e_seconds",
    "Seconds from the arrival of a request to the last token of each complete continuation.",
)
TOKENS_TOTAL = Counter(
    "ssd_tokens",
    "Tokens, by kind: prompt (once for each continuation), cached (those of prompts that were in "
    "the prefix cache), output. "
    "Share of cached tokens: rate(ssd_tokens_total{kind='cached'}[5m]) / ignoring(kind) "
    "rate(ssd_tokens_total{kind='prompt'}[5m]).",
    ["kind"],
)
PREFIX_HITS_TOTAL = Counter(
    "ssd_prefix_hits", "Requests whose prompt began with tokens in the prefix cache."
)
PREEMPTIONS_TOTAL = Counter(
    "ssd_preemptions",
    "Running sequences that lost their KV blocks to earlier ones; they run again later, and their "
    "texts do not change.",
)
RUNNING_SEQUENCES = _summed_gauge("ssd_running_sequences", "Sequences in the batch.")
WAITING_SEQUENCES = Gauge("ssd_waiting_sequences", "Sequences in the queue.")
KV_BLOCKS = Gauge(
    "ssd_kv_blocks",
    "Blocks of a target's KV cache, by state: free, cached (free, with entries of the prefix "
    "cache), used.",
    ["state"],
)
ROUND_SECONDS = _fast_histogram(
    "ssd_round_seconds",
    "Seconds of a round without prefill, by part: draft (mode synchronous), prepare (inputs of "
    "the forward pass), verify (the forward pass), sample (tokens and outcomes), stream (to "
    "clients), wait (for tables), commit (to drafts), noise (of the next round), host (the rest). "
    "Efficiency: rate(ssd_round_seconds_sum{part='verify'}[5m]) / "
    "ignoring(part) sum without(part) (rate(ssd_round_seconds_sum[5m])).",
    ["part"],
)
ROUNDS_TOTAL = Counter(
    "ssd_rounds",
    "Rounds of a sequence by the result of the look-up: hit, miss, late, no_draft (no draft had "
    "sent a table for this sequence), backup (n-grams replace a draft: the text repeats itself), "
    "none (no table was needed, or speculation was off). "
    "Hit rate: rate(ssd_rounds_total{result='hit'}[5m]) / ignoring(result) "
    "sum without(result) (rate(ssd_rounds_total{result=~'hit|miss|late'}[5m])). Without a draft: "
    "rate(ssd_rounds_total{result='no_draft'}[5m]) / ignoring(result) "
    "sum without(result) (rate(ssd_rounds_total{result!='none'}[5m])).",
    ["result"],
)
ACCEPTED_TOKENS_TOTAL = Counter(
    "ssd_accepted_tokens",
    "Accepted proposed tokens by position in the proposal (1 is the first). "
    "Acceptance: rate(ssd_accepted_tokens_total[5m]) over rate(ssd_proposed_tokens_total[5m]).",
    ["position"],
)
PROPOSED_TOKENS_TOTAL = Counter("ssd_proposed_tokens", "Tokens proposed to the target.")
OPEN_SESSIONS = _summed_gauge("ssd_open_sessions", "Sessions that a target has open on its drafts.")
SPECULATION_MODE = _newest_gauge(
    "ssd_speculation_mode",
    "1 for the mode of requests that arrive in mode AUTO, else 0; SetSpeculation changes it.",
    ["mode"],
)
SPECULATION_ACTIVE = _newest_gauge(
    "ssd_speculation_active",
    "1 while requests in mode AUTO speculate, 0 while plain decoding is faster for them, or is "
    "their mode.",
)
SPECULATION_SPEED_UP = _newest_gauge(
    "ssd_speculation_speed_up",
    "Measured tokens/s of speculation divided by those of plain decoding, at the current number of "
    "running sequences; 0 before the first comparison.",
)
SPECULATION_REASON = _newest_gauge(
    "ssd_speculation_reason",
    "1 for the reason of ssd_speculation_active: measuring (too few rounds), faster, slower.",
    ["reason"],
)
MAX_PROPOSED_TOKENS = _newest_gauge(
    "ssd_max_proposed_tokens",
    "Maximum number of tokens of a proposal that the target chose.",
)
PROPOSER_CRASHES_TOTAL = Counter(
    "ssd_proposer_crashes",
    "Bugs of the plugin, after which vLLM continued without proposals; the first one of steps and "
    "all of links are in the log.",
)
COMMIT_TO_TABLE_SECONDS = _fast_histogram(
    "ssd_commit_to_table_seconds",
    "Seconds from sending a commit to the arrival of the first columns of its table.",
)
DRAFT_TABLE_SECONDS = _fast_histogram(
    "ssd_draft_table_seconds",
    "Seconds in which a draft computes a batch of complete tables.",
)
TABLE_BRANCHES = Gauge(
    "ssd_table_branches", "Number of branches that the draft chose for its newest tables."
)
TABLE_COLUMNS = Gauge(
    "ssd_table_columns", "Number of columns that the draft chose for its newest tables."
)
FAN_OUT_VALUE = Gauge(
    "ssd_fan_out_value",
    "Values of the fan-out policy adaptive that are in use, by temperature; see fan_out.py.",
    ["temperature", "value"],
)
FAN_OUT_ROUNDS = Gauge(
    "ssd_fan_out_fitted_rounds",
    "Rounds to which the values of the fan-out are fitted, by temperature. Rounds before a restart "
    "count if the draft has a state_folder.",
    ["temperature"],
)
DRAFT_SESSIONS = Gauge("ssd_draft_sessions", "Open sessions of a draft.")
DRAFT_MAX_SESSIONS = Gauge(
    "ssd_draft_max_sessions", "Maximum number of sessions that a draft accepts; a setting."
)
DESIRED_DRAFT_REPLICAS = _summed_gauge(
    "ssd_desired_draft_replicas",
    "Number of drafts that the eligible sequences of a target need, a fraction; mean over 30 s.",
)
LINK_STATE = _newest_gauge(
    "ssd_link_state",
    "1 while a link accepts sessions, else 0.",
    ["draft"],
)
LINK_RTT_SECONDS = _newest_gauge(
    "ssd_link_rtt_seconds",
    "Seconds from a heartbeat to its echo, between the event loops.",
    ["draft"],
)
LINK_BANDWIDTH = _newest_gauge(
    "ssd_link_bandwidth_bytes_per_second",
    "Bytes per second of a collective channel, measured when the link came up; links over gRPC "
    "are not measured.",
    ["draft"],
)
LINK_TRANSPORT_INFO = _newest_gauge(
    "ssd_link_transport_info",
    "1 for the transport of an active link: tcp, or the path that NCCL reports.",
    ["draft", "transport"],
)
LINK_REFUSALS_TOTAL = Counter(
    "ssd_link_refusals",
    "Refused links by reason: handshake (target and draft do not match), link_too_slow (the "
    "measurement is worse than required).",
    ["reason"],
)
CHANNEL_FALLBACKS_TOTAL = Counter(
    "ssd_channel_fallbacks",
    "Collective channels that target and draft could not set up; the link uses gRPC. The reason is "
    "in the status of the link.",
    ["backend"],
)
LINK_BYTES_TOTAL = Counter("ssd_link_bytes", "Bytes of frames, by direction.", ["direction"])
COMMIT_TO_WIRE_SECONDS = _fast_histogram(
    "ssd_commit_to_wire_seconds",
    "Seconds from the decision of a round to the sending of its commit, including waiting.",
)
WIRE_TO_TABLE_SECONDS = _fast_histogram(
    "ssd_wire_to_table_seconds",
    "Seconds from the arrival of a commit at a draft to the sending of the first columns.",
)
DRAFT_STARTUP_SECONDS = Gauge(
    "ssd_draft_startup_seconds", "Seconds of the start of a draft by part: load, warm-up.", ["part"]
)
BAD_FRAMES_TOTAL = Counter(
    "ssd_bad_frames", "Frames that are malformed or too large; each one ended its link."
)
STALE_FRAMES_TOTAL = Counter(
    "ssd_stale_frames",
    "Tables dropped because they are of another session or an earlier round.",
)
TLS_CERTIFICATE_EXPIRY = _newest_gauge(
    "ssd_tls_certificate_expiry_timestamp_seconds",
    "End of the validity of a certificate, in seconds since the epoch, by role: server (of the "
    "gRPC port, and of vLLM's), client (what a gateway presents to targets), operator (what an "
    "operator presents to targets and drafts). Absent without a certificate. "
    "Seconds left: ssd_tls_certificate_expiry_timestamp_seconds - time().",
    ["role"],
)


def remove_series(gauge: Gauge, *labels: str) -> None:
    """Remove a series of a gauge; with the files of several processes, it stays and is 0."""
    gauge.labels(*labels).set(0)
    gauge.remove(*labels)


_OF_DRAFT = (
    *(DRAFT_TABLE_SECONDS, DRAFT_SESSIONS, DRAFT_MAX_SESSIONS),
    *(DRAFT_STARTUP_SECONDS, WIRE_TO_TABLE_SECONDS, TABLE_BRANCHES, TABLE_COLUMNS),
    *(FAN_OUT_VALUE, FAN_OUT_ROUNDS),
)
_OF_TARGET = (
    *(REQUESTS_TOTAL, QUEUE_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS, E2E_SECONDS),
    *(TOKENS_TOTAL, PREFIX_HITS_TOTAL, PREEMPTIONS_TOTAL, RUNNING_SEQUENCES, WAITING_SEQUENCES),
    *(KV_BLOCKS, ROUND_SECONDS, ROUNDS_TOTAL),
    *(ACCEPTED_TOKENS_TOTAL, PROPOSED_TOKENS_TOTAL, OPEN_SESSIONS, COMMIT_TO_TABLE_SECONDS),
    *(DESIRED_DRAFT_REPLICAS, COMMIT_TO_WIRE_SECONDS, LINK_STATE, LINK_RTT_SECONDS),
    *(LINK_TRANSPORT_INFO, LINK_REFUSALS_TOTAL, SPECULATION_ACTIVE, SPECULATION_SPEED_UP),
    *(SPECULATION_REASON, SPECULATION_MODE, MAX_PROPOSED_TOKENS, LINK_BANDWIDTH),
    STALE_FRAMES_TOTAL,
)
_OF_VLLM = (PROPOSER_CRASHES_TOTAL,)
_OF_OTHERS = {"target": (*_OF_DRAFT, *_OF_VLLM), "draft": (*_OF_TARGET, *_OF_VLLM)}


class _MetricsOf:
    """All metrics except those of the other process, for a registry."""

    def __init__(self, process: str) -> None:
        self._left_out = {
            family.name for metric in _OF_OTHERS[process] for family in metric.describe()
        }

    def collect(self) -> Iterator[Metric]:
        """Return the metric families with their current samples."""
        return (family for family in REGISTRY.collect() if family.name not in self._left_out)


def metrics_of(process: Literal["target", "draft"]) -> CollectorRegistry:
    """Return the metrics of a process, without those that only the other process measures."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsOf(process))
    return registry
