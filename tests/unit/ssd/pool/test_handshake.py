from dataclasses import replace

import pytest
from tests.handshake import HELLO, WELCOME

from ssd.errors import HandshakeError
from ssd.pool.handshake import MAX_SESSIONS, check_welcome


def test_a_welcome_must_repeat_the_values_of_the_hello() -> None:
    check_welcome(HELLO, WELCOME)
    for change in ({"epoch": 2}, {"lookahead": 5}, {"branches": 12}):
        with pytest.raises(HandshakeError, match=next(iter(change))):
            check_welcome(HELLO, replace(WELCOME, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_sessions", [MAX_SESSIONS + 1, 2**32 - 1])
def test_a_draft_with_too_many_sessions_is_rejected_with_the_field(max_sessions: int) -> None:
    with pytest.raises(HandshakeError, match="max_sessions"):
        check_welcome(HELLO, replace(WELCOME, max_sessions=max_sessions))


@pytest.mark.parametrize("offered", [(), ("gloo",)])
def test_a_backend_that_was_not_offered_is_refused(offered: tuple[str, ...]) -> None:
    hello = replace(HELLO, backends=offered)
    with pytest.raises(HandshakeError, match="backend: the draft chose nccl, offered: "):
        check_welcome(hello, replace(WELCOME, backend="nccl"))


def test_a_draft_that_serves_another_tokenizer_is_refused_and_an_earlier_version_is_not() -> None:
    check_welcome(HELLO, replace(WELCOME, tokenizer_fingerprint=HELLO.tokenizer_fingerprint))
    check_welcome(HELLO, replace(WELCOME, tokenizer_fingerprint=""))
    with pytest.raises(HandshakeError, match="tokenizer_fingerprint: "):
        check_welcome(HELLO, replace(WELCOME, tokenizer_fingerprint="another"))
