"""Chunks of a target as OpenAI objects. Pure, but for the random ids of tool calls.

The objects of a stream are not kept. A whole response is held as JSON until its end.
"""

import secrets
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ssd.types import FinishReason, GenerationChunk, PositionLogprobs, TokenLogprob, Usage
from ssd_gateway.json_text import HeldList, HeldText
from ssd_gateway.schemas import PreparedRequest
from ssd_gateway.tool_calls import CallPart, Parts, TextReader

CALL_BYTES = 600
"""Memory of a call of a whole response beside its texts."""
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's names; the client of the target raises an error for the other reasons."""


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities of one new token."""

    offset: int
    """Characters before the token, of the text that the response contains."""
    logprobs: PositionLogprobs


@dataclass(frozen=True, slots=True)
class HeldCall:
    """A call of a tool in a whole response."""

    name: str
    arguments: HeldText


class ChatFormat:
    """Objects of ``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    name = "chat.completion"
    stream_name = "chat.completion.chunk"

    def first(self) -> dict[str, Any]:
        """Return the delta that begins a continuation."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, parts: Parts, positions: list[Position]) -> dict[str, Any]:
        """Return the new part of a continuation."""
        delta: dict[str, Any] = {"content": parts.content} if parts.content else {}
        if parts.calls:
            delta["tool_calls"] = [_call_delta(call) for call in parts.calls]
        logprobs = {"logprobs": self.logprobs(positions)} if positions else {}
        return {"delta": delta, **logprobs}

    def logprobs(self, positions: list[Position]) -> dict[str, Any]:
        """Return log-probabilities; lists of later positions continue the earlier lists."""
        content = [
            {
                **position.logprobs.selected.as_json(),
                "top_logprobs": [token.as_json() for token in position.logprobs.top],
            }
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def whole(
        self, content: HeldText, calls: list[HeldCall], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return a complete continuation."""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content if len(content) else None
            message["tool_calls"] = [_call(call.name, call.arguments) for call in calls]
        return {"message": message, "logprobs": logprobs}


class CompletionFormat:
    """Objects of ``/v1/completions``."""

    id_prefix = "cmpl-"
    name = stream_name = "text_completion"

    def first(self) -> None:
        """Nothing begins a continuation."""

    def delta(self, parts: Parts, positions: list[Position]) -> dict[str, Any]:
        """Return the new part of a continuation."""
        logprobs = self.logprobs(positions) if positions else None
        return {"text": parts.content, "logprobs": logprobs}

    def logprobs(self, positions: list[Position]) -> dict[str, Any]:
        """Return log-probabilities; lists of later positions continue the earlier lists."""
        selected = [position.logprobs.selected for position in positions]
        tops = [position.logprobs.top for position in positions]
        return {
            "tokens": [_name(token) for token in selected],
            "token_logprobs": [token.finite for token in selected],
            "top_logprobs": [{_name(token): token.finite for token in top} for top in tops],
            "text_offset": [position.offset for position in positions],
        }

    def whole(
        self, content: HeldText, _calls: list[HeldCall], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return a complete continuation."""
        return {"text": content, "logprobs": logprobs}


Format = ChatFormat | CompletionFormat


@dataclass(slots=True)
class Continuation:
    """One continuation of a response, as far as it has arrived."""

    reader: TextReader
    awaits_prompt: bool
    """Whether the next chunk contains the prompt instead of new tokens."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _characters: IncrementalDecoder = field(
        default_factory=partial(getincrementaldecoder("utf-8"), "replace")
    )
    """Decodes tokens with log-probabilities as the target does: wrong bytes become U+FFFD."""
    _num_characters: int = 0
    """Characters that these tokens complete."""

    def add(self, chunk: GenerationChunk) -> tuple[Parts, list[Position]]:
        """Add a chunk; return what is new."""
        new = self.reader.push(chunk.text)
        if chunk.finish_reason is not None:
            new.extend(self.reader.finish())
        self.prompt_tokens = self.prompt_tokens or chunk.prompt_tokens
        self.completion_tokens += 0 if self.awaits_prompt else len(chunk.token_ids)
        self.awaits_prompt = False
        self.finish_reason = chunk.finish_reason
        added = []
        for logprobs in chunk.logprobs:
            begun, _ = self._characters.getstate()
            # It is one character, also if its other bytes do not follow.
            added.append(Position(self._num_characters + bool(begun), logprobs))
            self._num_characters += len(self._characters.decode(logprobs.selected.encoded))
        return new, added

    @property
    def finish_name(self) -> str | None:
        """OpenAI's name of the reason for the end; None before it."""
        if self.finish_reason is None:
            return None
        if self.finish_reason is FinishReason.STOP and self.reader.num_calls:
            return "tool_calls"
        return _REASONS[self.finish_reason]


