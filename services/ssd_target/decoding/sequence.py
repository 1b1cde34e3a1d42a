"""One continuation of a request on the target: its committed tokens and its KV blocks.

The KV cache holds ``c_0..c_{n-2}`` of the ``n`` committed tokens. The next round runs the newest
token together with the proposal.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

from ssd.ports import TokenSink
from ssd.types import NO_TOKEN, FinishReason, Mode, Request, SequenceId, TokenId
from ssd_target.decoding.request_times import RequestTimes


class StopDetector(Protocol):
    """Finds the end of a stop string in the committed tokens of one sequence.

    It receives every token once, in order. Step thread only.
    """

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if the text now contains a stop string."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that has arrived at the step thread; prompt and ``max_tokens`` fit the model."""

    sequence_id: SequenceId
    request: Request
    eos_token_ids: frozenset[TokenId]
    sink: TokenSink
    stop_detector: StopDetector | None = None
    arrived_at: float = 0.0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def max_len(self) -> int:
        """Maximum length of the sequence in tokens."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def may_speculate(self) -> bool:
        """Whether its mode allows sessions on drafts."""
        return self.request.mode in (Mode.AUTO, Mode.SPECULATIVE)

    @property
    def is_synchronous(self) -> bool:
        """Whether a draft on the target's own device proposes."""
        return self.request.mode is Mode.SYNCHRONOUS


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that a round added to a sequence, and the finish reason if they ended it."""

    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Sequence:
    """A running sequence. Step thread only.

    It changes in ``prefilled``, ``fail`` and ``append``.
    """

    arrival: Arrival
    slot: int
    """Index of the sequence in arrays of all running sequences (letter S), 0..max_num_seqs - 1."""
    blocks: tuple[int, ...]
    """KV blocks for the maximum length."""
    tokens: list[TokenId] = field(default_factory=list)
    """Committed tokens: the prompt and the emitted tokens."""
    num_prefilled: int = 0
    """Prompt tokens whose KV is stored."""
    finish_reason: FinishReason | None = None
    ending_ids: frozenset[TokenId] = frozenset()

    def __post_init__(self) -> None:
        sampling = self.arrival.request.sampling
        self.tokens = list(self.arrival.request.prompt_ids)
        ends = frozenset() if sampling.ignore_eos else self.arrival.eos_token_ids
        self.ending_ids = ends | frozenset(sampling.stop_token_ids)

    @property
    def sequence_id(self) -> SequenceId:
        """Id, never reused."""
        return self.arrival.sequence_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.arrival.request.prompt_ids)

    @property
    def num_emitted(self) -> int:
        """Number of new tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Number of new tokens up to the limit."""
        return self.arrival.max_len - len(self.tokens)

    @property
    def is_prefilled(self) -> bool:
        """Whether the sequence can decode: the prompt is stored except for its last token."""
        return self.num_prefilled >= self.num_prompt - 1

    @property
    def may_speculate(self) -> bool:
        """Whether its mode allows sessions on drafts."""
        return self.arrival.may_speculate

    @property
    def is_auto(self) -> bool:
        """Whether the controller chooses if it speculates."""
        return self.arrival.request.mode is Mode.AUTO

    @property
    def is_synchronous(self) -> bool:
        """Whether a draft on the target's own device proposes."""
        return self.arrival.is_synchronous

    def next_chunk(self, chunk: int) -> tuple[int, int]:
        """Return positions [first, last) of the next prefill; it ends at a ``chunk`` multiple."""
        first = self.num_prefilled
        return first, min(self.num_prompt - 1, (first // chunk + 1) * chunk)

    def prefilled(self, last: int) -> None:
        """Note that positions up to ``last`` (exclusive) are stored."""
        assert self.num_prefilled < last < self.num_prompt
        self.num_prefilled = last

    def fail(self) -> None:
        """Mark the sequence as failed."""
        self.finish_reason = FinishReason.FAILED

    def append(self, token_ids: Tokens[TokenId]) -> Emission:
        """Append the tokens of a round, up to and including the token that ends the sequence.

        An end-of-text token or stop string inside an accepted proposal ends the sequence exactly
        where plain decoding ends it. Tokens after it are dropped. ``NO_TOKEN`` fails the sequence.
        """
        assert self.finish_reason is None
        detector = self.arrival.stop_detector
        emitted: list[TokenId] = []
        for token_id in token_ids:
            if token_id == NO_TOKEN:
                self.finish_reason = FinishReason.FAILED
                break
            emitted.append(token_id)
            if token_id in self.ending_ids or (
                detector is not None and detector.completes(token_id)
            ):
                self.finish_reason = FinishReason.STOP
            elif len(emitted) == self.num_remaining:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        self.tokens += emitted
        return Emission(tuple(emitted), self.finish_reason)
