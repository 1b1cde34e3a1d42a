"""Bounds of numbers, texts and lists in messages; sampling fields that are not supported yet."""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from ssd.errors import FieldError, UnsupportedError
from ssd.v1 import types_pb2

MAX_TEMPERATURE = 2.0
MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
LARGEST_ID = 2**31 - 1
"""Token ids, sessions and epochs are int32 in frames."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message that is sent. Processes limit received messages further."""
MAX_TOKEN_IDS = 1_000_000
"""Maximum length of a list in one message."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Maximum UTF-8 size of a text or a conversation. Its token ids fit one message."""
MAX_LOGIT_BIASES = 1024
"""Maximum number of entries in one request."""
_ABOVE_ZERO = math.ulp(0.0)
_ID_BYTES = 5
"""Maximum size of a token id in a message."""
_OTHER_BYTES = 256 * 1024
"""Maximum size of a message without its prompt, rounded up: stop strings (16 KiB), metadata
(33 KiB), logit biases (14 KiB), roles and lengths of 4096 turns (80 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBounds:
    """Maximum length of a prompt. The defaults are the bounds of all models."""

    tokens: int = MAX_TOKEN_IDS
    """Maximum length of a sequence in tokens."""
    text_bytes: int = MAX_TEXT_BYTES
    """Maximum UTF-8 size of a text, or of all turns of a conversation together."""

    @classmethod
    def of_model(cls, max_model_len: int, longest_token_bytes: int | None) -> "PromptBounds":
        """Return the bounds of a model; without ``longest_token_bytes``, texts have the default."""
        if longest_token_bytes is None:
            return cls(tokens=max_model_len)
        text_bytes = min(MAX_TEXT_BYTES, max_model_len * longest_token_bytes)
        return cls(tokens=max_model_len, text_bytes=text_bytes)

    @property
    def message_bytes(self) -> int:
        """Size of the longest request that can be accepted, rounded up."""
        return max(self.text_bytes, _ID_BYTES * self.tokens) + _OTHER_BYTES


ANY_MODEL = PromptBounds()


def check_range(name: str, found: float, lowest: float, highest: float) -> None:
    """Refuse a number outside a closed range. NaN and infinities are outside every range.

    Raises:
        FieldError: names the field, the number and the range.
    """
    if not (lowest <= found <= highest and math.isfinite(found)):
        raise FieldError(name, f"is {_shown(found)}, must be {_range_text(lowest, highest)}")


def _range_text(lowest: float, highest: float) -> str:
    if lowest != _ABOVE_ZERO:
        return f"in {_shown(lowest)}..{_shown(highest)}"
    return "above 0" if math.isinf(highest) else f"above 0 and at most {_shown(highest)}"


def _shown(number: float) -> str:
    """Format a number for a message: integers with all digits."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def check_length(name: str, token_ids: Sized, bounds: PromptBounds = ANY_MODEL) -> None:
    """Refuse a list with too many token ids.

    Raises:
        FieldError: names the field, the length and the bound.
    """
    if len(token_ids) > bounds.tokens:
        raise FieldError(name, f"has {len(token_ids)} token ids, allowed are {bounds.tokens}")


def check_text(name: str, *texts: str, bounds: PromptBounds = ANY_MODEL) -> None:
    """Refuse texts whose total size is above the bound.

    Raises:
        FieldError: names the field, the length and the bound.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > bounds.text_bytes:
        raise FieldError(
            name,
            f"has {num_bytes} bytes, allowed are {bounds.text_bytes} for {bounds.tokens} tokens",
        )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        FieldError: names the first one.
    """
    limit = LARGEST_ID + 1 if vocab_size is None else vocab_size
    if not token_ids or max(token_ids) < limit:
        return
    index = next(index for index, token_id in enumerate(token_ids) if token_id >= limit)
    raise FieldError(f"{name}[{index}]", f"token id {token_ids[index]} is outside 0..{limit - 1}")


def refuse_unsupported(message: types_pb2.SamplingParams, vocab_size: int | None) -> None:
    """Refuse fields that are not supported, after their bounds. Values without effect are accepted.

    Raises:
        FieldError: a field is out of its bounds.
        UnsupportedError: a field has a value with an effect.
    """
    all_tokens = LARGEST_ID if vocab_size is None else vocab_size
    fields = (
        ("top_k", 1, all_tokens, all_tokens),
        ("top_p", _ABOVE_ZERO, 1.0, 1.0),
        ("min_p", 0.0, 1.0, 0.0),
        ("repetition_penalty", _ABOVE_ZERO, math.inf, 1.0),
        ("presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        ("min_tokens", 0, LARGEST_ID, 0),
        ("logprobs", 0, MAX_LOGPROBS, None),
        ("n", 1, MAX_CHOICES, 1),
    )
    for name, lowest, highest, neutral in fields:
        if message.HasField(name):
            found = getattr(message, name)
            check_range(f"sampling.{name}", found, lowest, highest)
            if found != neutral:
                raise UnsupportedError(f"sampling.{name}")
    for token_id, bias in message.logit_bias.items():
        check_range(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if bias:
            raise UnsupportedError("sampling.logit_bias")
    if message.echo:
        raise UnsupportedError("sampling.echo")
