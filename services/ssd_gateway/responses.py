"""Chunks of a target as OpenAI objects. Pure, but for the random ids of tool calls."""

import secrets
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ssd.types import FinishReason, GenerationChunk, PositionLogprobs, TokenLogprob, Usage
from ssd_gateway.schemas import PreparedRequest
from ssd_gateway.tool_calls import CallPart, Parts, TextReader

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's names; the client of the target raises an error for the other reasons."""


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities of one new token."""

    offset: int
    """Characters before the token, of the text that the response contains."""
    logprobs: PositionLogprobs


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
        logprobs = {"logprobs": _chat_logprobs(positions)} if positions else {}
        return {"delta": delta, **logprobs}

    def whole(self, parts: Parts, positions: list[Position]) -> dict[str, Any]:
        """Return a complete continuation."""
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [_call(call.name, call.arguments) for call in parts.calls]
        return {"message": message, "logprobs": _chat_logprobs(positions) if positions else None}


class CompletionFormat:
    """Objects of ``/v1/completions``."""

    id_prefix = "cmpl-"
    name = stream_name = "text_completion"

    def first(self) -> None:
        """Nothing begins a continuation."""

    def delta(self, parts: Parts, positions: list[Position]) -> dict[str, Any]:
        """Return the new part of a continuation."""
        logprobs = _text_logprobs(positions) if positions else None
        return {"text": parts.content, "logprobs": logprobs}

    whole = delta


Format = ChatFormat | CompletionFormat


@dataclass(slots=True)
class Continuation:
    """One continuation of a response, as far as it has arrived."""

    reader: TextReader
    is_whole: bool
    """Whether to keep parts and positions: a stream has sent them."""
    parts: Parts = field(default_factory=Parts)
    positions: list[Position] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    next_offset: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, chunk: GenerationChunk, *, is_prompt: bool) -> tuple[Parts, list[Position]]:
        """Add a chunk, which contains the prompt or new tokens; return what is new."""
        new = self.reader.push(chunk.text)
        if chunk.finish_reason is not None:
            new.extend(self.reader.finish())
        self.prompt_tokens = self.prompt_tokens or chunk.prompt_tokens
        self.completion_tokens += 0 if is_prompt else len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        added = []
        for logprobs in chunk.logprobs:
            added.append(Position(self.next_offset, logprobs))
            # Characters that begin in the token.
            self.next_offset += sum(byte & 0xC0 != 0x80 for byte in logprobs.selected.encoded)
        if self.is_whole:
            self.parts.extend(new)
            self.positions += added
        return new, added

    @property
    def finish_name(self) -> str | None:
        """OpenAI's name of the reason for the end; None before it."""
        if self.finish_reason is None:
            return None
        if self.finish_reason is FinishReason.STOP and self.reader.num_calls:
            return "tool_calls"
        return _REASONS[self.finish_reason]


class Assembly:
    """Turns the chunks of a request into the objects of its response.

    ``head`` has the members that all objects share. ``new_reader`` returns what finds calls of
    tools in the text of a continuation.
    """

    def __init__(
        self,
        head: dict[str, Any],
        form: Format,
        request: PreparedRequest,
        new_reader: Callable[[], TextReader],
    ) -> None:
        self._head = head
        self._form = form
        self._request = request
        self._new_reader = new_reader
        self._choices: dict[int, Continuation] = {}
        self._usages: defaultdict[int, list[Usage]] = defaultdict(list)
        """Usages of the continuations that have ended, by prompt."""
        self._extension: dict[str, Any] = {}

    def add(self, prompt: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk; return the objects of a stream that it yields."""
        index = prompt * self._request.n + chunk.choice
        parts: list[dict[str, Any]] = []
        is_first = index not in self._choices
        if is_first:
            self._choices[index] = Continuation(self._new_reader(), not self._request.stream)
            parts += filter(None, [self._form.first()])
        choice = self._choices[index]
        echoes = self._request.calls[prompt].sampling.echo
        new, positions = choice.add(chunk, is_prompt=is_first and echoes)
        if chunk.usage is not None:
            self._usages[prompt].append(chunk.usage)
        more = extension(chunk) if self._request.report_rounds else {}
        if not self._request.stream:
            self._extend(more)
        if new or chunk.logprobs or chunk.finish_reason or more:
            parts.append(self._form.delta(new, positions))
        objects = [
            self._object(self._form.stream_name, [{"index": index, **part, "finish_reason": None}])
            for part in parts
        ]
        if chunk.finish_reason is not None:
            objects[-1]["choices"][0]["finish_reason"] = choice.finish_name
        if more:
            objects[-1]["ssd"] = more
        if self._request.repeats_usage:
            for event in objects:
                # The object with the role comes before the tokens.
                completion_tokens = choice.completion_tokens if event is objects[-1] else 0
                event["usage"] = usage(choice.prompt_tokens, completion_tokens)
        return objects

    def _extend(self, more: dict[str, Any]) -> None:
        """Rounds add up; seed and statistics are single."""
        for name, value in more.items():
            earlier = self._extension.get(name)
            self._extension[name] = earlier + value if isinstance(earlier, list) else value

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        choices = [
            {
                "index": index,
                **self._form.whole(choice.parts, choice.positions),
                "finish_reason": choice.finish_name,
            }
            for index, choice in sorted(self._choices.items())
        ]
        extended = {"ssd": self._extension} if self._request.report_rounds else {}
        return self._object(self._form.name, choices) | {"usage": self._usage()} | extended

    def usage(self) -> dict[str, Any]:
        """Return the last object of a stream that includes the token counts."""
        return self._object(self._form.stream_name, []) | {"usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Return all token counts; of the continuations of a prompt, the fewest cached ones."""
        by_prompt = self._usages.values()
        cached_tokens = sum(min(used.cached_tokens for used in usages) for usages in by_prompt)
        prompt_tokens = sum(usages[0].prompt_tokens for usages in by_prompt)
        completion_tokens = sum(used.completion_tokens for usages in by_prompt for used in usages)
        details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        return usage(prompt_tokens, completion_tokens) | details

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": name, "choices": choices}


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


def _call(name: str, arguments: str) -> dict[str, Any]:
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


def _chat_logprobs(positions: list[Position]) -> dict[str, Any]:
    content = [
        {
            **position.logprobs.selected.as_json(),
            "top_logprobs": [token.as_json() for token in position.logprobs.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(positions: list[Position]) -> dict[str, Any]:
    selected = [position.logprobs.selected for position in positions]
    tops = [position.logprobs.top for position in positions]
    return {
        "tokens": [_name(token) for token in selected],
        "token_logprobs": [token.finite for token in selected],
        "top_logprobs": [{_name(token): token.finite for token in top} for top in tops],
        "text_offset": [position.offset for position in positions],
    }


def _name(token: TokenLogprob) -> str:
    """Return the name of a token; that of a part of a character as OpenAI writes it."""
    if not token.partial:
        return token.name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.partial)
