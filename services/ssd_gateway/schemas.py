"""Bodies of requests: OpenAI's fields, this product's extensions, and their conversion to calls.

Bounds that depend on the model are checked by the target. Here, numbers only have to fit the
message to it. Unknown fields are refused, as OpenAI's API does. A field whose feature is missing is
accepted only with a value that asks for nothing.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ssd.errors import FieldError, RequestError, UnsupportedError
from ssd.rpc.codec import Conversation, GenerateCall, Prompt
from ssd.types import ChatTurn, Mode, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` of a completion, as in OpenAI's API."""
MAX_PROMPTS = 32
"""Maximum number of prompts of one completion request."""
MAX_STOPS = 16
_UINT32 = 2**32 - 1
_SEEDS = 2**64
_ANY_OBJECT = '{"type":"object"}'
Count = Annotated[int, Field(ge=0, le=_UINT32)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIdList = Annotated[list[Count], Field(max_length=1_000_000)]

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
}
"""Fields of features that are missing, with the values that do not ask for them."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Body):
    """The schema of a response format."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str:
        """Return the JSON schema of the text; empty for any text.

        Raises:
            FieldError: the format needs a schema and has none.
        """
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return _ANY_OBJECT
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise FieldError("response_format.json_schema.schema", "is required")
        return json.dumps(self.json_schema.schema_, ensure_ascii=False)


class _Request(_Body):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = Field(default=None, max_length=1024)
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Extensions, with the names that other servers use.
    top_k: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    regex: str | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOPS)] | None = None
    mode: Literal["auto", "autoregressive", "synchronous", "speculative"] = "auto"
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    report_rounds: bool = False

    # Without effect here: accounting and hints of OpenAI's platform.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Return the sampling parameters; fields that are not set have their defaults."""
        schema = self.response_format.schema_text() if self.response_format else ""
        if schema and self.regex:
            raise FieldError("regex", "cannot be combined with response_format")
        bias = (self.logit_bias or {}).items()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            "temperature": self.temperature,
            # OpenAI's servers take 0 and vLLM -1 for all tokens.
            "top_k": None if self.top_k in (None, 0, -1) else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple(sorted((_token_id(key), weight) for key, weight in bias)) or None,
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "n": self.n,
            "logprobs": logprobs,
            "echo": echo,
            "seed": self.seed % _SEEDS if self.seed is not None else None,
        }
        return SamplingParams(
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            json_schema=schema,
            regex=self.regex or "",
            **{name: value for name, value in given.items() if value is not None},
        )

    def _call(
        self, prompt: Prompt, sampling: SamplingParams, max_tokens: int | None
    ) -> GenerateCall:
        return GenerateCall(
            prompt=prompt,
            sampling=sampling,
            seed=sampling.seed if self.seed is not None else None,
            max_tokens=max_tokens,
            mode=Mode(self.mode),
            model=self.model or "",
            priority=self.priority,
            report_rounds=self.report_rounds,
        )


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) > _UINT32:
        raise FieldError("logit_bias", f"{key[:32]!r} is not a token id")
    return int(key)


class Message(BaseModel):
    """A message of a conversation. Fields of roles that are refused may be present."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None

    def turn(self, place: str) -> ChatTurn:
        """Return the message as a turn.

        Args:
            place: path of the message, for errors.

        Raises:
            FieldError: the role or the content is not valid.
            UnsupportedError: the message needs tools, images or audio.
        """
        extra = self.model_extra or {}
        if (
            self.role in ("tool", "function")
            or extra.get("tool_calls")
            or extra.get("function_call")
        ):
            raise UnsupportedError(place, "tools are not supported; send text messages")
        role = "system" if self.role == "developer" else self.role
        match self.content:
            case None:
                raise FieldError(f"{place}.content", "is missing; it must be a text")
            case str() as text:
                return ChatTurn(role, text)
            case parts:
                texts = [_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(parts)]
                return ChatTurn(role, "".join(texts))


def _part_text(part: Mapping[str, Any], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise UnsupportedError(
            place, f"parts of type {str(kind)[:32]!r} are not supported; send text"
        )
    if not isinstance(text, str):
        raise FieldError(f"{place}.text", "is not a text")
    return text


class ChatRequest(_Request):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    def calls(self) -> list[GenerateCall]:
        """Return the call of the conversation.

        Raises:
            RequestError: a field is not valid or not supported.
        """
        _refuse_missing_features(self)
        turns = tuple(
            message.turn(f"messages[{index}]") for index, message in enumerate(self.messages)
        )
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(limit, logprobs, echo=False)
        return [self._call(Conversation(turns), sampling, limit)]


class CompletionRequest(_Request):
    """Body of ``POST /v1/completions``."""

    prompt: str | TokenIdList | list[str] | list[TokenIdList]
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: is not supported; leave it out, or set it to n")
        return self

    def calls(self) -> list[GenerateCall]:
        """Return a call for each prompt.

        Raises:
            RequestError: a field is not valid or not supported.
        """
        _refuse_missing_features(self)
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self._sampling(limit, self.logprobs, echo=bool(self.echo))
        prompts = self._prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise FieldError("prompt", f"has {len(prompts)} prompts, must have 1..{MAX_PROMPTS}")
        return [self._call(prompt, sampling, limit) for prompt in prompts]

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        # Of one type, as the field's annotation requires.
        items = cast("list[int | str | list[int]]", self.prompt)
        ids = tuple(each for each in items if isinstance(each, int))
        if ids:
            return [ids]
        return [tuple(each) if isinstance(each, list) else str(each) for each in items]


def _refuse_missing_features(request: ChatRequest | CompletionRequest) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(request, name, None) not in neutral:
            raise UnsupportedError(name, "is not supported by this server")


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request of a JSON body.

    Raises:
        FieldError: a field is missing, unknown, or of a wrong type.
        RequestError: the body is not a JSON object.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # Of a union, the last alternative explains as well as any.
        first = error.errors(include_url=False, include_input=False)[0]
    place, message = _path(first["loc"]), first["msg"]
    if first["type"] in ("json_invalid", "json_type") or (
        first["type"] == "model_type" and not place
    ):
        raise RequestError(f"the body is not a valid JSON object: {message}")
    if first["type"] == "extra_forbidden":
        raise FieldError(place, "unrecognized request argument")
    if first["type"] == "missing":
        raise FieldError(place, "is required")
    if first["type"] == "value_error":
        place, _, message = message.removeprefix("Value error, ").partition(": ")
    raise FieldError(place, message[0].lower() + message[1:])


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, without the names of the alternatives of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path
