"""Messages of ``generate.proto`` to dataclasses and back, within the bounds of the proto.

The target checks bounds that depend on the model: its length and its chat template. protobuf does
not parse text that is not UTF-8: a server returns INVALID_ARGUMENT, and a client raises a
``FieldError`` before it sends.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from ssd.errors import ContextLengthError, FieldError
from ssd.rpc.bounds import (
    ABOVE_ZERO,
    ANY_MODEL,
    PromptBounds,
    check_count,
    check_range,
    check_text,
    max_depth,
    max_values,
)
from ssd.rpc.sampling_codec import (
    logprobs_messages,
    position_logprobs,
    sampling_message,
    sampling_params,
)
from ssd.types import (
    ChatTurn,
    FanOutName,
    FinishReason,
    GenerationChunk,
    LookupResult,
    Mode,
    Round,
    SamplingParams,
    SpeculationStatistics,
    TokenId,
    TokenText,
    ToolCall,
    Usage,
)
from ssd.v1 import admin_pb2, generate_pb2, types_pb2

MAX_TURNS = 4096
"""Maximum number of turns of a conversation. The template runs on the event loop, in microseconds
a turn."""
MAX_PRIORITY = 100
WHOLE_TEXT_MS = 1000
"""Interval between messages for a client that shows no text before its end."""
MAX_METADATA_ENTRIES = 16
MAX_METADATA_CHARACTERS = 256
MAX_NAME_CHARACTERS = 256
MAX_TOOL_CALLS = 4096
"""Maximum number of tool calls in all turns."""
MAX_TEMPLATE_ARGUMENTS_BYTES = 16 * 1024
MAX_JSON_VALUES = 64 * 1024
"""Maximum number of values in all JSON texts of a conversation, as ``max_values`` counts. The event
loop parses them and the template writes them, in at most 10 ms."""
MAX_JSON_DEPTH = 32
"""Maximum number of levels of lists and objects in these texts. A template that indents JSON writes
spaces for each level before each value."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that the chat template converts to text; oldest turn first."""

    turns: tuple[ChatTurn, ...]
    tools: str = ""
    """Tools that the assistant can call: a JSON list; empty for none."""
    template_arguments: str = ""
    """Other variables of the template: a JSON object; empty for none."""

    @property
    def json_texts(self) -> list[str]:
        """All JSON texts, in the order in which the target parses them."""
        calls = [call.arguments for turn in self.turns for call in turn.tool_calls]
        return [self.template_arguments, *calls, self.tools]

    @property
    def texts(self) -> list[str]:
        """All texts that the template can put into the prompt, in their usual order."""
        texts = [self.tools]
        for turn in self.turns:
            texts += (turn.content, turn.tool_call_id)
            for call in turn.tool_calls:
                texts += (call.id, call.name, call.arguments)
        return list(filter(None, texts))


Prompt = str | tuple[TokenId, ...] | Conversation
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A ``GenerateRequest`` within its bounds."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = Mode.AUTO
    priority: int = 0
    """-100..100; higher values run earlier."""
    model: str = ""
    """Empty: the served model."""
    metadata: dict[str, str] = field(default_factory=dict)
    report_rounds: bool = False
    """Whether chunks contain the rounds of their tokens."""
    message_interval_ms: int = 0
    """Least time between chunks of a continuation, 0..1000; 0: the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model and its settings; fields as in ``GetModelInfoResponse``."""

    model: str
    family: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    dtype: str
    attention_backend: str
    device: str
    version: str
    tokenizer_fingerprint: str
    lookahead: int
    branches: int
    active_drafts: int
    max_num_seqs: int
    deterministic: bool
    dtype_reason: str
    max_text_bytes: int
    tool_format: str


_MODES: dict[int, Mode] = {types_pb2.MODE_UNSPECIFIED: Mode.AUTO} | {
    getattr(types_pb2, f"MODE_{mode.name}"): mode for mode in Mode
}
_FINISH_REASONS = {
    getattr(types_pb2, f"FINISH_REASON_{reason.name}"): reason
    for reason in FinishReason
    if reason is not FinishReason.FAILED
}
_LOOKUPS = {
    getattr(types_pb2, f"LOOKUP_RESULT_{result.name}"): result
    for result in LookupResult
    if result is not LookupResult.NONE
}


BackupName = Literal["none", "ngram"]
MAX_DRAFT_DEADLINE_MS = 60_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChange:
    """The fields of ``SetSpeculationRequest``; None keeps the value."""

    mode: Mode | None = None
    """Mode of new requests that arrive in mode AUTO."""
    fan_out_policy: str | None = None
    backup: BackupName | None = None
    draft_deadline_ms: float | None = None


