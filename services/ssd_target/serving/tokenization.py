"""Text to token ids and back, with worker threads for long inputs. Asyncio loop."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ssd.errors import OverloadedError
from ssd.ports import Tokenizer
from ssd.rpc.bounds import check_token_ids
from ssd.types import TokenId

Result = TypeVar("Result")
LONG = 1_000
"""Inputs of this many characters or token ids are processed in a worker thread, so that heartbeats
continue. Tokenizing 1,000 characters takes 1 ms."""
_NUM_THREADS = 2
"""Worker threads. Each uses a CPU, which the step thread needs, and 100 bytes of memory per token.
With one thread, a prompt of megabytes would block all others."""
MAX_LONG_CALLS = 8
"""Maximum number of ``Tokenize`` and ``Detokenize`` calls with long inputs that run or wait.
Further ones are refused, so that prompts of ``Generate`` do not wait for them."""


class Tokenization:
    """Tokenizes and detokenizes. Asyncio loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_long_calls = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._free_threads = asyncio.Semaphore(_NUM_THREADS)

    async def encode_prompt(self, text: str, *, has_prefix: bool = False) -> tuple[TokenId, ...]:
        """Return the token ids of a prompt. The caller bounds the number of prompts."""
        return await self.run(
            len(text), lambda: tuple(self._tokenizer.encode(text, has_prefix=has_prefix))
        )

    async def decode_prompt(self, token_ids: tuple[TokenId, ...]) -> str:
        """Return the text of a prompt. The caller bounds the number of prompts."""
        return await self.run(len(token_ids), lambda: self._tokenizer.decode(token_ids))

    async def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Return the token ids of a text; a prompt with this text has the same ids.

        Raises:
            OverloadedError: ``MAX_LONG_CALLS`` calls with long inputs are in progress.
        """
        with self._long_call(len(text)):
            return await self.encode_prompt(text)

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str:
        """Return the text of token ids.

        Raises:
            FieldError: one of them is not in the vocabulary.
            OverloadedError: ``MAX_LONG_CALLS`` calls with long inputs are in progress.
        """

        def decode() -> str:
            check_token_ids("token_ids", token_ids, self._tokenizer.vocab_size)
            return self._tokenizer.decode(token_ids)

        with self._long_call(len(token_ids)):
            return await self.run(len(token_ids), decode)

    @contextlib.contextmanager
    def _long_call(self, size: int) -> Iterator[None]:
        """Count a call with a long input for the duration of the context."""
        is_long = size >= LONG
        if is_long and self._num_long_calls >= MAX_LONG_CALLS:
            raise OverloadedError(
                f"{MAX_LONG_CALLS} calls of Tokenize or Detokenize with {LONG} or more characters "
                "or token ids are in progress; try again later"
            )
        self._num_long_calls += is_long
        try:
            yield
        finally:
            self._num_long_calls -= is_long

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Run work on a long input in a worker thread, on a short one here."""
        if size < LONG:
            return work()
        # The executor would keep cancelled work in its queue, so the queue is here.
        await self._free_threads.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _running: self._free_threads.release())
        return await asyncio.shield(running)
