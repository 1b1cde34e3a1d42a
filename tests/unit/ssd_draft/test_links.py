"""What a draft says to a target that does not fit."""

from dataclasses import replace

import pytest

from ssd.errors import HandshakeError
from ssd.types import LinkHello
from ssd_draft.links import LinkTerms, check_hello

TERMS = LinkTerms(
    vocab_size=8, tokenizer_fingerprint="ab" * 32, lookahead=6, branches=4, capacity=1
)
HELLO = LinkHello(
    wire_version=1,
    vocab_size=8,
    tokenizer_fingerprint="ab" * 32,
    lookahead=6,
    branches=4,
    channel="grpc",
    epoch=1,
)


def test_of_two_fingerprints_the_beginnings_are_shown_and_what_to_do() -> None:
    with pytest.raises(HandshakeError) as caught:
        check_hello(replace(HELLO, tokenizer_fingerprint="cd" * 32), TERMS)
    assert str(caught.value) == (
        "tokenizer_fingerprint: this draft has abababababab…, the target said cdcdcdcdcdcd…; "
        "take a draft of the target's family"
    )


def test_numbers_are_shown_whole() -> None:
    with pytest.raises(HandshakeError) as caught:
        check_hello(replace(HELLO, lookahead=7), TERMS)
    assert str(caught.value) == "lookahead: this draft has 6, the target said 7"
