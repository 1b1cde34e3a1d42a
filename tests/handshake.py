"""The messages that open a link, for tests of its ends."""

from ssd.testing.tokenizer import ByteTokenizer
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
