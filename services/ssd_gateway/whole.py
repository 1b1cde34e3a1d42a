"""Whole responses: they are held as JSON until their end, and sent in blocks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from ssd.types import GenerationChunk
from ssd_gateway.json_text import HeldList, HeldText, blocks, pieces
from ssd_gateway.responses import (
    Assembly,
    Continuation,
    Format,
    HeldCall,
    Position,
    extension,
)
from ssd_gateway.tool_calls import Parts

CALL_BYTES = 600
"""Memory of a call beside its texts."""


class HeldContinuation:
    """One continuation of a whole response, as far as it has arrived."""

    def __init__(self, continuation: Continuation, form: Format) -> None:
        self._continuation = continuation
        self._form = form
        self._content = HeldText()
        self._calls: list[HeldCall] = []
        self._logprobs: dict[str, Any] = {}
        self._extension: dict[str, Any] = {}
        self._num_characters = 0
        """Characters that have arrived. The reader holds the ones that are in no part yet."""
        self._num_text_bytes = 0
        self._num_other_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the continuation takes in memory, rounded."""
        return max(self._num_characters, self._num_text_bytes) + self._num_other_bytes

    def add(self, chunk: GenerationChunk) -> None:
        """Add a chunk."""
        new, positions = self._continuation.add(chunk)
        self._num_characters += len(chunk.text)
        self._num_text_bytes += self._hold_text(new)
        if positions:
            self._num_other_bytes += self._hold_logprobs(positions)

    def extend(self, more: dict[str, Any]) -> None:
        """Add to the field ``ssd``: rounds add up, seed and statistics are single."""
        rounds = more.pop("rounds", ())
        self._extension |= more
        if rounds:
            held = self._extension.setdefault("rounds", HeldList())
            self._num_other_bytes += held.extend(rounds)

    @property
    def extension(self) -> dict[str, Any]:
        """The field ``ssd``, with held JSON in it."""
        return self._extension

    def choice(self) -> dict[str, Any]:
        """Return the complete continuation, with held JSON in it."""
        return {
            **self._form.whole(self._content, self._calls, self._logprobs or None),
            "finish_reason": self._continuation.finish_name,
        }

    def _hold_text(self, new: Parts) -> int:
        num_bytes = self._content.add(new.content)
        for part in new.calls:
            if part.name:
                self._calls.append(HeldCall(part.name, HeldText()))
                self._num_other_bytes += CALL_BYTES + len(part.name)
            num_bytes += self._calls[-1].arguments.add(part.arguments)
        return num_bytes

    def _hold_logprobs(self, positions: list[Position]) -> int:
        num_bytes = 0
        for name, value in self._form.logprobs(positions).items():
            if isinstance(value, list):
                num_bytes += self._logprobs.setdefault(name, HeldList()).extend(value)
            else:
                self._logprobs[name] = value
        return num_bytes


@dataclass(slots=True)
class WholeAssembly(Assembly):
    """The object of a response that is no stream."""

    _choices: dict[int, HeldContinuation] = field(default_factory=dict)

    def add(self, prompt: int, chunk: GenerationChunk) -> int:
        """Add a chunk; return the number of bytes that it takes in memory, rounded."""
        index = self._index(prompt, chunk)
        if index not in self._choices:
            continuation = self._new_continuation(prompt)
            self._choices[index] = HeldContinuation(continuation, self.form)
        choice = self._choices[index]
        before = choice.num_bytes
        choice.add(chunk)
        if self.request.report_rounds:
            choice.extend(extension(chunk))
        self._count(prompt, chunk)
        return choice.num_bytes - before

    def whole(self) -> dict[str, Any]:
        """Return the response, with held JSON in it.

        The field ``ssd`` is beside a single choice, and in each of several; with one prompt, the
        seed that they share is also beside them.
        """
        held = dict(sorted(self._choices.items()))
        choices = [{"index": index, **choice.choice()} for index, choice in held.items()]
        response = self._object(self.form.name, choices) | {"usage": self._usage()}
        if not self.request.report_rounds:
            return response
        extensions = [choice.extension for choice in held.values()]
        if len(choices) == 1:
            return response | {"ssd": extensions[0]}
        for choice, extended in zip(choices, extensions, strict=True):
            choice["ssd"] = extended
        seeds = [extended["seed"] for extended in extensions if "seed" in extended]
        if len(self.request.calls) == 1 and seeds:
            response["ssd"] = {"seed": seeds[0]}
        return response


async def send_whole(content: dict[str, Any], send: Send) -> None:
    """Send an object with held JSON as a response. Other requests are served between blocks."""
    num_bytes = sum(map(len, pieces(content)))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for block in blocks(content):
        await send({"type": "http.response.body", "body": block, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
