import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd.rpc.values import any_of, tuples_of

from ssd.errors import FieldError
from ssd.rpc.bounds import MAX_ADMIN_BYTES
from ssd.rpc.pool_codec import (
    MAX_LINKS,
    MAX_REASON_CHARACTERS,
    DraftStatus,
    LinkStatus,
    PoolStatus,
    draft_status,
    draft_status_response,
    pool_status,
    pool_status_response,
)
from ssd.v1 import admin_pb2, speculation_pb2

STATES = [name.removeprefix("LINK_STATE_").lower() for name in admin_pb2.LinkState.keys()]  # noqa: SIM118 - an enum wrapper, not a dict
LINKS = any_of(LinkStatus, state=st.sampled_from(STATES))


@given(any_of(PoolStatus, links=tuples_of(LINKS)))
def test_pool_status_is_unchanged_after_encoding_and_decoding(pool: PoolStatus) -> None:
    wire = pool_status_response(pool).SerializeToString()
    assert pool_status(admin_pb2.GetPoolStatusResponse.FromString(wire)) == pool


def test_an_unknown_link_state_is_unspecified() -> None:
    message = admin_pb2.GetPoolStatusResponse(
        links=[admin_pb2.LinkStatus(state=77)]  # type: ignore[arg-type]
    )
    assert pool_status(message).links[0].state == "unspecified"


def test_too_many_links_are_refused() -> None:
    message = admin_pb2.GetPoolStatusResponse.FromString(b"\n\0" * (MAX_LINKS + 1))
    with pytest.raises(FieldError, match=r"^links: has 257 entries, must have 0\.\.256$"):
        pool_status(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dtype", admin_pb2.GetPoolStatusResponse(dtype="x" * 257)),
        (
            "links[0].transport",
            admin_pb2.GetPoolStatusResponse(links=[admin_pb2.LinkStatus(transport="x" * 257)]),
        ),
    ],
)
def test_a_word_that_is_too_long_is_refused(
    name: str, message: admin_pb2.GetPoolStatusResponse
) -> None:
    with pytest.raises(FieldError) as refused:
        pool_status(message)
    assert str(refused.value) == f"{name}: has 257 characters, must have 0..256"


FLOATS = [field.name for field in fields(PoolStatus) if field.type is float]
FLOATS_OF_LINKS = [field.name for field in fields(LinkStatus) if field.type is float]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0, 1e19])
@pytest.mark.parametrize("name", [*FLOATS, *FLOATS_OF_LINKS])
def test_a_number_that_no_target_measures_is_refused(name: str, number: float) -> None:
    most: dict[str, Any] = {name: number}
    message = admin_pb2.GetPoolStatusResponse(**most if name in FLOATS else {"links": [most]})
    path = name if name in FLOATS else rf"links\[0\]\.{name}"
    with pytest.raises(FieldError, match=f"^{path}: is .*, must be in "):
        pool_status(message)


def test_a_count_that_is_not_exact_in_json_is_refused() -> None:
    message = admin_pb2.GetPoolStatusResponse(links=[admin_pb2.LinkStatus(hits=2**53)])
    with pytest.raises(
        FieldError, match=r"^links\[0\]\.hits: is 9007199254740992, must be in 0\.\."
    ):
        pool_status(message)


@pytest.mark.parametrize(
    "pool",
    [
        PoolStatus(eligible_sequences=-1e-9, desired_draft_replicas=-1e-9),
        PoolStatus(links=(LinkStatus(address="a:1", state="active", round_trip_seconds=3600.0),)),
        PoolStatus(
            links=(LinkStatus(address="a:1", state="active", channel_bytes_per_second=2e16),)
        ),
    ],
)
def test_the_least_likely_measurements_of_a_target_are_accepted(pool: PoolStatus) -> None:
    assert pool_status(pool_status_response(pool)) == pool


def test_the_longest_reason_of_a_link_is_cut_and_never_refused() -> None:
    link = LinkStatus(address="draft:1", state="lost", reason="x" * 9000)
    received = pool_status(pool_status_response(PoolStatus(links=(link,)))).links[0]
    assert received.reason == "x" * MAX_REASON_CHARACTERS


def test_the_largest_status_of_a_target_of_the_operator_fits_a_message() -> None:
    longest = {field.name: "x" * 253 for field in fields(LinkStatus) if field.type is str}
    numbers = {field.name: 2**32 - 1 for field in fields(LinkStatus) if field.type is int}
    reason = "x" * 1024
    most: dict[str, Any] = longest | numbers | {"state": "lost", "reason": reason}
    links = (LinkStatus(**most),) * 64
    assert pool_status_response(PoolStatus(links=links)).ByteSize() < MAX_ADMIN_BYTES


@given(any_of(DraftStatus))
def test_draft_status_is_unchanged_after_encoding_and_decoding(status: DraftStatus) -> None:
    wire = draft_status_response(status).SerializeToString()
    assert draft_status(speculation_pb2.GetStatusResponse.FromString(wire)) == status
