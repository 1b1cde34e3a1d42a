"""Bounds of numbers, texts and lists on the wire; sampling fields that are not served yet."""

import math
from collections.abc import Sized

from ssd.errors import FieldError, UnsupportedError
from ssd.v1 import types_pb2

MAX_TEMPERATURE = 2.0
MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
LARGEST_ID = 2**31 - 1
"""Token ids, sessions and epochs travel in frames as int32."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a message that is sent; processes receive no more than they could accept."""
MAX_TOKEN_IDS = 1_000_000
"""Of a list in one message."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Of a text or a conversation, as UTF-8; its token ids still fit one message."""
_ABOVE_ZERO = math.ulp(0.0)


def check_range(name: str, found: float, lowest: float, highest: float) -> None:
    """Refuse a number outside a closed range; NaN and infinities are outside every range.

    Raises:
        FieldError: naming the field, the number and the range.
    """
    if not (lowest <= found <= highest and math.isfinite(found)):
        raise FieldError(name, f"is {found:g}, must be in {lowest:g}..{highest:g}")


def check_length(name: str, token_ids: Sized) -> None:
    """Refuse a list of token ids that is too long to be looked at.

    Raises:
        FieldError: naming the field, the length and the bound.
    """
    if len(token_ids) > MAX_TOKEN_IDS:
        raise FieldError(name, f"has {len(token_ids)} token ids, allowed are {MAX_TOKEN_IDS}")


def check_text(name: str, *texts: str) -> None:
    """Refuse texts that are together too long to be tokenised.

    Raises:
        FieldError: naming the field, the length and the bound.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        raise FieldError(name, f"has {num_bytes} bytes, allowed are {MAX_TEXT_BYTES}")


def refuse_unserved(message: types_pb2.SamplingParams, vocab_size: int | None) -> None:
    """Refuse fields that are not served; bounds first, and values that change nothing may pass.

    Raises:
        FieldError: a field is out of its bounds.
        UnsupportedError: a field asks for something.
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
    for name, lowest, highest, harmless in fields:
        if message.HasField(name):
            found = getattr(message, name)
            check_range(f"sampling.{name}", found, lowest, highest)
            if found != harmless:
                raise UnsupportedError(f"sampling.{name}")
    for token_id, bias in message.logit_bias.items():
        check_range(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if bias:
            raise UnsupportedError("sampling.logit_bias")
    if message.echo:
        raise UnsupportedError("sampling.echo")
