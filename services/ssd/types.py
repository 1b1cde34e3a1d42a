"""Values of the whole system: frozen dataclasses without tensors.

``TokenId`` is an id of the target's vocabulary; ``SequenceId`` numbers the sequences of one target
process and is never reused. *Committed tokens* are the prompt and all tokens that rounds have
appended to it. A *base length* is their number before a round.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Literal

TokenId = int
SequenceId = int
WIRE_VERSION = 7
"""Version of messages and frames on a link; both ends must have the same."""
NO_TOKEN = -1
"""Replaces a token id at padding and at rows whose logits are not finite."""


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
    """The request ended with an error, the status of the call. No chunk has this reason."""


class LookupResult(StrEnum):
    """Result of looking up an outcome in the outcome table.

    NO_DRAFT: the mode of the sequence allows speculation, but no draft has sent a table for it.
    BACKUP: the text repeats itself, and the backup proposes, with or without a table.
    NONE: the round needed no table.
    """

    HIT = "hit"
    MISS = "miss"
    LATE = "late"
    NO_DRAFT = "no_draft"
    BACKUP = "backup"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are selected."""

    temperature: float = 1.0
    """0..2; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of the most likely tokens with at least this probability; 0..1."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the highest probability; 0..1."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, factor of negative ones, of tokens of the prompt and new ones."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of new tokens; -2..2."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence from the logits of new tokens; -2..2."""
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    """Added to the logits of these tokens; ascending ids, -100..100, at most 1024."""
    seed: int | None = None
    """The noise of the request, modulo 2^64. None: the target draws one and returns it."""
    max_tokens: int | None = None
    """Maximum number of new tokens, >= 1. None: 256; for a chat, all that the context leaves."""
    min_tokens: int = 0
    """Number of new tokens before an end-of-text or stop token is allowed; 0..max_tokens."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; at most 16."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The text ends before the first of these, which is the last new token; at most 16."""
    ignore_eos: bool = False
    """Continue after end-of-text tokens."""
    json_schema: str = ""
    """The text is JSON that this schema allows; empty for any text. At most 64 KiB."""
    regex: str = ""
    """The text matches this regular expression as a whole; empty for any text. At most 4 KiB."""
    logprobs: int | None = None
    """Number of most likely tokens to report beside the selected one, 0..20; None reports none."""
    echo: bool = False
    """Return the prompt before the continuation."""
    n: int = 1
    """Number of continuations, 1..8."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that noise changes nothing."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0 or self.min_p == 1.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an assistant's turn."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn of a conversation."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Id of the call whose result a turn ``tool`` is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the verification of one sequence."""

    accepted: int
    """Accepted length k: leading proposed tokens that equal the target's choice, 0..m."""
    bonus: TokenId
    """Bonus token t*: the target's choice after them."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Reports the outcome of one round to a draft. Only these messages advance a session."""

    session: int
    base_len: int
    """Committed tokens before the round."""
    outcome: Outcome
    _: KW_ONLY
    tokens: tuple[TokenId, ...] = ()
    """The next proposal; without tokens, the next round is plain decoding."""
    waited_us: int = 0
    """Microseconds for which the round waited for tables."""
    length: int = 0
    """Tokens that the next table needs for each outcome; 0 is K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Opens a session: the committed tokens, noise parameters and filters of a sequence."""

    session: int = 0
    """Its number on the link. The pool sets it before it sends the message."""
    token_ids: tuple[TokenId, ...]
    """Committed tokens; at least one."""
    seed: int
    choice: int = 0
    temperature: float
    max_len: int
    """Maximum length in tokens."""
    top_k: int = 0
    """As in ``SamplingParams``."""
    min_p: float = 0.0
    """As in ``SamplingParams``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Identity of a process and its model."""

    pod: str = ""
    node: str = ""
    cell: str = ""
    weights_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a link: the values that both ends must share."""

    wire_version: int
    vocab_size: int
    tokenizer_fingerprint: str
    lookahead: int
    branches: int
    epoch: int
    peer: Peer = field(default_factory=Peer)
    backends: tuple[str, ...] = ()
    """Backends of a collective channel that the target offers, best first; none asks for no such
    channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Reply of a draft to ``Hello``."""

    epoch: int
    max_sessions: int
    """Sessions of all links together that the draft accepts; a setting, not a measurement."""
    lookahead: int
    branches: int
    peer: Peer = field(default_factory=Peer)
    max_len: int = 0
    """Sessions are shorter than this number of tokens; 0 is unknown."""
    backend: str = ""
    """Backend of the collective channel that both ends now try; empty for none."""
    backend_refusal: str = ""
    """Why the draft chose none of the target's backends."""
    tokenizer_fingerprint: str = ""
    """Fingerprint of the tokenizer of the draft; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """An entry of the store through which the ends of a collective channel find each other."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Whether an end can use the collective channel; ``error`` states why not."""

    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStatistics:
    """Speculation statistics of one request, measured by the target."""

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
    """T_verify: median duration of the forward pass in the request's rounds."""
    round_seconds: float = 0.0
    """T_round: median time from the start of a round to the start of the next one."""
    paused_rounds: int = 0
    """Rounds for which the target had turned speculation off, because plain decoding is faster."""
    backup_rounds: int = 0
    """Rounds in which the backup proposed because the text repeats itself: no table was needed."""


