"""A tokenizer whose calls a test can watch and block."""

import threading
from collections.abc import Sequence

from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import TokenId


class WatchedTokenizer(ByteTokenizer):
    """Keeps the threads that called it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.with_prefix: list[bool] = []
        """Whether the encoded texts had their prefix."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.two_are_inside = threading.Event()

    def encode(self, text: str, *, has_prefix: bool = False) -> list[TokenId]:
        self.threads.append(threading.current_thread())
        if len(self.threads) == 2:
            self.two_are_inside.set()
        self.with_prefix.append(has_prefix)
        assert self.may_go_on.wait(5.0)
        return super().encode(text, has_prefix=has_prefix)

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        self.threads.append(threading.current_thread())
        return super().decode(token_ids)
