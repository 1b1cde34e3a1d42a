"""The nouns of the system: frozen values without tensors, known to every package.

``TokenId`` is an id of the target's vocabulary; ``SequenceId`` numbers the sequences of one target
process and is never reused. A *base length* is the number of committed tokens before a round.
"""

from dataclasses import dataclass, field
from enum import StrEnum

TokenId = int
SequenceId = int
WIRE_VERSION = 2
"""Version of messages and frames on a link; both ends must speak the same."""
NO_TOKEN = -1
"""In place of a token id: padding, or a row whose logits are not finite and so choose nothing."""


class Mode(StrEnum):
    """How the rounds of a request are run."""

    AUTO = "auto"
    AUTOREGRESSIVE = "autoregressive"
    SYNCHRONOUS = "synchronous"
    SPECULATIVE = "speculative"


class FinishReason(StrEnum):
    """Why a continuation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """It ended with an error, which is the status of the call; no chunk carries this reason."""


class LookupResult(StrEnum):
    """What looking an outcome up gave.

    NO_DRAFT is a round whose sequence asks for speculation and has no session with a first table;
    NONE is a round that needed no table.
    """

    HIT = "hit"
    MISS = "miss"
    LATE = "late"
    NO_DRAFT = "no_draft"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen."""

    temperature: float = 1.0
    """0..2; 0 takes the most likely token."""
    seed: int = 0
    """Unsigned 64 bits: the noise of the request."""
    max_tokens: int = 256
    """New tokens at most, >= 1."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; at most 16."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The text ends after the first of these; at most 16."""
    ignore_eos: bool = False
    """Go on after end-of-text tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked, validated and tokenised."""

    request_id: str
    prompt_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    mode: Mode = Mode.AUTO


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided on one sequence."""

    accepted: int
    """k: leading proposed tokens that the target would have said itself, 0..m."""
    bonus: TokenId
    """t*: the target's own token after them."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The next proposal is the first ``num_proposed`` tokens of a branch of the newest table."""

    index: int
    num_proposed: int


@dataclass(frozen=True, slots=True)
class Explicit:
    """The next proposal is spelt out; no tokens means plain decoding."""

    tokens: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The target's word on one round of one session: all that moves a session forward."""

    session: int
    base_len: int
    """Committed tokens before the round."""
    outcome: Outcome
    next: Branch | Explicit


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpening:
    """What a draft needs to begin its copy of a sequence."""

    session: int
    token_ids: tuple[TokenId, ...]
    seed: int
    choice: int = 0
    temperature: float
    max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a process runs, and what."""

    pod: str = ""
    node: str = ""
    cell: str = ""
    weights_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHello:
    """What a target proposes when it dials a draft."""

    wire_version: int
    vocab_size: int
    tokenizer_fingerprint: str
    lookahead: int
    branches: int
    channel: str
    epoch: int
    peer: Peer = field(default_factory=Peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWelcome:
    """What a draft agreed to."""

    epoch: int
    max_sessions: int
    """Sessions of all links together that the draft accepts; a setting, not a measurement."""
    lookahead: int
    branches: int
    peer: Peer = field(default_factory=Peer)
    max_len: int = 0
    """Sessions are shorter than this many tokens; 0 is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStatistics:
    """What speculation did for one request, measured by the target."""

    mode: Mode
    rounds: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    time_to_first_token_seconds: float = 0.0
    wall_seconds: float = 0.0
    decode_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Median duration of the target's forward pass over the request's rounds."""
    round_seconds: float = 0.0
    """Median time from one round's start to the next one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """Tokens of one round of one continuation; the last one carries the ending."""

    token_ids: tuple[TokenId, ...]
    text: str = ""
    choice: int = 0
    seed: int | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    statistics: SpeculationStatistics | None = None


@dataclass(frozen=True, slots=True)
class SessionClosing:
    """The sequence of a session has ended."""

    session: int


@dataclass(frozen=True, slots=True)
class SessionRefusal:
    """The draft does not, or no longer, keep a session."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPolicy:
    """What may change while a link lives."""

    fan_out_policy: str = "adaptive"
    fan_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of one end of a link."""

    nonce: int = 0
    """Unsigned 64 bits: the peer sends it back at once; 0 asks nothing."""
    echo: int = 0
    """A nonce of the peer's, sent back; 0 answers nothing."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The draft is leaving."""


TargetMessage = LinkHello | SessionOpening | SessionClosing | LinkPolicy | Heartbeat
"""A control message from a target to a draft. Frames travel beside them, as bytes."""
DraftMessage = LinkWelcome | SessionRefusal | Draining | Heartbeat
"""A control message from a draft to a target."""
