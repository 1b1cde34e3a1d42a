"""``ssd chat`` as a person uses it: a process at a pseudo-terminal, with its keys."""

import asyncio
import fcntl
import os
import pty
import sys
import termios
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

from tests.gateway import ScriptedTarget
from tests.processes import ROOT

from ssd.rpc.codec import Conversation, GenerateCall
from ssd.types import GenerationChunk

MAX_SECONDS = 120.0
PROMPT = "\x1b[?2004h"
"""Sent before each line: pasted text is marked from now on."""


async def endless(call: GenerateCall) -> AsyncGenerator[GenerationChunk, None]:
    """Begin an answer that does not end."""
    assert isinstance(call.prompt, Conversation)
    message = call.prompt.turns[-1].content
    yield GenerationChunk(token_ids=(1,), text=f"answer to {message}", seed=3)
    await asyncio.Event().wait()


class Terminal:
    """A pseudo-terminal; the test types at it and reads its screen."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._screen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    async def until(self, text: str) -> None:
        """Read until the screen has shown a text; forget what is before it."""
        async with asyncio.timeout(MAX_SECONDS):
            while text not in self._screen:
                try:
                    block = await asyncio.to_thread(os.read, self._descriptor, 1 << 16)
                except OSError:
                    raise AssertionError(f"the program ended after: {self._screen}") from None
                self._screen += block.decode(errors="replace")
        self._screen = self._screen.partition(text)[2]


async def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_program(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    async with ScriptedTarget(endless).serving() as target:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ssd_cli", "chat", "--endpoint", target.address),
            cwd=ROOT / "services",
            env={
                "HOME": str(tmp_path),
                "TERM": "xterm",
                "PATH": os.defpath,
                "PROMPT_TOOLKIT_NO_CPR": "1",
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # The keys of its own terminal, as in a shell.
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        screen = Terminal(mine)
        try:
            await screen.until("demo on cpu")
            await screen.until(PROMPT)
            screen.type("fitst\x1b[D\x1b[D\x1b[D\x7fr\r")
            await screen.until("answer to f")
            screen.type("\x03")
            await screen.until("stopped")
            await screen.until(PROMPT)
            screen.type("/help\r")
            await screen.until("/temperature 0..2")
            await screen.until(PROMPT)
            screen.type("\x04")
            async with asyncio.timeout(MAX_SECONDS):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(mine)
        async with asyncio.timeout(MAX_SECONDS):
            while not target.num_cancelled:  # noqa: ASYNC110 - the target runs in this loop
                await asyncio.sleep(0.01)
        assert target.num_cancelled == 1
