"""Bounds of a body, which is checked before it is parsed. Pure.

The interpreter runs nothing else while the library parses a body: 8 MB of empty lists take 1.6 s.
So a body has a maximum number of values, not only of bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ssd.errors import TooLargeError
from ssd.rpc.bounds import MAX_TEXT_BYTES, max_values
from ssd.rpc.codec import ModelInfo

JSON_FACTOR = 3
"""Bytes of JSON per byte of a text. ``\\u00e9`` has 6 bytes and its character 2."""
ID_BYTES = 10
"""Bytes of JSON per token id: up to 8 digits, a comma and a space."""
OTHER_BYTES = 512 * 1024
"""Bytes of JSON beside the prompts: names and roles of 4096 messages, a JSON schema."""
OTHER_VALUES = 128 * 1024
"""Values beside the prompts. They are parsed in at most 60 ms."""
MAX_VALUES = 256 * 1024
"""Maximum values of a body with several prompts. They are parsed in at most .3 s, away from the
event loop. One prompt of a longer model may have more."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Maximum size of a body."""

    num_bytes: int
    num_values: int
    """Texts, numbers, lists and objects, and the names of fields."""

    @classmethod
    def of_models(
        cls, models: Iterable[ModelInfo], max_bytes: int, num_prompts: int = 1
    ) -> "BodyLimits":
        """Return the limits that follow from the longest prompt of any of these models.

        Args:
            models: at least one.
            max_bytes: upper bound of ``num_bytes``.
            num_prompts: maximum number of prompts in a body.
        """
        num_bytes = max(
            max(
                JSON_FACTOR * (info.max_text_bytes or MAX_TEXT_BYTES), ID_BYTES * info.max_model_len
            )
            for info in models
        )
        num_ids = max(info.max_model_len for info in models)
        return cls(
            min(max_bytes, OTHER_BYTES + num_prompts * num_bytes),
            OTHER_VALUES + max(num_ids, min(num_prompts * num_ids, MAX_VALUES - OTHER_VALUES)),
        )

    def check_values(self, body: bytes) -> None:
        """Refuse a body with too many values.

        Raises:
            TooLargeError: it has too many.
        """
        if max_values(body, self.num_values) > self.num_values:
            raise TooLargeError(
                f"the body has over {self.num_values} values; send shorter lists, or a text "
                "instead of token ids"
            )
