"""Bounds of numbers, texts and lists in messages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ssd.errors import FieldError, PromptSizeError

MAX_TEMPERATURE = 2.0
LARGEST_ID = 2**31 - 1
"""Token ids, sessions and epochs are int32 in frames."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message that is sent. Processes limit received messages further."""
MAX_ADMIN_BYTES = 256 * 1024
"""Maximum size of an answer of ``AdminService``: the operator reads answers of targets that it does
not control. The state of 64 links fits, with the longest words and reasons in ASCII."""
MAX_TOKEN_IDS = 1_000_000
"""Maximum length of a list in one message."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Maximum UTF-8 size of a text or a conversation. Its token ids fit one message."""
_PART = 4096
"""Token ids that are read at once. Meanwhile no other thread runs: 0.2 ms."""
ABOVE_ZERO = math.ulp(0.0)
"""Lowest number of a range that does not contain 0."""
_ID_BYTES = 5
"""Maximum size of a token id in a message."""
_OTHER_BYTES = 256 * 1024
"""Maximum size of a message without its prompt, rounded up: stop strings (16 KiB), metadata
(33 KiB), logit biases (14 KiB), a JSON schema (64 KiB), roles and lengths of 4096 turns (80
KiB)."""
_OPENING = (b"[", b"{")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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


def check_range(name: str, number: float, lowest: float, highest: float) -> None:
    """Refuse a number outside a closed range. NaN and infinities are outside every range.

    Raises:
        FieldError: names the field, the number and the range.
    """
    if not (lowest <= number <= highest and math.isfinite(number)):
        raise FieldError(name, f"is {_shown(number)}, must be {_range_text(lowest, highest)}")


def check_count(name: str, count: int, unit: str, lowest: int, highest: int) -> None:
    """Refuse a list or a text with too few or too many parts.

    Raises:
        FieldError: names the field, the count, its unit and the range.
    """
    if not lowest <= count <= highest:
        raise FieldError(name, f"has {count} {unit}, must have {lowest}..{highest}")


def _range_text(lowest: float, highest: float) -> str:
    if lowest != ABOVE_ZERO:
        return f"in {_shown(lowest)}..{_shown(highest)}"
    return f"above 0 and at most {_shown(highest)}"


def _shown(number: float) -> str:
    """Format a number for a message: integers with all digits."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def check_text(name: str, *texts: str, bounds: PromptBounds = ANY_MODEL) -> None:
    """Refuse texts whose total size is above the bound.

    Raises:
        PromptSizeError: names the field, the length and the bound.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        raise PromptSizeError(name, f"has {num_bytes} bytes, must have 0..{MAX_TEXT_BYTES}")
    if num_bytes > bounds.text_bytes:
        raise PromptSizeError(
            name,
            f"has {num_bytes} bytes, and no text of max_model_len, {bounds.tokens} tokens, has "
            f"over {bounds.text_bytes}",
        )


def in_parts(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield a list in parts; other threads can run between them."""
    return (token_ids[first : first + _PART] for first in range(0, len(token_ids), _PART))


def check_token_ids(
    name: str, token_ids: Sequence[int], vocab_size: int | None, *, is_keyed: bool = False
) -> None:
    """Refuse ids outside the vocabulary.

    Args:
        name: path of the list, or of the map if ``is_keyed``.
        token_ids: the entries of the list, or the keys of the map.
        vocab_size: None: 2^31.
        is_keyed: the path of an entry contains its key instead of its place.

    Raises:
        FieldError: names the first one.
    """
    limit = LARGEST_ID + 1 if vocab_size is None else vocab_size
    if all(min(part) >= 0 and max(part) < limit for part in in_parts(token_ids)):
        return
    index = next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < limit)
    place = token_ids[index] if is_keyed else index
    check_range(f"{name}[{place}]", token_ids[index], 0, limit - 1)


def max_values(text: bytes, enough: int) -> int:
    """Return an upper bound of the number of values of a JSON text, at most twice the number.

    Values are texts, numbers, lists and objects, and the names of fields. Counts no further than
    ``enough``. Takes 4 ms per MiB. Of a text that is not JSON, the result bounds what is read
    before the error.
    """
    plain = _without_escapes(text)
    num_values = plain.count(b'"') // 2 + 1
    if num_values <= enough:
        # A list or an object has one value more than it has commas, unless it is empty.
        num_values += sum(map(_outside_texts(plain).count, (b",", *_OPENING)))
    return num_values


def max_depth(text: bytes) -> int:
    """Return the number of lists and objects around the innermost value of a JSON text.

    Takes 0.1 us for each of them. The result is 0 for a text that is not JSON because lists or
    objects do not end.
    """
    brackets = _outside_texts(_without_escapes(text)).translate(None, _NO_BRACKETS)
    if 2 * sum(map(brackets.count, _OPENING)) != len(brackets):
        return 0
    steps = (1 if bracket in b"[{" else -1 for bracket in brackets)
    return max(accumulate(steps), default=0)


def _without_escapes(text: bytes) -> bytes:
    """Return a JSON text in which each quotation mark begins or ends a text."""
    return text.replace(rb"\\", b"").replace(rb"\"", b"")


def _outside_texts(plain: bytes) -> bytes:
    return b"".join(plain.split(b'"')[::2])
