"""The messages that open a link, for tests of its ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ssd.testing.tokenizer import ByteTokenizer
from ssd.text.tokenizer import load_tokenizer
from ssd.types import WIRE_VERSION, Hello, Welcome

HELLO = Hello(
    wire_version=WIRE_VERSION,
    vocab_size=10,
    tokenizer_fingerprint=ByteTokenizer().fingerprint,
    lookahead=6,
    branches=24,
    epoch=3,
)
WELCOME = Welcome(epoch=3, max_sessions=4, lookahead=6, branches=24)


def hello_of(folder: Path, **changes: Any) -> Hello:
    """Return ``HELLO`` with the tokenizer of a model folder."""
    tokenizer = load_tokenizer(folder)
    fields: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    return replace(HELLO, **(fields | changes))
