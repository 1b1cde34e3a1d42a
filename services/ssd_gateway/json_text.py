"""JSON as bytes: of complete values, and of texts and lists that are held while they arrive. Pure.

JSON takes a fraction of the memory of the objects that it describes.
"""

import json
from collections.abc import Iterable, Iterator
from typing import ClassVar

BLOCK_BYTES = 64 * 1024
"""Maximum size of the blocks of a value; a part that is not held is never divided."""
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that end a line for some readers of events, but that JSON permits in texts."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encoded(value: object) -> bytes:
    """Return a value as JSON, in one line for all readers.

    Raises:
        ValueError: it has a number that is not finite.
    """
    text = _ENCODER.encode(value)
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
    return text.encode()


class HeldJson:
    """JSON of one value, which grows at its end."""

    _marks: ClassVar[tuple[bytes, bytes]]

    def __init__(self) -> None:
        self._inner = bytearray()

    def __len__(self) -> int:
        """Return the number of bytes that are held; 0 of an empty value."""
        return len(self._inner)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the JSON in pieces. Nothing is added afterwards."""
        opening, closing = self._marks
        yield opening
        view = memoryview(self._inner)
        for place in range(0, len(view), BLOCK_BYTES):
            yield view[place : place + BLOCK_BYTES]
        yield closing


class HeldText(HeldJson):
    """A text."""

    _marks = b'"', b'"'

    def add(self, text: str) -> int:
        """Add characters; return the number of bytes that they take."""
        new = encoded(text)[1:-1]
        self._inner += new
        return len(new)


class HeldList(HeldJson):
    """A list."""

    _marks = b"[", b"]"

    def extend(self, items: Iterable[object]) -> int:
        """Add items; return the number of bytes that they take."""
        before = len(self._inner)
        for item in items:
            if self._inner:
                self._inner += b","
            self._inner += encoded(item)
        return len(self._inner) - before


def pieces(value: object) -> Iterator[bytes | memoryview]:
    """Yield the JSON of a value whose objects and lists may contain held JSON."""
    if isinstance(value, HeldJson):
        yield from value.pieces()
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + encoded(key) + b":"
            yield from pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        before = b"["
        for item in value:
            yield before
            yield from pieces(item)
            before = b","
        yield b"]" if value else b"[]"
    else:
        yield encoded(value)


def blocks(value: object) -> Iterator[bytes]:
    """Yield the JSON of a value in few blocks, each of which takes a short time."""
    waiting: list[bytes | memoryview] = []
    num_bytes = 0
    for piece in pieces(value):
        if num_bytes and num_bytes + len(piece) > BLOCK_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
        waiting.append(piece)
        num_bytes += len(piece)
    yield b"".join(waiting)
