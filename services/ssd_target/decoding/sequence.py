"""One continuation of a request on the target: its tokens, its KV blocks and its record.

The KV cache holds ``c_0..c_{n-2}`` of the ``n`` committed tokens. The next round runs the newest
token together with the proposal.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ssd.engine.kv_cache.block_pool import Key
from ssd.pool.rounds import RoundResult
from ssd.ports import TokenSink
from ssd.speculation.round_record import RoundRecord
from ssd.text.grammar import Grammar
from ssd.types import (
    NO_TOKEN,
    FinishReason,
    LookupResult,
    Mode,
    OpenSession,
    SamplingParams,
    SequenceId,
    SpeculationStatistics,
    TokenId,
)

PLACES_PER_PRIORITY = 256
"""How many earlier arrivals a request can overtake for each step of priority."""


class StopDetector(Protocol):
    """Finds the end of a stop string in the committed tokens of one sequence.

    It receives every token once, in order. Step thread only.
    """

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if the text now contains a stop string."""


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class SequenceRecord:
    """What the rounds of a sequence did. Times are readings of the clock in seconds, 0 if unset.

    The step thread writes it. The asyncio loop reads the times.
    """

    arrived_at: float = 0.0
    admitted_at: float = 0.0
    """When it left the queue. A preempted sequence that is admitted again keeps its first time."""
    decoding_at: float = 0.0
    """When the prompt was stored. The verify of its first round may have stored it."""
    first_token_at: float = 0.0
    """When its first token was chosen."""
    last_token_at: float = 0.0
    """When the tokens of its newest round were chosen."""
    newest_lookup: LookupResult = LookupResult.NONE
    """Lookup that selected the proposal of the next round."""
    _counts: Counter[str] = field(default_factory=Counter)
    """Numbers of rounds and of tokens, by field of ``SpeculationStatistics``."""
    _begun_at: "array[float]" = field(default_factory=_floats)
    _verify_seconds: "array[float]" = field(default_factory=_floats)

    @property
    def num_rounds(self) -> int:
        """Rounds in which it took part."""
        return len(self._begun_at)

    def add_round(
        self, record: RoundRecord, result: RoundResult, *, is_paused: bool = False
    ) -> None:
        """Add a round whose tokens are chosen.

        ``is_paused``: the controller had turned its speculation off.
        """
        if not self._begun_at:
            self.decoding_at = record.stored_at
            self.first_token_at = record.decided_at
        self._begun_at.append(record.begun_at)
        self._verify_seconds.append(record.verify_seconds)
        self.last_token_at = record.decided_at
        self._counts["proposed_tokens"] += result.num_proposed
        self._counts["accepted_tokens"] += min(result.outcome.accepted, len(result.token_ids))
        self._counts["paused_rounds"] += is_paused

    def add_lookup(self, result: LookupResult) -> None:
        """Add the lookup of a round that did not end it."""
        self.newest_lookup = result
        self._counts["hits"] += result is LookupResult.HIT
        self._counts["misses"] += result is LookupResult.MISS
        self._counts["late"] += result is LookupResult.LATE
        self._counts["backup_rounds"] += result is LookupResult.BACKUP

    def statistics(self, *, is_synchronous: bool) -> SpeculationStatistics:
        """Return the statistics of the request; called in the round that ends the sequence."""
        counts, mode = self._counts, Mode.AUTOREGRESSIVE
        if is_synchronous:
            mode = Mode.SYNCHRONOUS if counts["proposed_tokens"] else mode
        elif counts["hits"] or counts["misses"] or counts["late"] or counts["backup_rounds"]:
            mode = Mode.SPECULATIVE
        # One round lasts until its decision; several until the next ones begin.
        gaps = np.diff(
            self._begun_at if self.num_rounds > 1 else (*self._begun_at, self.last_token_at)
        )
        return SpeculationStatistics(
            mode=mode,
            rounds=self.num_rounds,
            time_to_first_token_seconds=max(0.0, self.first_token_at - self.arrived_at),
            wall_seconds=max(0.0, self.last_token_at - self.arrived_at),
            decode_seconds=max(0.0, self.last_token_at - self.first_token_at),
            verify_seconds=float(np.median(self._verify_seconds)) if self.num_rounds else 0.0,
            round_seconds=float(np.median(gaps)) if self.num_rounds else 0.0,
            **counts,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A continuation that waits, runs or has ended.

    The request handler makes it, with a prompt and a ``max_len`` that fit the model. From
    ``Inbox.submit`` on it belongs to the step thread. The scheduler changes its slot, its blocks
    and what is stored, the decode loop its proposal. Its text changes in ``append``.
    """

    sequence_id: SequenceId
    prompt_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    seed: int
    """The seed of ``sampling``, or a drawn one if it is unset."""
    max_len: int
    """Maximum length in tokens."""
    sink: TokenSink
    request_id: str = ""
    choice: int = 0
    """Number of this continuation, 0..n-1: each has noise of its own."""
    mode: Mode = Mode.AUTO
    priority: int = 0
    """-100..100; higher values run earlier."""
    report_rounds: bool = False
    """Whether chunks contain the rounds of their tokens."""
    eos_token_ids: frozenset[TokenId] = frozenset()
    stop_detectors: tuple[StopDetector, ...] = ()
    """Each receives the tokens up to the one at which the first of them ends the text."""
    grammar: Grammar | None = None
    """Grammar of the text; one of ``stop_detectors``."""
    record: SequenceRecord = field(default_factory=SequenceRecord)

    slot: int = -1
    """Index of the sequence in arrays of all running sequences (letter S), 0..max_num_seqs - 1;
    only while it runs."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks of its positions in order, while it runs. The first ones can be shared."""
    keys: list[Key] = field(default_factory=list)
    """Keys of the full blocks of its prompt that a prefill stores; none without prefix cache. A
    long prompt arrives with them; all continuations of a request have the same list."""
    num_prefill: int = 0
    """Positions that prefills store, once it has arrived at the scheduler. Verifies store the later
    ones. A preempted sequence that runs again stores each position in a pass of the same kind, so
    that its entries have the same bits."""
    num_stored: int = 0
    """Committed tokens whose KV is stored."""
    num_cached: int = 0
    """Prompt tokens whose KV was found in the prefix cache when it first ran."""
    num_preemptions: int = 0
    """How often it has lost its slot and blocks."""
    proposal: tuple[TokenId, ...] = ()
    """Proposal of the next round, from its draft or its backup."""
    finish_reason: FinishReason | None = None

    tokens: list[TokenId] = field(init=False)
    """Committed tokens: the prompt and the emitted tokens."""
    num_prompt: int = field(init=False)
    """Tokens of the prompt."""
    precedence: tuple[int, SequenceId] = field(init=False)
    """Place in the order of admission; lower is earlier, and no two are the same.

    Requests of one priority keep their order. For each step of priority, a request overtakes up to
    ``PLACES_PER_PRIORITY`` earlier requests. So it never waits forever for others.
    """
    may_speculate: bool = field(init=False)
    """Whether its mode allows sessions on drafts."""
    is_auto: bool = field(init=False)
    """Whether the controller chooses if it speculates."""
    is_synchronous: bool = field(init=False)
    """Whether a draft on the target's own device proposes."""
    ending_ids: frozenset[TokenId] = field(init=False)
    """Tokens that end the text: of the tokenizer, unless ignored, and of the request."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.num_prompt = len(self.tokens)
        place = self.sequence_id - PLACES_PER_PRIORITY * self.priority
        self.precedence = place, self.sequence_id
        self.may_speculate = self.mode in (Mode.AUTO, Mode.SPECULATIVE)
        self.is_auto = self.mode is Mode.AUTO
        self.is_synchronous = self.mode is Mode.SYNCHRONOUS
        ends = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.ending_ids = ends | frozenset(self.sampling.stop_token_ids)

    @property
    def num_emitted(self) -> int:
        """Number of new tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Number of new tokens up to the limit."""
        return self.max_len - len(self.tokens)

    @property
    def is_stored(self) -> bool:
        """Whether its next round verifies: its prefill and its older tokens are stored."""
        return self.num_stored >= max(self.num_prefill, len(self.tokens) - 1)

    def opening(self) -> OpenSession:
        """Return the opening of a session for a sequence without emitted tokens."""
        return OpenSession(
            token_ids=self.prompt_ids,
            max_len=self.max_len,
            seed=self.seed,
            choice=self.choice,
            # The logits of a draft differ, so noise could change its choice where it cannot change
            # that of the target.
            temperature=0.0 if self.sampling.is_greedy else self.sampling.temperature,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
        )

    def append(self, token_ids: Tokens[TokenId]) -> tuple[TokenId, ...]:
        """Append the tokens of a round, up to and including the token that ends the sequence.

        An end-of-text token or stop string inside an accepted proposal ends the sequence exactly
        where plain decoding ends it. Tokens after it are dropped. ``NO_TOKEN`` fails the sequence.

        Returns:
            The tokens that were appended.
        """
        assert self.finish_reason is None
        num_before, detectors = len(self.tokens), self.stop_detectors
        for token_id in token_ids:
            if token_id == NO_TOKEN:
                self.finish_reason = FinishReason.FAILED
                break
            self.tokens.append(token_id)
            if token_id in self.ending_ids or (
                detectors and any(detector.completes(token_id) for detector in detectors)
            ):
                self.finish_reason = FinishReason.STOP
                break
            if len(self.tokens) == self.max_len:
                self.finish_reason = FinishReason.LENGTH
                break
        self.num_stored = len(self.tokens) - 1
        return tuple(self.tokens[num_before:])
