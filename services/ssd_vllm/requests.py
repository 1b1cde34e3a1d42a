"""The requests of a vLLM worker as sequences of the pool. Imports neither vLLM nor torch."""

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ssd.pool.pool import DraftPool
from ssd.pool.rounds import RoundResult
from ssd.types import OpenSession, Outcome, SequenceId, TokenId
from ssd_vllm.step_control import StepControl

_MASK = 2**64 - 1
_UNKNOWN: SequenceId = 0
"""No request has this id."""
Proposals = list[list[TokenId]]


@dataclass(slots=True, kw_only=True)
class Request:
    """A request of vLLM. The last three fields describe its sequence in the pool."""

    request_id: str
    opening: OpenSession
    """The session of its prompt."""
    ending_ids: Collection[TokenId] = ()
    """Tokens that end the text."""
    min_len: int = 0
    """Length of the text, prompt included, from which on these tokens are allowed."""
    sequence_id: SequenceId = _UNKNOWN
    length: int = 0
    """Tokens of the text that the pool knows."""
    proposal: tuple[TokenId, ...] = ()
    """Proposed tokens of the step that runs now."""


@dataclass(slots=True)
class Step:
    """One step of the scheduler, as far as drafts are concerned."""

    running: Collection[str] = ()
    """Requests that take part."""
    num_proposed: Mapping[str, int] = field(default_factory=dict)
    """Proposed tokens that it verifies; no entry is none."""
    preempted: Collection[str] = ()
    """Requests that have lost their place in the batch."""
    prompt_tokens: int = 0
    """Tokens of prompts that it stores, without the last one of each request."""


