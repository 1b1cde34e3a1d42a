"""The bounds of a draft's links."""

from typing import Any

import pytest
from tests.draft_setup import make_setup
from tests.handshake import HELLO

from ssd.errors import LinkError
from ssd.rpc.link_codec import speculate_request
from ssd.types import OpenSession, RefusalReason
from ssd_draft import link_server
from ssd_draft.handshake import welcome
from ssd_draft.link_server import TargetLink, max_message_bytes, may_link


class ClosedCall:
    """A call that accepts nothing."""

    def __init__(self) -> None:
        self.errors: list[LinkError] = []

    def send(self, message: object) -> None:
        raise LinkError("the link is closed")

    def fail(self, error: LinkError) -> None:
        self.errors.append(error)


def test_a_link_that_accepts_no_message_of_the_step_thread_ends() -> None:
    call: Any = ClosedCall()
    link = TargetLink(1, HELLO, call, make_setup())
    link.push([])
    link.refuse(1, RefusalReason.GAP)
    link.fail(LinkError("gone"))
    assert [str(each) for each in call.errors] == ["the link is closed"] * 2 + ["gone"]


def test_the_welcome_names_what_the_draft_serves() -> None:
    found = welcome(HELLO, make_setup())
    assert found.tokenizer_fingerprint == HELLO.tokenizer_fingerprint
    assert found.max_len == make_setup().model.engine.max_model_len


def test_no_address_can_prevent_the_links_of_another() -> None:
    assert all(may_link(held, held) for held in range(20)), "20 targets behind one address"
    num_links = 0
    for _ in range(6):
        mine = 0
        while may_link(mine, num_links):
            mine, num_links = mine + 1, num_links + 1
        assert may_link(0, num_links), f"an address took {mine} links"
    assert all(may_link(0, held) for held in range(link_server.MAX_LINKS))
    assert not may_link(0, link_server.MAX_LINKS)


@pytest.mark.parametrize("max_len", [20, 4096, 1 << 20])
def test_every_acceptable_opening_is_within_the_limit_of_a_message(max_len: int) -> None:
    opening = OpenSession(
        session=2**31 - 1,
        token_ids=(2**31 - 1,) * (max_len - 1),
        seed=2**64 - 1,
        choice=2**31 - 1,
        temperature=2.0,
        max_len=2**31 - 1,
    )
    num_bytes = speculate_request(opening).ByteSize()
    assert num_bytes <= max_message_bytes(make_setup(max_len)) <= max(1 << 16, 6 * max_len)
