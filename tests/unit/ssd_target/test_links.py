"""Which addresses are dialled, and what a draft must agree to."""

from dataclasses import replace

import pytest

from ssd.errors import HandshakeError
from ssd.types import LinkHello, LinkWelcome
from ssd_target.links import check_welcome, is_literal

HELLO = LinkHello(
    wire_version=1,
    vocab_size=10,
    tokenizer_fingerprint="f",
    lookahead=6,
    branches=24,
    channel="grpc",
    epoch=3,
)
WELCOME = LinkWelcome(epoch=3, capacity=4, lookahead=6, branches=24)


@pytest.mark.parametrize(
    ("address", "literal"),
    [
        ("127.0.0.1:50052", True),
        ("[::1]:50052", True),
        ("localhost:50052", True),
        ("drafts.ssd.svc:50052", False),
    ],
)
def test_numbers_and_localhost_are_not_resolved(address: str, *, literal: bool) -> None:
    assert is_literal(address) == literal


def test_a_welcome_must_repeat_what_was_proposed() -> None:
    check_welcome(HELLO, WELCOME)
    for change in ({"epoch": 2}, {"lookahead": 5}, {"branches": 12}):
        with pytest.raises(HandshakeError, match=next(iter(change))):
            check_welcome(HELLO, replace(WELCOME, **change))  # type: ignore[arg-type]