class PoolRequests:
    """Translates steps of vLLM into rounds of the pool. The worker's thread."""

    def __init__(self, pool: DraftPool, control: StepControl, num_token_ids: int) -> None:
        """Construct.

        Args:
            pool: the pool of drafts.
            control: chooses whether a step speculates.
            num_token_ids: drafts have the token ids below. vLLM may have more.
        """
        self._pool = pool
        self._control = control
        self._num_sessions = 0
        """Number of sessions during the step that runs now."""
        self._num_token_ids = num_token_ids
        self._requests: dict[str, Request] = {}
        self._sequence_ids = itertools.count(1)
        self._step = Step()

    def begin(self, request: Request) -> None:
        """Add a request, or one that begins again with another text."""
        self.end(request.request_id)
        self._begin(request, request.opening.token_ids)

    def end(self, request_id: str) -> None:
        """Remove a request, if it is known."""
        self._remove(request_id)
        if not self._requests:
            self._skip_interval()

    def begin_step(self, step: Step) -> None:
        """Set the step that runs now, and open the sessions that are missing."""
        self._step = step
        if self._control.is_paused:
            self._skip_interval()
        self._pool.release(request.sequence_id for request in self._known(step.preempted))
        if self._control.begin(len(step.running), len(self._known(step.running))):
            self._pool.release(request.sequence_id for request in self._requests.values())
        if self._control.choice.is_on:
            self._pool.open_sessions(
                request.sequence_id
                for request in self._known(step.running)
                if not step.num_proposed.get(request.request_id)
            )
        self._num_sessions = self._pool.num_sessions

    def reset(self) -> None:
        """Remove all requests; those that run continue without proposals."""
        while self._requests:
            _, request = self._requests.popitem()
            self._pool.end(request.sequence_id)
        self._step = Step()

    def propose(
        self,
        request_ids: Sequence[str],
        sampled: Sequence[Sequence[TokenId]],
        lengths: Sequence[int],
        text_of: Iterable[Sequence[TokenId]],
    ) -> Proposals:
        """Return the proposals of the next step.

        Args:
            request_ids: requests of the rows of the batch.
            sampled: the tokens that the step has added to each; none for a part of a prompt.
            lengths: lengths of the texts with these tokens.
            text_of: the texts, at least so long.
        """
        proposals: Proposals = [[] for _ in sampled]
        rows: list[tuple[int, Request | None]] = []
        results: list[RoundResult] = []
        texts = zip(request_ids, sampled, lengths, text_of, strict=False)
        for row, (request_id, added, length, text) in enumerate(texts):
            if not added:
                continue
            request = self._requests.get(request_id)
            if request is not None and max(added) >= self._num_token_ids:
                self._remove(request_id)
                request = None
            if request is not None and not _continues(request, added, length):
                self._remove(request_id)
                self._begin(request, text[:length])
                request = None
            rows.append((row, request))
            results.append(self._verified(request, added, length))
        if not results:
            self._skip_interval()
        else:
            if self._step.prompt_tokens:
                # Storing it was a part of the same pass.
                self._pool.skip_interval()
            decided_at = self._control.clock.now()
            pool_round = self._pool.round(results, decided_at, before_wait=_no_readers)
            self._control.end(
                results,
                pool_round,
                decided_at=decided_at,
                num_sessions=self._num_sessions,
                prompt_tokens=self._step.prompt_tokens,
            )
            # vLLM reports no end of a request that waits for more input.
            self._pool.release(result.sequence_id for result in results if result.is_finished)
            for (row, request), lookup in zip(rows, pool_round.lookups, strict=True):
                proposals[row] = list(lookup.tokens)
                if request is not None:
                    request.proposal = lookup.tokens
        return proposals

    def _remove(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._pool.end(request.sequence_id)

    def _skip_interval(self) -> None:
        """Do not measure the time up to the next step: no request of the pool decodes."""
        self._pool.skip_interval()
        self._control.skip_interval()

    def _known(self, request_ids: Iterable[str]) -> list[Request]:
        requests = map(self._requests.get, request_ids)
        return [request for request in requests if request is not None]

    def _begin(self, request: Request, text: Sequence[TokenId]) -> None:
        """Add a request with its present text, as a new sequence of the pool."""
        token_ids = tuple(map(int, text))
        if max(token_ids, default=0) >= self._num_token_ids:
            # A draft would refuse it, and end the link.
            return
        # vLLM has no upper bound, a draft has one.
        top_k = min(request.opening.top_k, self._num_token_ids)
        # The pool keeps the text too, so there is one object of it.
        request = replace(
            request,
            opening=replace(request.opening, token_ids=token_ids, top_k=top_k),
            sequence_id=next(self._sequence_ids),
            length=len(text),
            proposal=(),
        )
        self._requests[request.request_id] = request
        self._pool.begin(request.sequence_id, request.opening)

    def _verified(
        self, request: Request | None, added: Sequence[TokenId], length: int
    ) -> RoundResult:
        """Return the result of a row; one without a request only counts as a part of the round."""
        outcome = Outcome(len(added) - 1, added[-1])
        if request is None:
            return RoundResult(_UNKNOWN, (), 0, outcome, is_finished=False, max_proposed=0)
        request.length = length
        has_end = any(token_id in request.ending_ids for token_id in added)
        return RoundResult(
            request.sequence_id,
            tuple(added),
            self._step.num_proposed.get(request.request_id, 0),
            outcome,
            length >= request.opening.max_len or has_end,
            self._max_proposed(request),
        )

    def _max_proposed(self, request: Request) -> int:
        """Return the limit of the next proposal of a text.

        In the row after a proposal, vLLM forbids the end of a text by the length before it.
        """
        most = self._control.choice.max_proposed
        num_before = request.min_len - request.length
        return min(most, num_before - 1) if num_before > 0 else most


def _continues(request: Request, added: Sequence[TokenId], length: int) -> bool:
    """Whether a step has added its tokens to the text that the pool knows, after its proposal.

    Otherwise vLLM has changed the text, or has verified something else.
    """
    accepted = tuple(added[:-1])
    return length - len(added) == request.length and accepted == request.proposal[: len(accepted)]


def seed_of(request_id: str, seed: int | None) -> int:
    """Return the seed of a request; without one, it depends on the id alone, as on all ranks."""
    if seed is not None:
        return seed & _MASK
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def _no_readers() -> None:
    """Nobody reads tokens on this thread."""
