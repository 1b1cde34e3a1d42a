"""Compiles the grammars of requests in a worker thread, with a deadline. Asyncio loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ssd.errors import FieldError, OverloadedError
from ssd.ports import Tokenizer
from ssd.text.grammar import Grammar, GrammarCompiler, GrammarSource

COMPILE_SECONDS = 5.0
"""Maximum time to compile a grammar, and to wait for the thread. The limits of grammars are far
below it on a machine that is not overloaded."""
MAX_WAITING = 16
"""Requests that wait for the thread. Further ones are refused."""


class Grammars:
    """Returns the grammar of a request. Asyncio loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = GrammarCompiler(tokenizer)
        # One thread: it takes a CPU from the model.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._is_free = asyncio.Semaphore(1)
        self._num_waiting = 0

    async def grammar(self, source: GrammarSource) -> Grammar:
        """Return a grammar at the start of a text.

        Raises:
            FieldError: it is malformed, too complex or allows no text.
            OverloadedError: too many grammars wait to be compiled.
        """
        return self._compiler.cached(source) or await self._compiled(source)

    async def _compiled(self, source: GrammarSource) -> Grammar:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} grammars are being compiled; try again later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await self._is_free.acquire()
        except TimeoutError as error:
            raise OverloadedError("other grammars are being compiled; try again later") from error
        finally:
            self._num_waiting -= 1
        running = asyncio.get_running_loop().run_in_executor(
            self._thread, self._compiler.compile, source
        )
        running.add_done_callback(self._release)
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await asyncio.shield(running)
        except TimeoutError as error:
            raise FieldError(
                source.field, f"takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
            ) from error

    def _release(self, running: "asyncio.Future[Grammar]") -> None:
        self._is_free.release()
        if not running.cancelled():
            # A request that has ended reads no error.
            running.exception()
