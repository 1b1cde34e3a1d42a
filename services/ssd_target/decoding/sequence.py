"""One continuation of a request on the target: its committed tokens and its KV blocks.

The KV cache holds ``c_0..c_{n-2}`` of the ``n`` committed tokens. The next round runs the newest
token together with the proposal.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

from ssd.engine.kv_cache.block_pool import Key
from ssd.pool.rounds import NewSequence
from ssd.ports import TokenSink
from ssd.text.grammar import Grammar
from ssd.types import NO_TOKEN, FinishReason, Mode, Request, SequenceId, TokenId
from ssd_target.decoding.request_times import RequestTimes

PLACES_PER_PRIORITY = 256
"""How many earlier arrivals a request can overtake for each step of priority."""


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
    grammar: Grammar | None = None
    """Of the text; its ``completes`` is part of ``stop_detector``."""
    arrived_at: float = 0.0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def max_len(self) -> int:
        """Maximum length of the sequence in tokens."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def precedence(self) -> tuple[int, SequenceId]:
        """Place in the order of admission; lower is earlier, and no two are the same.

        Requests of one priority keep their order. For each step of priority, a request overtakes
        those among the ``PLACES_PER_PRIORITY`` before it. So it never waits forever for others.
        """
        place = self.sequence_id - PLACES_PER_PRIORITY * self.request.priority
        return place, self.sequence_id

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


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence that runs or waits. Step thread only.

    The scheduler changes its slot, its blocks and what is stored. Its text changes in ``append``.
    """

    arrival: Arrival
    slot: int = -1
    """Index of the sequence in arrays of all running sequences (letter S), 0..max_num_seqs - 1;
    only while it runs."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks of its positions in order, while it runs. The first ones can be shared."""
    keys: list[Key] = field(default_factory=list)
    """Keys of the full blocks of its prompt that a prefill stores; none without prefix cache."""
    tokens: list[TokenId] = field(default_factory=list)
    """Committed tokens: the prompt and the emitted tokens."""
    num_stored: int = 0
    """Committed tokens whose KV is stored."""
    num_cached: int = 0
    """Prompt tokens whose KV was found in the prefix cache when it first ran."""
    num_preemptions: int = 0
    """How often it has lost its slot and blocks."""
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
    def max_len(self) -> int:
        """Maximum length in tokens."""
        return self.arrival.max_len

    @property
    def num_emitted(self) -> int:
        """Number of new tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Number of new tokens up to the limit."""
        return self.arrival.max_len - len(self.tokens)

    @property
    def precedence(self) -> tuple[int, SequenceId]:
        """See ``Arrival.precedence``."""
        return self.arrival.precedence

    @property
    def num_prefill(self) -> int:
        """Positions that a prefill stores: the prompt without its last token.

        Verifies store the later ones. A preempted sequence that runs again stores each position in
        a pass of the same kind, so that its entries have the same bits.
        """
        return self.num_prompt - 1

    @property
    def is_stored(self) -> bool:
        """Whether the sequence can decode: all its tokens are stored but the newest one."""
        return self.num_stored >= len(self.tokens) - 1

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

    def for_drafts(self) -> NewSequence:
        """Return what the pool needs of a sequence without emitted tokens."""
        sampling = self.arrival.request.sampling
        return NewSequence(
            sequence_id=self.sequence_id,
            token_ids=self.arrival.request.prompt_ids,
            max_len=self.max_len,
            seed=sampling.seed,
            choice=self.arrival.request.choice,
            temperature=sampling.temperature,
        )

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
        self.num_stored = len(self.tokens) - 1
        return Emission(tuple(emitted), self.finish_reason)
