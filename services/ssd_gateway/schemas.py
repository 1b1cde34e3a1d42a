"""Bodies of requests: OpenAI's fields, this product's extensions, and their conversion to calls.

Bounds that depend on the model are checked by the target. Here, numbers only have to fit the
message to it. Unknown fields are refused, as OpenAI's API does. A field of OpenAI or vLLM whose
feature is missing is accepted only with a value that asks for nothing.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticKnownError

from ssd.errors import FieldError, UnsupportedError
from ssd.rpc.codec import Conversation, GenerateCall, Prompt
from ssd.types import ChatTurn, Mode, SamplingParams
from ssd_gateway.refusals import refusal

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` of a completion, as in OpenAI's API."""
MAX_PROMPTS = 32
"""Maximum number of prompts of one completion request."""
MAX_STOPS = 16
MAX_BIASES = 1024
"""Maximum number of entries of ``logit_bias``."""
_UINT32 = 2**32 - 1
_SEEDS = 2**64
_ROLES = ("developer", "system", "user", "assistant")
_ANY_OBJECT = '{"type":"object"}'
Count = Annotated[int, Field(ge=0, le=_UINT32)]
Limit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# A list ends at its first wrong entry: an error for each of a million entries would take gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIdList = Annotated[list[Count], Field(max_length=1_000_000, fail_fast=True)]

MISSING_FEATURES: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    # vLLM's.
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "guided_grammar": (None,),
    "guided_whitespace_pattern": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "prompt_logprobs": (None,),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields of features that are missing, with the values that do not ask for them."""
MISSING_STRUCTURES: Mapping[str, tuple[object, ...]] = {
    "disable_additional_properties": (None, False),
    "disable_any_whitespace": (None, False),
    "disable_fallback": (None, False),
    "grammar": (None,),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
}
"""The same of ``structured_outputs``."""
_MISSING_PATHS = frozenset(f"structured_outputs.{name}" for name in MISSING_STRUCTURES)

WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier"),
        *("store", "user", "verbosity"),
        "guided_decoding_backend",
    }
)
"""Fields that are accepted with any value: accounting and hints."""


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether JSON's equality finds a value; Python's true also equals 1."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _with_few_entries(value: object) -> object:
    """Refuse too many entries of an object before their values are checked."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        size: dict[str, Any] = {"max_length": MAX_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", **size})
    return value