@dataclass(slots=True)
class TokenText:
    """A token with its text."""

    id: TokenId
    text: str = ""
    """Set by the request handler."""


@dataclass(slots=True)
class Round:
    """One round of one continuation."""

    proposed: tuple[TokenText, ...]
    """The proposal that the target verified."""
    accepted_tokens: int
    """Number of leading proposed tokens that the target accepted."""
    added: tuple[TokenText, ...]
    """The accepted tokens, then the bonus token, up to the token that ends the continuation."""
    lookup: LookupResult = LookupResult.NONE
    """Result of the lookup that selected the proposal."""


@dataclass(slots=True)
class TokenLogprob:
    """A token and the natural logarithm of the probability that the model gives it."""

    token_id: TokenId
    logprob: float
    text: str = ""
    """Text of this token as it is inside a text, set by the request handler."""
    partial: bytes = b""
    """Bytes of this token, if its text has an incomplete character; otherwise empty."""
    special: str = ""
    """Name of this token in the vocabulary, if it is special: then it has no text."""

    @property
    def name(self) -> str:
        """The text, the name of a special token, or the id of one that the vocabulary lacks."""
        return self.text or self.special or f"token_id:{self.token_id}"

    @property
    def encoded(self) -> bytes:
        """UTF-8 of this token alone; a part of it if the token is part of a character."""
        return self.partial or self.text.encode()

    @property
    def finite(self) -> float:
        """``logprob`` as JSON can have it: OpenAI's -9999 for a token that cannot be selected."""
        return max(self.logprob, -9999.0)

    def as_json(self) -> dict[str, str | float | list[int]]:
        """Return the entry of a token as OpenAI's API has it."""
        return {"token": self.name, "logprob": self.finite, "bytes": list(self.encoded)}


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at the position of one new token."""

    selected: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens, most likely first."""


@dataclass(slots=True, kw_only=True)
class GenerationChunk:
    """New tokens of one continuation; the last chunk has finish reason, usage and statistics.

    The step thread makes it. Its stream adds the tokens of earlier chunks, and the request handler
    texts, ``choice``, ``seed`` and ``prompt_tokens``. From then on it does not change.
    """

    token_ids: tuple[TokenId, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Log-probabilities of each token, if the request asks for them."""
    text: str = ""
    choice: int = 0
    seed: int | None = None
    prompt_tokens: int = 0
    """Tokens of the prompt, in the first chunk of a continuation; 0 in others."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    statistics: SpeculationStatistics | None = None
    rounds: tuple[Round, ...] = ()
    """Rounds of ``token_ids``, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The sequence of a session has ended."""

    session: int


class RefusalReason(StrEnum):
    """Why a draft refuses or closes a session."""

    MAX_SESSIONS = "max_sessions"
    """The draft has no free slot for the link, or its inbox is full."""
    GAP = "gap"
    """A commit is missing or does not match the session, or too many commits wait."""
    LENGTH = "length"
    """The sequence is too long for the draft."""
    DRAINING = "draining"
    NOT_FINITE = "not_finite"
    """The draft's model computed NaN or infinity for the session."""


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The draft refuses a session, or closes it."""

    session: int
    reason: str
    """A value of ``RefusalReason``; a target accepts other words too."""


FanOutName = Literal["adaptive", "uniform", "geometric"]
"""Names of the fan-out policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings of a link: its fan-out policy, which may change while the link is open."""

    fan_out_policy: str = "adaptive"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Periodic message of both ends of a link. Its echo measures the round trip."""

    nonce: int = 0
    """Unsigned 64 bits; the peer returns it at once. 0 requests no echo."""
    echo: int = 0
    """The returned nonce of the peer; 0 is no echo."""
    batch_seconds: Mapping[int, float] = field(default_factory=dict)
    """Of a draft: mean seconds of its work for a batch of tables of this link, by the number of
    sessions in the batch. Empty: none is measured yet, or an earlier version."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The draft drains and accepts no more sessions."""


TargetMessage = (
    Hello | OpenSession | CloseSession | LinkSettings | Heartbeat | Rendezvous | ChannelState
)
"""A control message from a target to a draft. Commits and tables are bytes."""
DraftMessage = Welcome | SessionRefused | Draining | Heartbeat | Rendezvous | ChannelState
"""A control message from a draft to a target."""