@dataclass(slots=True)
class Assembly:
    """Turns the chunks of a request into a response."""

    head: dict[str, Any]
    """Members that all objects share."""
    form: Format
    request: PreparedRequest
    new_reader: Callable[[], TextReader]
    """Returns what finds calls of tools in the text of a continuation."""
    _usages: defaultdict[int, list[Usage]] = field(default_factory=lambda: defaultdict(list))
    """Usages of the continuations that have ended, by prompt."""

    def _index(self, prompt: int, chunk: GenerationChunk) -> int:
        return prompt * self.request.n + chunk.choice

    def _new_continuation(self, prompt: int) -> Continuation:
        return Continuation(self.new_reader(), self.request.calls[prompt].sampling.echo)

    def _count(self, prompt: int, chunk: GenerationChunk) -> None:
        """Keep the token counts of a continuation that ends."""
        if chunk.usage is not None:
            self._usages[prompt].append(chunk.usage)

    def _usage(self) -> dict[str, Any]:
        """Return all token counts; of the continuations of a prompt, the fewest cached ones."""
        by_prompt = self._usages.values()
        cached_tokens = sum(min(used.cached_tokens for used in usages) for usages in by_prompt)
        prompt_tokens = sum(usages[0].prompt_tokens for usages in by_prompt)
        completion_tokens = sum(used.completion_tokens for usages in by_prompt for used in usages)
        details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        return usage(prompt_tokens, completion_tokens) | details

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.head | {"object": name, "choices": choices}


@dataclass(slots=True)
class StreamAssembly(Assembly):
    """The objects of a stream. They are not kept."""

    _choices: dict[int, Continuation] = field(default_factory=dict)

    def add(self, prompt: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk; return the objects that it yields."""
        index = self._index(prompt, chunk)
        parts: list[dict[str, Any]] = []
        if index not in self._choices:
            self._choices[index] = self._new_continuation(prompt)
            parts += filter(None, [self.form.first()])
        choice = self._choices[index]
        new, positions = choice.add(chunk)
        self._count(prompt, chunk)
        more = extension(chunk) if self.request.report_rounds else {}
        if new or chunk.logprobs or chunk.finish_reason or more:
            parts.append(self.form.delta(new, positions))
        objects = [
            self._object(self.form.stream_name, [{"index": index, **part, "finish_reason": None}])
            for part in parts
        ]
        if chunk.finish_reason is not None:
            objects[-1]["choices"][0]["finish_reason"] = choice.finish_name
        if more:
            objects[-1]["ssd"] = more
        if self.request.repeats_usage:
            for event in objects:
                # The object with the role comes before the tokens.
                completion_tokens = choice.completion_tokens if event is objects[-1] else 0
                event["usage"] = usage(choice.prompt_tokens, completion_tokens)
        return objects

    def usage(self) -> dict[str, Any]:
        """Return the last object of a stream that includes the token counts."""
        return self._object(self.form.stream_name, []) | {"usage": self._usage()}


class HeldContinuation:
    """One continuation of a whole response, as far as it has arrived."""

    def __init__(self, continuation: Continuation, form: Format) -> None:
        self._continuation = continuation
        self._form = form
        self._content = HeldText()
        self._calls: list[HeldCall] = []
        self._logprobs: dict[str, Any] = {}
        self.extension: dict[str, Any] = {}
        """The field ``ssd``, with held JSON in it."""
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
        self._num_text_bytes += self._content.add(new.content)
        for part in new.calls:
            if part.name:
                self._calls.append(HeldCall(part.name, HeldText()))
                self._num_other_bytes += CALL_BYTES + len(part.name)
            self._num_text_bytes += self._calls[-1].arguments.add(part.arguments)
        if positions:
            self._hold_logprobs(positions)

    def extend(self, more: dict[str, Any]) -> None:
        """Add to the field ``ssd``: rounds add up, seed and statistics are single."""
        rounds = more.pop("rounds", ())
        self.extension |= more
        if rounds:
            held = self.extension.setdefault("rounds", HeldList())
            self._num_other_bytes += held.extend(rounds)

    def choice(self) -> dict[str, Any]:
        """Return the complete continuation, with held JSON in it."""
        return {
            **self._form.whole(self._content, self._calls, self._logprobs or None),
            "finish_reason": self._continuation.finish_name,
        }

    def _hold_logprobs(self, positions: list[Position]) -> None:
        for name, value in self._form.logprobs(positions).items():
            if isinstance(value, list):
                self._num_other_bytes += self._logprobs.setdefault(name, HeldList()).extend(value)
            else:
                self._logprobs[name] = value


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


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return token counts as OpenAI writes them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def extension(chunk: GenerationChunk) -> dict[str, Any]:
    """Return the field ``ssd`` of a chunk: seed, rounds and statistics, as far as it has them."""
    members: dict[str, Any] = {}
    if chunk.seed is not None:
        # Text: 64 bits are more than a number of JavaScript holds.
        members["seed"] = str(chunk.seed)
    if chunk.rounds:
        members["rounds"] = [
            {
                "proposed": [token.text for token in round_.proposed],
                "accepted": round_.accepted_tokens,
                "added": [token.text for token in round_.added],
                "lookup": round_.lookup.value,
            }
            for round_ in chunk.rounds
        ]
    if chunk.statistics is not None:
        members["statistics"] = asdict(chunk.statistics)
    return members


def _call(name: str, arguments: str | HeldText) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """Return the new part of a call; the first one has an id and the name."""
    if part.name:
        return {"index": part.index, **_call(part.name, part.arguments)}
    return {"index": part.index, "function": {"arguments": part.arguments}}


def model_object(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    """Return a model as ``/v1/models`` lists it."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "ssd",
        "max_model_len": max_model_len,
    }


def _name(token: TokenLogprob) -> str:
    """Return the name of a token; that of a part of a character as OpenAI writes it."""
    if not token.partial:
        return token.name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.partial)
