"""Which addresses are resolved, and the answers of name servers."""

import socket
from collections.abc import Callable

import pytest

from ssd.addresses import check_address, is_literal, resolve
from ssd.errors import SettingsError


@pytest.mark.parametrize(
    ("address", "literal"),
    [
        ("127.0.0.1:50052", True),
        ("[::1]:50052", True),
        ("localhost:50052", True),
        ("drafts.ssd.svc:50052", False),
        ("dns:///localhost:50052", False),
    ],
)
def test_ip_addresses_and_localhost_are_not_names(address: str, *, literal: bool) -> None:
    assert is_literal(address) == literal


@pytest.mark.parametrize(
    "address", [" a:1", "a b:1", "a:1\n", "dns:/// a:1", "a\N{NO-BREAK SPACE}:1"]
)
def test_an_address_with_white_space_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"drafts: .* contains white space"):
        check_address("drafts", address)


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_without_addresses_has_an_empty_answer(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(number))
    assert await resolve("demo-draft-0", 50052) == set()


async def test_a_missing_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", failing(socket.EAI_AGAIN))
    with pytest.raises(OSError, match="no answer"):
        await resolve("demo-draft-0", 50052)


def failing(number: int) -> Callable[..., object]:
    def getaddrinfo(*_question: object, **_hints: object) -> object:
        raise socket.gaierror(number, "no answer")

    return getaddrinfo
