"""Streams of tokens from the step thread to the asyncio loop.

The step thread never waits for a reader. A reader gets its first tokens and its last ones at once,
and others at most every ``MESSAGE_SECONDS``, or less often if its request asks for that. Chunks
that it has not taken are merged, up to the size of a message. A stream in which too many tokens
wait is abandoned, which cancels its sequence.

*Decision*: not a message each round. *Because*: a message takes .2 to .3 ms of a CPU that a model
may need, and rounds of small models take 1 to 3 ms. A target of 208M weights in int8 on both CPUs
of a machine lost 3 to 4 of 24 ms a token to messages, because each step of a forward pass waits for
its slowest thread. *Not chosen*: a number of tokens, which delays those of a slow model.
"""

import asyncio
import math
from collections import deque
from itertools import chain

from ssd.ports import Tokenizer
from ssd.runtime.threads import post
from ssd.text.detokenizer import REPLACEMENT
from ssd.types import GenerationChunk

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
        """Let the next ``flush`` wake the reader of this stream."""
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


class TokenStream:
    """The tokens of one continuation, a ``TokenSink`` of the step thread; one task calls ``take``.

    The stream is abandoned if more than ``stream_buffer_tokens`` wait. The alternatives of
    log-probabilities count as tokens. Writes to a client that does not read end the request, see
    ``GenerateServicer``.
    """

    def __init__(
        self, wakeups: Wakeups, stream_buffer_tokens: int, message_seconds: float = 0.0
    ) -> None:
        """Construct.

        Args:
            wakeups: wakes its reader.
            stream_buffer_tokens: maximum number of tokens that wait.
            message_seconds: least time between two messages; 0 means ``MESSAGE_SECONDS``.
        """
        self._wakeups = wakeups
        self._stream_buffer_tokens = stream_buffer_tokens
        self._chunks: deque[GenerationChunk] = deque()
        self._num_put_tokens = 0
        self._num_taken_tokens = 0
        """Only the loop changes this, and only the step thread the number before it."""
        self._message_seconds = message_seconds or MESSAGE_SECONDS
        self._message_tokens = min(MAX_MERGED_TOKENS, stream_buffer_tokens) // 2
        self._error: Exception | None = None
        self.is_abandoned = False
        """Whether the reader has left, or too many tokens wait."""
        self._ready = asyncio.Event()
        self._taken_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, chunk: GenerationChunk) -> None:
        """Add the tokens of one round. Step thread."""
        self._num_put_tokens += _num_tokens(chunk)
        self._chunks.append(chunk)
        num_waiting = self._num_put_tokens - self._num_taken_tokens
        if num_waiting > self._stream_buffer_tokens:
            self.is_abandoned = True
        # A chunk before this one, if the reader has not taken it, has woken the reader.
        if len(self._chunks) == 1 or num_waiting >= self._message_tokens or chunk.finish_reason:
            self._wakeups.mark(self)

    def fail(self, error: Exception) -> None:
        """End the request with an error. Step thread."""
        self._error = error
        self._wakeups.mark(self)

    def end(self, error: Exception) -> None:
        """End the request with an error of the process. Asyncio loop."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader, now or when its next message is due. Asyncio loop."""
        loop = asyncio.get_running_loop()
        if self._is_due(loop.time()):
            self._ready.set()
        elif self._timer is None:
            self._timer = loop.call_at(self._taken_at + self._message_seconds, self._ready.set)

    def _is_due(self, now: float) -> bool:
        """Whether a message may leave: the first, the last, a long one, or one after a pause."""
        is_last = self._error is not None or (
            bool(self._chunks) and self._chunks[-1].finish_reason is not None
        )
        is_long = self._num_put_tokens - self._num_taken_tokens >= self._message_tokens
        return is_last or is_long or now >= self._taken_at + self._message_seconds

    async def take(self) -> GenerationChunk:
        """Wait for tokens; return all tokens since the last call as one chunk. Asyncio loop.

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
        """Return the newest chunk with the tokens of all before it, up to the maximum size."""
        chunks = [self._chunks.popleft()]
        num_tokens = _num_tokens(chunks[0])
        while self._chunks:
            num_tokens += _num_tokens(self._chunks[0])
            if num_tokens > MAX_MERGED_TOKENS:
                num_tokens -= _num_tokens(self._chunks[0])
                break
            chunks.append(self._chunks.popleft())
        self._num_taken_tokens += num_tokens
        merged = chunks[-1]
        if len(chunks) > 1:
            merged.token_ids = tuple(chain.from_iterable(chunk.token_ids for chunk in chunks))
            merged.logprobs = tuple(chain.from_iterable(chunk.logprobs for chunk in chunks))
            merged.rounds = tuple(chain.from_iterable(chunk.rounds for chunk in chunks))
        return merged


def _num_tokens(chunk: GenerationChunk) -> int:
    """Return the number of tokens of a chunk, with their alternatives."""
    return len(chunk.token_ids) + sum(len(position.top) for position in chunk.logprobs)


def add_texts(chunk: GenerationChunk, tokenizer: Tokenizer) -> None:
    """Set the texts of the single tokens of a chunk, in its rounds and log-probabilities."""
    for reported_round in chunk.rounds:
        for token in (*reported_round.proposed, *reported_round.added):
            token.text = tokenizer.token_text(token.id)
    for position in chunk.logprobs:
        for candidate in (position.selected, *position.top):
            candidate.text = tokenizer.token_text(candidate.token_id)
            if REPLACEMENT in candidate.text:
                candidate.partial = tokenizer.token_bytes(candidate.token_id)
            if not candidate.text:
                candidate.special = tokenizer.special_name(candidate.token_id)
