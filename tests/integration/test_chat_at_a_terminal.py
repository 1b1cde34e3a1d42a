"""``ssd chat`` as a person uses it: a process at a pseudo-terminal, with its keys."""

import asyncio
import fcntl
import os
import pty
import sys
import termios
from functools import partial
from pathlib import Path
from typing import Any

from tests.processes import ROOT
from tests.served import serving

from ssd.rpc import codec
from ssd.types import GenerationChunk
from ssd.v1 import generate_pb2, generate_pb2_grpc

MAX_SECONDS = 120.0
PROMPT = "\x1b[?2004h"
"""Sent before each line: pasted text is marked from now on."""


class Endless(generate_pb2_grpc.GenerateServiceServicer):
    """Begins answers that do not end."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        message = request.chat.messages[-1].content
        chunk = GenerationChunk(token_ids=(1,), text=f"answer to {message}", seed=3)
        await context.write(codec.generate_response(chunk))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def GetModelInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return generate_pb2.GetModelInfoResponse(model="m", device="cpu")


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
    service, (mine, theirs) = Endless(), pty.openpty()
    async with serving(service) as server:
        address = f"127.0.0.1:{server.port}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ssd_cli", "chat", "--endpoint", address),
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
            await screen.until("m on cpu")
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
        assert service.num_cancelled == 1