def speculation_change(request: admin_pb2.SetSpeculationRequest) -> SpeculationChange:
    """Convert and check a request to change how a target speculates.

    Raises:
        FieldError: a value is unknown or out of bounds.
    """
    deadline_ms = request.draft_deadline_ms if request.HasField("draft_deadline_ms") else None
    if deadline_ms is not None:
        check_range("draft_deadline_ms", deadline_ms, ABOVE_ZERO, MAX_DRAFT_DEADLINE_MS)
    _check_name("fan_out_policy", request.fan_out_policy, get_args(FanOutName))
    _check_name("backup", request.backup, get_args(BackupName))
    return SpeculationChange(
        mode=_mode(request.mode) if request.mode else None,
        fan_out_policy=request.fan_out_policy or None,
        backup=cast(BackupName, request.backup) if request.backup else None,
        draft_deadline_ms=deadline_ms,
    )


def set_speculation_request(change: SpeculationChange) -> admin_pb2.SetSpeculationRequest:
    """Convert a change to its message."""
    return admin_pb2.SetSpeculationRequest(
        mode=f"MODE_{change.mode.name}" if change.mode else None,
        fan_out_policy=change.fan_out_policy or "",
        backup=change.backup or "",
        draft_deadline_ms=change.draft_deadline_ms,
    )


def _check_name(field: str, name: str, allowed: Collection[str]) -> None:
    if name and name not in allowed:
        raise FieldError(field, f"is {name[:32]!r}, must be one of {', '.join(allowed)}")


def generate_call(
    request: generate_pb2.GenerateRequest,
    vocab_size: int | None = None,
    bounds: PromptBounds = ANY_MODEL,
) -> GenerateCall:
    """Convert a request and check its bounds.

    The caller checks the token ids of the prompt, because only a prompt that fits the length of the
    model is worth reading.

    Args:
        request: the message.
        vocab_size: bound of other token ids; None: 2^31.
        bounds: maximum length of the prompt.

    Raises:
        FieldError: a field is missing or out of range.
        ContextLengthError: a list of token ids leaves no room for a new token.
    """
    check_count("model", len(request.model), "characters", 0, MAX_NAME_CHARACTERS)
    prompt = _prompt(request, bounds)
    sampling = sampling_params(request.sampling, vocab_size)
    _check_request_extras(request)
    return GenerateCall(
        prompt=prompt,
        sampling=sampling,
        mode=_mode(request.mode),
        priority=request.priority,
        model=request.model,
        metadata=dict(request.metadata),
        report_rounds=request.report_rounds,
        message_interval_ms=request.message_interval_ms,
    )


def generate_request(call: GenerateCall) -> generate_pb2.GenerateRequest:
    """Convert a call to its message; fields that are None stay unset.

    Raises:
        FieldError: a number or a text that protobuf cannot encode.
    """
    prompt: dict[str, Any]
    match call.prompt:
        case str() as text:
            prompt = {"text": text}
        case Conversation() as chat:
            texts = {"tools": chat.tools, "template_arguments": chat.template_arguments}
            prompt = {"chat": {"messages": map(asdict, chat.turns), **texts}}
        case token_ids:
            prompt = {"token_ids": {"ids": token_ids}}
    try:
        return generate_pb2.GenerateRequest(
            **prompt,
            model=call.model,
            mode=f"MODE_{call.mode.name}",
            sampling=sampling_message(call.sampling),
            priority=call.priority,
            metadata=call.metadata,
            report_rounds=call.report_rounds,
            message_interval_ms=call.message_interval_ms,
        )
    except (ValueError, TypeError) as error:
        raise FieldError("request", f"cannot be encoded: {error}") from error


def generate_response(chunk: GenerationChunk) -> generate_pb2.GenerateResponse:
    """Convert a chunk to its message."""
    reason, statistics = chunk.finish_reason, chunk.statistics
    return generate_pb2.GenerateResponse(
        choice=chunk.choice,
        token_ids=chunk.token_ids,
        logprobs=logprobs_messages(chunk.logprobs),
        text=chunk.text,
        finish_reason=f"FINISH_REASON_{reason.name}" if reason else None,
        seed=chunk.seed,
        prompt_tokens=chunk.prompt_tokens,
        usage=asdict(chunk.usage) if chunk.usage else None,
        statistics=asdict(statistics) | {"mode": f"MODE_{statistics.mode.name}"}
        if statistics
        else None,
        rounds=map(_round_fields, chunk.rounds),
    )


def generation_chunk(message: generate_pb2.GenerateResponse) -> GenerationChunk:
    """Convert the message of a chunk."""
    usage = statistics = None
    if message.HasField("usage"):
        usage = Usage(**shared_fields(message.usage, Usage))
    if message.HasField("statistics"):
        statistics = SpeculationStatistics(
            mode=_MODES.get(message.statistics.mode, Mode.AUTO),
            **shared_fields(message.statistics, SpeculationStatistics, "mode"),
        )
    return GenerationChunk(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(position_logprobs, message.logprobs)),
        text=message.text,
        choice=message.choice,
        seed=message.seed if message.HasField("seed") else None,
        prompt_tokens=message.prompt_tokens,
        # A newer target can have reasons that are unknown here. The text is complete then, too.
        finish_reason=_FINISH_REASONS.get(
            message.finish_reason, FinishReason.STOP if message.finish_reason else None
        ),
        usage=usage,
        statistics=statistics,
        rounds=tuple(map(_round, message.rounds)),
    )


