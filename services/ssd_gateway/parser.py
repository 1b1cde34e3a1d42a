"""Bodies to requests: their bounds, and a thread for large ones.

The interpreter runs nothing else while the library parses a body: 8 MB of empty lists take 1.6 s.
So a body has a maximum number of values, not only of bytes, which is checked before it is parsed.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ssd.errors import TooLargeError
from ssd.rpc.bounds import MAX_TEXT_BYTES, max_values
from ssd.rpc.codec import ModelInfo
from ssd_gateway.schemas import AnyRequest, PreparedRequest, parse

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
SMALL_BYTES = 32 * 1024
"""A body of this size is parsed in at most 3 ms."""


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


class RequestParser:
    """Parses bodies. Asyncio loop."""

    def __init__(self) -> None:
        # One thread: the interpreter lock is held while the library parses, so the event loop
        # would wait for each of several threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parser")

    async def prepare(
        self, kind: type[AnyRequest], body: bytes, limits: BodyLimits
    ) -> PreparedRequest:
        """Return the request of a JSON body.

        Raises:
            TooLargeError: it has too many values.
            RequestError: it is not valid or asks for something that is not supported.
        """
        if len(body) <= SMALL_BYTES:
            return _prepare(kind, body, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _prepare, kind, body, limits)


def _prepare(kind: type[AnyRequest], body: bytes, limits: BodyLimits) -> PreparedRequest:
    limits.check_values(body)
    return parse(kind, body).prepared()
