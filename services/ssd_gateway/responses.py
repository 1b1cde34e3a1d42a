"""Chunks of a target as OpenAI objects. Pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ssd.types import FinishReason, GenerationChunk, PositionLogprobs, TokenLogprob, Usage

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all objects of one response share."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str
    """Version of the server: the same seed gives the same text while it stays."""


@dataclass(slots=True)
class Counts:
    """Token counts of a response, over its prompts and continuations."""

    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Prompt and cached tokens of each prompt; of its continuations, the fewest cached tokens."""
    completion_tokens: int = 0

    def add(self, prompt: int, usage: Usage | None) -> None:
        """Add the counts of a continuation that has ended."""
        if usage is not None:
            _, cached = self.prompts.get(prompt, (0, usage.cached_tokens))
            self.prompts[prompt] = usage.prompt_tokens, min(cached, usage.cached_tokens)
            self.completion_tokens += usage.completion_tokens

    def usage(self) -> dict[str, Any]:
        """Return the counts as OpenAI writes them."""
        prompt_tokens = sum(count for count, _ in self.prompts.values())
        cached_tokens = sum(cached for _, cached in self.prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


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

    def delta(self, text: str, positions: list[Position]) -> dict[str, Any]:
        """Return the new part of a continuation."""
        found: dict[str, Any] = {"delta": {"content": text} if text else {}}
        if positions:
            found["logprobs"] = {"content": _chat_logprobs(positions), "refusal": None}
        return found

    def whole(self, text: str, positions: list[Position]) -> dict[str, Any]:
        """Return a complete continuation."""
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": _chat_logprobs(positions), "refusal": None}
            if positions
            else None,
        }


class CompletionFormat:
    """Objects of ``/v1/completions``."""

    id_prefix = "cmpl-"
    name = stream_name = "text_completion"

    def first(self) -> None:
        """Nothing begins a continuation."""

    def delta(self, text: str, positions: list[Position]) -> dict[str, Any]:
        """Return the new part of a continuation."""
        return {"text": text, "logprobs": _text_logprobs(positions) if positions else None}

    whole = delta


Format = ChatFormat | CompletionFormat


@dataclass(slots=True)
class Continuation:
    """One continuation of a response, as far as it has arrived."""

    text: list[str] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    next_offset: int = 0

    def add(self, chunk: GenerationChunk) -> list[Position]:
        """Add a chunk; return its positions."""
        self.text.append(chunk.text)
        self.finish_reason = chunk.finish_reason
        added = []
        for each in chunk.logprobs:
            added.append(Position(self.next_offset, each))
            # Characters that begin in the token.
            self.next_offset += sum(byte & 0xC0 != 0x80 for byte in each.selected.encoded)
        self.positions += added
        return added


class Assembly:
    """Turns the chunks of a request into the objects of its response."""

    def __init__(self, head: Head, form: Format, num_choices: int, *, is_extended: bool) -> None:
        """Prepare.

        Args:
            head: of all objects.
            form: of the endpoint.
            num_choices: continuations of each prompt.
            is_extended: add the field ``ssd``.
        """
        self._head = head
        self._form = form
        self._num_choices = num_choices
        self._is_extended = is_extended
        self._choices: dict[int, Continuation] = {}
        self._counts = Counts()
        self._extension: dict[str, Any] = {}

    def add(self, prompt: int, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk; return the objects of a stream that it yields."""
        index = prompt * self._num_choices + chunk.choice
        parts: list[dict[str, Any]] = []
        if index not in self._choices:
            self._choices[index] = Continuation()
            parts += filter(None, [self._form.first()])
        choice = self._choices[index]
        positions = choice.add(chunk)
        self._counts.add(prompt, chunk.usage)
        more = extension(chunk) if self._is_extended else {}
        for name, value in more.items():
            # Rounds add up; seed and statistics are single.
            known = self._extension.get(name)
            self._extension[name] = known + value if isinstance(known, list) else value
        has_news = chunk.text or chunk.logprobs or chunk.finish_reason or more
        if has_news:
            parts.append(self._form.delta(chunk.text, positions))
        objects = [
            self._object(self._form.stream_name, [{"index": index, **part, "finish_reason": None}])
            for part in parts
        ]
        if chunk.finish_reason is not None:
            objects[-1]["choices"][0]["finish_reason"] = finish(chunk.finish_reason)
        if more:
            objects[-1]["ssd"] = more
        return objects

    def whole(self) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        made = []
        for index, each in sorted(self._choices.items()):
            assert each.finish_reason is not None
            body = self._form.whole("".join(each.text), each.positions)
            made.append({"index": index, **body, "finish_reason": finish(each.finish_reason)})
        extended = {"ssd": self._extension} if self._is_extended else {}
        return self._object(self._form.name, made) | {"usage": self._counts.usage()} | extended

    def usage(self) -> dict[str, Any]:
        """Return the last object of a stream that includes the token counts."""
        return self._object(self._form.stream_name, []) | {"usage": self._counts.usage()}

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": name,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }


def finish(reason: FinishReason) -> str:
    """Return OpenAI's name of a finish reason; the client raises an error for the other ones."""
    return _REASONS[reason]


def extension(chunk: GenerationChunk) -> dict[str, Any]:
    """Return the field ``ssd`` of a chunk: seed, rounds and statistics, as far as it has them."""
    found: dict[str, Any] = {}
    if chunk.seed is not None:
        # Text: 64 bits are more than a number of JavaScript holds.
        found["seed"] = str(chunk.seed)
    if chunk.rounds:
        found["rounds"] = [
            {
                "proposed": [token.text for token in each.proposed],
                "accepted": each.accepted_tokens,
                "added": [token.text for token in each.added],
                "lookup": each.lookup.value,
            }
            for each in chunk.rounds
        ]
    if chunk.statistics is not None:
        found["statistics"] = asdict(chunk.statistics)
    return found


def model_object(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    """Return a model as ``/v1/models`` lists it."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "ssd",
        "max_model_len": max_model_len,
    }


def _chat_logprobs(positions: Iterable[Position]) -> list[dict[str, Any]]:
    return [
        {
            **_token(each.logprobs.selected),
            "top_logprobs": [_token(token) for token in each.logprobs.top],
        }
        for each in positions
    ]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": _finite(token.logprob),
        "bytes": list(token.encoded),
    }


def _text_logprobs(positions: Iterable[Position]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for each in positions:
        selected, top = each.logprobs.selected, each.logprobs.top
        found["tokens"].append(_name(selected))
        found["token_logprobs"].append(_finite(selected.logprob))
        found["top_logprobs"].append({_name(token): _finite(token.logprob) for token in top})
        found["text_offset"].append(each.offset)
    return found


def _name(token: TokenLogprob) -> str:
    """Return the text of a token; that of a part of a character as OpenAI writes it."""
    if not token.partial:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.partial)


def _finite(logprob: float) -> float:
    """Return a number that JSON has, for tokens that cannot be selected; OpenAI's is -9999."""
    return max(logprob, -9999.0)