Biases = Annotated[
    dict[str, Number], Field(max_length=MAX_BIASES), BeforeValidator(_with_few_entries)
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Part(_Body):
    """An object inside a body."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: object) -> object:
        """Drop unknown fields but the first, whose error names it."""
        if not isinstance(value, dict):
            return value
        known = {each.alias or name for name, each in cls.model_fields.items()}
        dropped = frozenset([name for name in value if name not in known][1:])
        return {name: each for name, each in value.items() if name not in dropped}


class StreamOptions(_Part):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Part):
    """The schema of a response format."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """Return the JSON schema of the text; None for any text.

        Raises:
            FieldError: the format needs a schema and has none.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return _ANY_OBJECT
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise FieldError("response_format.json_schema.schema", "is required")
        return json.dumps(self.json_schema.schema_, ensure_ascii=False)


class StructuredOutputs(_Part):
    """What the text must look like, with vLLM's names. At most one field is set."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        """Drop fields of missing features that do not ask for them."""
        if not isinstance(value, dict):
            return value
        return {
            name: each
            for name, each in value.items()
            if not _is_one_of(each, MISSING_STRUCTURES.get(name, ()))
        }


class _Request(_Body):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Limit | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    n: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Extensions, with the names that other servers use.
    top_k: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    regex: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOPS, fail_fast=True)] | None = (
        None
    )
    mode: Literal["auto", "autoregressive", "synchronous", "speculative"] = "auto"
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    report_rounds: bool = False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Return the sampling parameters; fields that are not set have their defaults."""
        _, json_schema, regex = self._structure()
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
            json_schema=json_schema,
            regex=regex,
            **{name: value for name, value in given.items() if value is not None},
        )

    def names(self) -> dict[str, str]:
        """Return fields of the body by their paths in the call, where the two differ."""
        of_structure, _, _ = self._structure()
        return {"sampling.json_schema": of_structure, "sampling.regex": of_structure}

    def _structure(self) -> tuple[str, str, str]:
        """Return the field that asks for a structure, the JSON schema and the regular expression.

        At most one of the latter two is not empty.

        Raises:
            FieldError: several fields ask for a structure, or one with an empty text.
        """
        named = self.structured_outputs or StructuredOutputs()
        schemas = {
            "response_format": self.response_format and self.response_format.schema_text(),
            "structured_outputs.json": _json_text(named.json_),
            "structured_outputs.json_object": _ANY_OBJECT if named.json_object else None,
            "guided_json": _json_text(self.guided_json),
        }
        expressions = {
            "regex": self.regex,
            "structured_outputs.regex": named.regex,
            "structured_outputs.choice": _any_of(named.choice),
            "guided_regex": self.guided_regex,
            "guided_choice": _any_of(self.guided_choice),
        }
        given = {name: text for name, text in (schemas | expressions).items() if text is not None}
        first, *others = given or [""]
        if others:
            raise FieldError(others[0], f"cannot be combined with {first}")
        if first and not given[first]:
            raise FieldError(first, "is empty; leave it out for any text")
        return first, schemas.get(first) or "", expressions.get(first) or ""

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


def _json_text(schema: str | dict[str, Any] | None) -> str | None:
    return json.dumps(schema, ensure_ascii=False) if isinstance(schema, dict) else schema


def _any_of(texts: list[str] | None) -> str | None:
    """Return the regular expression of some texts."""
    return None if texts is None else "|".join(map(re.escape, texts))


class Message(BaseModel):
    """A message of a conversation. Fields of roles that are refused may be present."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    # Checked after the features that other roles need.
    role: str = Field(json_schema_extra={"enum": list(_ROLES)})
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

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
        if self.role not in _ROLES:
            allowed = ", ".join(_ROLES)
            raise FieldError(f"{place}.role", f"is {self.role[:32]!r}, must be one of {allowed}")
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

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    def names(self) -> dict[str, str]:
        """Return fields of the body by their paths in the call, where the two differ."""
        found = super().names() | {"sampling.logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            found["sampling.max_tokens"] = "max_completion_tokens"
        return found

    def calls(self) -> list[GenerateCall]:
        """Return the call of the conversation.

        Raises:
            RequestError: a field is not valid or not supported.
        """
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

    prompt: str | TokenIdList | Texts | Annotated[list[TokenIdList], Field(fail_fast=True)]
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: is not supported; leave it out, or set it to n")
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo: cannot be combined with logprobs: a prompt has no log-probabilities here; "
                "leave one of them out"
            )
        return self

    def calls(self) -> list[GenerateCall]:
        """Return a call for each prompt.

        Raises:
            RequestError: a field is not valid or not supported.
        """
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


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request of a JSON body.

    Raises:
        FieldError: a field is missing, unknown, or of a wrong type.
        UnsupportedError: a field asks for a feature that is missing.
        RequestError: the body is not a JSON object.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        found = refusal(error)
        if isinstance(found, FieldError) and found.field in _MISSING_PATHS:
            raise _unsupported(found.field) from None
        raise found from None
    for name, value in (request.model_extra or {}).items():
        if name in WITHOUT_EFFECT or _is_one_of(value, MISSING_FEATURES.get(name, ())):
            continue
        if name in MISSING_FEATURES:
            raise _unsupported(name)
        raise FieldError(name, "unrecognized request argument")
    return request


def _unsupported(name: str) -> UnsupportedError:
    return UnsupportedError(name, "is not supported by this server")
