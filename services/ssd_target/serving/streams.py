"""Streams of tokens from the step thread to the asyncio loop.

The step thread never waits for a reader. A reader gets its first tokens and its last ones at once,
and others at most every ``MESSAGE_SECONDS``. Chunks that it has not taken are merged, up to the
size of a message. A reader that takes nothing for too long is abandoned, which cancels its
sequence.

*Decision*: not a message each round. *Because*: a message takes .2 to .3 ms of a CPU that a model
may need, and rounds of small models take 1 to 3 ms. *Not chosen*: a number of tokens, which delays
those of a slow model.
"""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, replace

from ssd.ports import Clock
from ssd.threads import post
from ssd.types import GenerationChunk, PositionLogprobs, Round, TokenId

MAX_MERGED_TOKENS = 4096
"""Maximum number of tokens, with their alternatives, in a merged chunk. Its message has less than
the 16 MiB of the largest message, also with 20 alternatives of each token."""
MESSAGE_SECONDS = 0.01
"""Least time between two messages of a stream; screens show fewer pictures a second."""


class Wakeups:
    """Wakes all readers of a round with one call into the asyncio loop. Step thread.

    Decision: one ``call_soon_threadsafe`` per round. Because: each call writes to the loop's
    self-pipe, a system call of about 5 us under the GIL. Not chosen: one call per stream.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._marked: list[TokenStream] = []

    def mark(self, stream: "TokenStream") -> None:
        """Note that a stream has received something."""
        self._marked.append(stream)

    def flush(self) -> None:
        """Wake the readers of the marked streams."""
        if self._marked:
            marked, self._marked = self._marked, []
            post(self._loop, self._wake, marked)

    @staticmethod
    def _wake(streams: list["TokenStream"]) -> None:
        for stream in streams:
            stream.wake()


@dataclass(slots=True)
class LastTake:
    """When the reader of a request last took a chunk, of any of its streams."""

    at: float = 0.0


class TokenStream:
    """The tokens of one continuation, a ``TokenSink`` of the step thread; one task calls ``take``.

    The stream is abandoned if more than ``buffer_tokens`` wait, or if the reader takes nothing for
    ``stall_seconds`` while tokens wait. All continuations of a request have one reader, so a chunk
    that it takes of one is progress of all. The alternatives of log-probabilities count as tokens.
    """

    def __init__(
        self,
        wakeups: Wakeups,
        clock: Clock,
        *,
        buffer_tokens: int,
        stall_seconds: float,
        last_take: LastTake | None = None,
    ) -> None:
        """Construct; continuations of one request share ``last_take``."""
        self._wakeups = wakeups
        self._clock = clock
        self._buffer_tokens = buffer_tokens
        self._stall_seconds = stall_seconds
        self._chunks: deque[GenerationChunk] = deque()
        self._num_put_tokens = 0
        self._num_taken_tokens = 0
        """Only the loop changes this, and only the step thread the number before it."""
        self._waiting_since = 0.0
        self._last_take = last_take or LastTake()
        self._error: Exception | None = None
        self._is_abandoned = False
        self._ready = asyncio.Event()
        self._taken_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the reader has left or stalled."""
        return self._is_abandoned

    def put(self, chunk: GenerationChunk) -> None:
        """Add the tokens of one round. Step thread."""
        now = self._clock.now()
        if not self._chunks:
            self._waiting_since = now
        self._num_put_tokens += _num_tokens(chunk)
        self._chunks.append(chunk)
        overflows = self._num_put_tokens - self._num_taken_tokens > self._buffer_tokens
        if overflows or now - max(self._waiting_since, self._last_take.at) > self._stall_seconds:
            self._is_abandoned = True
        self._wakeups.mark(self)

    def fail(self, error: Exception) -> None:
        """End the request with an error. Step thread."""
        self._error = error
        self._wakeups.mark(self)

    def end(self, error: Exception) -> None:
        """End the request with an error of the process. Asyncio loop."""
        self._error = error
        self.wake()

    def abandon(self) -> None:
        """Note that the reader has left."""
        self._is_abandoned = True

    def wake(self) -> None:
        """Wake the reader, now or when its next message is due. Asyncio loop."""
        loop = asyncio.get_running_loop()
        if self._is_due(loop.time()):
            self._ready.set()
        elif self._timer is None:
            self._timer = loop.call_at(self._taken_at + MESSAGE_SECONDS, self._ready.set)

    def _is_due(self, now: float) -> bool:
        """Whether a message may leave: the first one, the last one, or one after a pause."""
        is_last = self._error is not None or (
            bool(self._chunks) and self._chunks[-1].finish_reason is not None
        )
        return is_last or now >= self._taken_at + MESSAGE_SECONDS

    async def take(self) -> GenerationChunk:
        """Wait for tokens; return those since the last call as one chunk. Asyncio loop.

        Of more than ``MAX_MERGED_TOKENS``, the next call returns the rest.

        Raises:
            SSDError: the request failed.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._chunks and self._is_due(loop.time()):
                self._taken_at = loop.time()
                return self._merge()
            if self._error is not None:
                raise self._take_error()
            self._ready.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._chunks:
                self.wake()
            await self._ready.wait()

    def _take_error(self) -> Exception:
        """Return the error and drop it, because its traceback will refer to this stream."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _merge(self) -> GenerationChunk:
        """Return chunks as one; only the last one of a request has more than tokens."""
        token_ids: list[TokenId] = []
        logprobs: list[PositionLogprobs] = []
        rounds: list[Round] = []
        num_tokens = 0
        while True:
            chunk = self._chunks.popleft()
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            rounds += chunk.rounds
            num_tokens += _num_tokens(chunk)
            if not self._chunks or num_tokens + _num_tokens(self._chunks[0]) > MAX_MERGED_TOKENS:
                break
        self._num_taken_tokens += num_tokens
        self._last_take.at = self._clock.now()
        return replace(
            chunk, token_ids=tuple(token_ids), logprobs=tuple(logprobs), rounds=tuple(rounds)
        )


def _num_tokens(chunk: GenerationChunk) -> int:
    """Return the number of tokens of a chunk, with their alternatives."""
    return len(chunk.token_ids) + sum(len(each.top) for each in chunk.logprobs)
