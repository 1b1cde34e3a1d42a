"""The requests of a vLLM worker as sequences of the pool. Imports neither vLLM nor torch."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ssd.pool.rounds import Lookup, NewSequence, VerifiedRound
from ssd.ports import Clock
from ssd.types import Outcome, SequenceId, TokenId

_MASK = 2**64 - 1
Proposals = list[list[TokenId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What the pool and the sampler need of a request of vLLM."""

    request_id: str
    prompt_ids: tuple[TokenId, ...]
    max_len: int
    """Maximum length in tokens."""
    seed: int
    temperature: float
    """0 if the draft cannot foresee the choices."""
    ending_ids: Collection[TokenId] = ()
    """Tokens that end the text."""


@dataclass(slots=True)
class _Request:
    new: NewRequest
    sequence_id: SequenceId
    length: int
    """Tokens of the text that the pool knows."""


@dataclass(slots=True)
class Step:
    """One step of the scheduler, as far as drafts are concerned."""

    running: Collection[str] = ()
    """Requests that take part."""
    num_proposed: Mapping[str, int] = field(default_factory=dict)
    """Proposed tokens that it verifies; no entry is none."""


class Pool(Protocol):
    """The part of ``ssd.pool.pool.DraftPool`` that requests use."""

    def begin(self, sequence: NewSequence) -> None:
        """Add a sequence."""
        ...

    def open_sessions(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Open the sessions that are missing, while drafts have room."""
        ...

    def round(
        self, results: Sequence[VerifiedRound], decided_at: float, before_wait: Callable[[], None]
    ) -> list[Lookup]:
        """Return the next proposals, and send the outcomes to the drafts."""
        ...

    def end(self, sequence_id: SequenceId) -> None:
        """Remove a sequence."""
        ...


class PoolRequests:
    """Translates steps of vLLM into rounds of the pool. The worker's thread."""

    def __init__(self, pool: Pool, lookahead: int, clock: Clock) -> None:
        self._pool = pool
        self._lookahead = lookahead
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._sequence_ids = itertools.count(1)
        self._step = Step()

    def begin(self, new: NewRequest) -> None:
        """Add a request, or one that begins again with another text."""
        self.end(new.request_id)
        self._begin(new, new.prompt_ids)

    def end(self, request_id: str) -> None:
        """Remove a request, if it is known."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._pool.end(request.sequence_id)

    def begin_step(self, step: Step) -> None:
        """Note the step that runs now, and open the sessions that are missing."""
        self._step = step
        known = (self._requests.get(each) for each in step.running)
        self._pool.open_sessions(
            each.sequence_id
            for each in known
            if each is not None and not step.num_proposed.get(each.new.request_id)
        )

    def propose(
        self,
        request_ids: Sequence[str],
        sampled: Sequence[Sequence[TokenId]],
        lengths: Sequence[int],
        text_of: Iterable[Sequence[TokenId]],
    ) -> Proposals:
        """Return the proposals of the next step.

        Args:
            request_ids: of the rows of the batch.
            sampled: the tokens that the step has added to each; none for a part of a prompt.
            lengths: of the texts with these tokens.
            text_of: the texts, at least so long.
        """
        proposals: Proposals = [[] for _ in sampled]
        rows, results = [], []
        texts = zip(request_ids, sampled, lengths, text_of, strict=False)
        for row, (request_id, added, length, text) in enumerate(texts):
            request = self._requests.get(request_id)
            if not added or request is None:
                continue
            if length - len(added) != request.length:
                # vLLM has changed the text, or did not ask for a proposal near the maximum length.
                self.end(request_id)
                self._begin(request.new, text[:length])
                continue
            request.length = length
            rows.append(row)
            results.append(self._verified(request, added))
        if results:
            lookups = self._pool.round(results, self._clock.now(), before_wait=_no_readers)
            for row, lookup in zip(rows, lookups, strict=True):
                proposals[row] = list(lookup.tokens)
        return proposals

    def _begin(self, new: NewRequest, text: Sequence[TokenId]) -> None:
        request = _Request(new, next(self._sequence_ids), len(text))
        self._requests[new.request_id] = request
        self._pool.begin(
            NewSequence(
                sequence_id=request.sequence_id,
                token_ids=tuple(int(each) for each in text),
                max_len=new.max_len,
                seed=new.seed,
                temperature=new.temperature,
            )
        )

    def _verified(self, request: _Request, added: Sequence[TokenId]) -> VerifiedRound:
        new = request.new
        return VerifiedRound(
            request.sequence_id,
            tuple(added),
            self._step.num_proposed.get(new.request_id, 0),
            Outcome(len(added) - 1, added[-1]),
            request.length >= new.max_len or any(each in new.ending_ids for each in added),
            self._lookahead,
        )


def seed_of(request_id: str, seed: int | None) -> int:
    """Return the seed of a request; without one, it depends on the id alone, as on all ranks."""
    if seed is not None:
        return seed & _MASK
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def _no_readers() -> None:
    """Nobody reads tokens on this thread."""