def _round_fields(round_: Round) -> dict[str, Any]:
    lookup = None if round_.lookup is LookupResult.NONE else f"LOOKUP_RESULT_{round_.lookup.name}"
    return asdict(round_) | {"lookup": lookup}


def _round(message: types_pb2.Round) -> Round:
    return Round(
        proposed=tuple(TokenText(token.id, token.text) for token in message.proposed),
        accepted_tokens=message.accepted_tokens,
        added=tuple(TokenText(token.id, token.text) for token in message.added),
        lookup=_LOOKUPS.get(message.lookup, LookupResult.NONE),
    )


def model_info_response(info: ModelInfo) -> generate_pb2.GetModelInfoResponse:
    """Convert the description of a model to its message."""
    return generate_pb2.GetModelInfoResponse(**asdict(info))


def model_info(message: generate_pb2.GetModelInfoResponse) -> ModelInfo:
    """Convert the message of a model's description."""
    return ModelInfo(**shared_fields(message, ModelInfo))


def prompt_field(prompt: Prompt) -> str:
    """Return the path of the field that contains a prompt of this type."""
    match prompt:
        case str():
            return "text"
        case Conversation():
            return "chat"
    return "token_ids.ids"


def _prompt(request: generate_pb2.GenerateRequest, bounds: PromptBounds) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            if not request.text:
                raise FieldError("text", "the prompt is empty; at least 1 token is required")
            check_text("text", request.text, bounds=bounds)
            return request.text
        case "token_ids":
            ids = request.token_ids.ids
            if not ids:
                raise FieldError(
                    "token_ids.ids", "the prompt is empty; at least 1 token is required"
                )
            if len(ids) >= bounds.tokens:
                max_tokens = request.sampling.max_tokens or 1
                raise ContextLengthError(len(ids), max_tokens, bounds.tokens, "token_ids.ids")
            return tuple(ids)
        case "chat":
            return _conversation(request.chat, bounds)
    raise FieldError("input", "no prompt; set text, token_ids or chat")


def _conversation(chat: types_pb2.ChatMessages, bounds: PromptBounds) -> Conversation:
    check_count("chat.messages", len(chat.messages), "turns", 1, MAX_TURNS)
    num_calls = sum(len(turn.tool_calls) for turn in chat.messages)
    check_count("chat.messages", num_calls, "tool calls", 0, MAX_TOOL_CALLS)
    num_bytes = len(chat.template_arguments.encode())
    place = "chat.template_arguments"
    check_count(place, num_bytes, "bytes", 0, MAX_TEMPLATE_ARGUMENTS_BYTES)
    for index, turn in enumerate(chat.messages):
        if turn.role not in ROLES:
            raise FieldError(
                f"chat.messages[{index}].role",
                f"is {turn.role[:32]!r}, must be one of {', '.join(ROLES)}",
            )
    turns = tuple(
        ChatTurn(
            turn.role,
            turn.content,
            tuple(ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls),
            turn.tool_call_id,
        )
        for turn in chat.messages
    )
    conversation = Conversation(turns, chat.tools, chat.template_arguments)
    check_text("chat", *conversation.texts, bounds=bounds)
    _check_json(conversation)
    return conversation


def _check_json(conversation: Conversation) -> None:
    """Refuse JSON texts that take long to parse or to write."""
    json_text = ",".join(filter(None, conversation.json_texts)).encode()
    if max_values(json_text, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise FieldError(
            "chat",
            f"has over {MAX_JSON_VALUES} JSON values in tools, arguments of calls and template "
            "arguments; send fewer tools or turns",
        )
    if max_depth(json_text) > MAX_JSON_DEPTH:
        raise FieldError(
            "chat",
            f"has over {MAX_JSON_DEPTH} levels of JSON in tools, arguments of calls or template "
            "arguments",
        )


def _mode(number: types_pb2.Mode) -> Mode:
    if number not in _MODES:
        raise FieldError("mode", f"unknown value {number}")
    return _MODES[number]


def _check_request_extras(request: generate_pb2.GenerateRequest) -> None:
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_range("message_interval_ms", request.message_interval_ms, 0, WHOLE_TEXT_MS)
    check_count("metadata", len(request.metadata), "entries", 0, MAX_METADATA_ENTRIES)
    for key, text in request.metadata.items():
        longest = max(len(key), len(text))
        check_count(f"metadata[{key[:32]}]", longest, "characters", 0, MAX_METADATA_CHARACTERS)


def shared_fields(source: object, kind: Any, *but: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, read from it or from its message.

    Args:
        source: a ``kind``, or the message that has the same field names.
        kind: the dataclass.
        but: names to leave out, because their types differ.
    """
    names = (item.name for item in fields(kind))
    return {name: getattr(source, name) for name in names if name not in but}
