"""Bodies of requests: OpenAI's fields, this product's extensions, and their conversion to calls.

Bounds that depend on the model are checked by the target. Here, numbers only have to fit the
message to it. Unknown fields are refused, as OpenAI's API does. A field of OpenAI or vLLM whose
feature is missing is accepted only with a value that asks for nothing.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError, model_validator

from ssd.errors import FieldError, UnsupportedError
from ssd.rpc.codec import WHOLE_TEXT_MS, Conversation, GenerateCall, Prompt
from ssd.rpc.sampling_codec import MAX_STOPS, SEEDS
from ssd.types import Mode, SamplingParams
from ssd_gateway.fields import (
    MISSING_STRUCTURES,
    UINT32,
    Biases,
    Count,
    Limit,
    Number,
    Part,
    Structure,
    StructureFields,
    Texts,
    TokenIdList,
    is_one_of,
)
from ssd_gateway.messages import Message
from ssd_gateway.refusals import refusal
from ssd_gateway.tools import ToolChoice, Tools, ToolUse, tool_use, tools_text

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` of a completion, as in OpenAI's API."""
_BYTES_OF_ID = 8
_PROMPT = re.compile(r"^(text|token_ids(\.ids)?)\b")
"""Beginning of the path of a prompt in a call."""

MISSING_FEATURES: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
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
_MISSING_PATHS = frozenset(f"structured_outputs.{name}" for name in MISSING_STRUCTURES)

WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier"),
        *("store", "user", "verbosity"),
        "guided_decoding_backend",
    }
)
"""Fields that are accepted with any value: accounting and hints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request without its body."""

    calls: tuple[GenerateCall, ...]
    """One for each prompt; at least one."""
    names: dict[str, str]
    """Fields of the body by their paths in the calls, where the two differ."""
    prompt_names: tuple[str, ...]
    """Field of the body that contains the prompt of each call."""
    model: str
    n: int
    stream: bool
    includes_usage: bool
    """Whether a stream ends with the token counts."""
    repeats_usage: bool
    """Whether each object of the stream has the token counts so far."""
    report_rounds: bool
    tool_use: ToolUse

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompts, rounded: characters, and 8 bytes for each token id."""
        return sum(_num_bytes(call.prompt) for call in self.calls)

    def name(self, prompt: int, path: str) -> str:
        """Return the field of the body for a path in the call of a prompt."""
        if path in self.names:
            return self.names[path]
        return _PROMPT.sub(self.prompt_names[prompt], path)


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Request(StructureFields):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="allow")
    max_prompts: ClassVar[int] = 1
    """Maximum number of prompts of one request."""

    model: str | None = None
    max_tokens: Limit | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=SEEDS[0], le=SEEDS[1])] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    n: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extensions, with the names that other servers use.
    top_k: Annotated[int, Field(ge=-1, le=UINT32)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOPS, fail_fast=True)] | None = (
        None
    )
    mode: Literal["auto", "autoregressive", "synchronous", "speculative"] = "auto"
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    report_rounds: bool = False

    def prepared(self) -> PreparedRequest:
        """Return the calls of the request, and what its response needs.

        Raises:
            RequestError: a field is not valid or not supported.
        """
        options = self.stream_options or StreamOptions()
        includes_usage = bool(options.include_usage)
        calls = self.calls()
        return PreparedRequest(
            calls=tuple(calls.values()),
            names=self.names(),
            prompt_names=tuple(calls),
            model=self.model or "",
            n=self.n or 1,
            stream=bool(self.stream),
            includes_usage=includes_usage,
            # continuous_usage_stats has no effect without include_usage, as in vLLM.
            repeats_usage=includes_usage and bool(options.continuous_usage_stats),
            report_rounds=self.report_rounds,
            tool_use=self.tool_use,
        )

    @cached_property
    def tool_use(self) -> ToolUse:
        """How the text contains calls of tools.

        Raises:
            FieldError: ``tool_choice`` names no tool.
        """
        return ToolUse()

    @cached_property
    def structure(self) -> Structure:
        """The structure of the text: that of calls, if it must be calls.

        Raises:
            FieldError: a field that asks for a structure is not valid, or cannot be combined with
                the tools.
        """
        asked, use = self.asked_structure(), self.tool_use
        if asked.field and use.choice != "none":
            raise FieldError(
                asked.field, "cannot be combined with tools; set tool_choice to 'none'"
            )
        return Structure("tools", use.json_schema) if use.json_schema else asked

    @abstractmethod
    def calls(self) -> dict[str, GenerateCall]:
        """Return a call for each prompt, by the field that errors of a prompt name.

        Raises:
            RequestError: a field is not valid or not supported.
        """

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, *, echo: bool
    ) -> SamplingParams:
        """Return the sampling parameters; fields that are not set have their defaults."""
        structure = self.structure
        bias = (self.logit_bias or {}).items()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        parameters: dict[str, Any] = {
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
            "seed": self.seed,
        }
        return SamplingParams(
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            json_schema=structure.json_schema,
            regex=structure.regex,
            **{name: value for name, value in parameters.items() if value is not None},
        )

    def names(self) -> dict[str, str]:
        """Return fields of the body by their paths in the call, where the two differ."""
        field = self.structure.field
        return {"sampling.json_schema": field, "sampling.regex": field}

    def _call(self, prompt: Prompt, sampling: SamplingParams) -> GenerateCall:
        return GenerateCall(
            prompt=prompt,
            sampling=sampling,
            mode=Mode(self.mode),
            model=self.model or "",
            priority=self.priority,
            report_rounds=self.report_rounds,
            message_interval_ms=0 if self.stream else WHOLE_TEXT_MS,
        )


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) > UINT32:
        raise FieldError("logit_bias", f"{key[:32]!r} is not a token id")
    return int(key)


class ChatRequest(_Request):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    def names(self) -> dict[str, str]:
        """See ``_Request``."""
        names = super().names() | {
            "sampling.logprobs": "top_logprobs",
            "chat.template_arguments": "chat_template_kwargs",
            "chat.tools": "tools",
        }
        if self.max_completion_tokens is not None:
            names["sampling.max_tokens"] = "max_completion_tokens"
        return names

    def calls(self) -> dict[str, GenerateCall]:
        """Return the call of the conversation; see ``_Request``."""
        turns = tuple(
            message.turn(f"messages[{index}]") for index, message in enumerate(self.messages)
        )
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(limit, logprobs, echo=False)
        arguments = self.chat_template_kwargs
        tools = self.tools if self.tool_choice != "none" else None
        conversation = Conversation(
            turns,
            tools=tools_text(tools) if tools else "",
            template_arguments=json.dumps(arguments, ensure_ascii=False) if arguments else "",
        )
        return {"prompt": self._call(conversation, sampling)}

    @cached_property
    def tool_use(self) -> ToolUse:
        """How the text contains calls of tools."""
        return tool_use(
            self.tools or (), self.tool_choice, are_parallel=self.parallel_tool_calls is not False
        )


class CompletionRequest(_Request):
    """Body of ``POST /v1/completions``."""

    max_prompts: ClassVar[int] = 32

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

    def calls(self) -> dict[str, GenerateCall]:
        """See ``_Request``."""
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self._sampling(limit, self.logprobs, echo=bool(self.echo))
        prompts = self._prompts()
        if not 1 <= len(prompts) <= self.max_prompts:
            raise FieldError(
                "prompt", f"has {len(prompts)} prompts, must have 1..{self.max_prompts}"
            )
        return {name: self._call(prompt, sampling) for name, prompt in prompts.items()}

    def _prompts(self) -> dict[str, Prompt]:
        """Return the prompts by the field, or the entry of it, that contains them."""
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        # All items have one type, as the annotation of the field requires.
        items = cast("list[int | str | list[int]]", self.prompt)
        ids = tuple(item for item in items if isinstance(item, int))
        if ids:
            return {"prompt": ids}
        return {
            f"prompt[{index}]": tuple(item) if isinstance(item, list) else str(item)
            for index, item in enumerate(items)
        }


def _num_bytes(prompt: Prompt) -> int:
    match prompt:
        case Conversation() as conversation:
            return sum(map(len, conversation.texts))
        case str() as text:
            return len(text)
        case token_ids:
            return _BYTES_OF_ID * len(token_ids)


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
        request_error = refusal(error)
        if isinstance(request_error, FieldError) and request_error.field in _MISSING_PATHS:
            raise _unsupported(request_error.field) from None
        raise request_error from None
    for name, value in (request.model_extra or {}).items():
        if name in WITHOUT_EFFECT or is_one_of(value, MISSING_FEATURES.get(name, ())):
            continue
        if name in MISSING_FEATURES:
            raise _unsupported(name)
        raise FieldError(name, "unrecognized request argument")
    return request


def _unsupported(name: str) -> UnsupportedError:
    return UnsupportedError(name, "is not supported by this server")
