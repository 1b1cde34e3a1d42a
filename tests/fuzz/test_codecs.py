"""Frames and messages with any content: a value within its bounds, or the one error for it."""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.messages import almost, messages, scaled

from ssd.errors import ContextLengthError, FieldError, FrameError, LinkError, RequestError, SSDError
from ssd.rpc.bounds import PromptBounds
from ssd.rpc.call_guard import Undecodable, tolerant
from ssd.rpc.codec import (
    generate_call,
    generate_request,
    generation_chunk,
    model_info,
    speculation_change,
)
from ssd.rpc.link_codec import (
    draft_message,
    speculate_request,
    speculate_response,
    target_message,
)
from ssd.rpc.pool_codec import draft_status, pool_status
from ssd.rpc.status import from_rpc_error
from ssd.speculation.table import row_width, unpack_commits, unpack_tables
from ssd.v1 import admin_pb2, generate_pb2, speculation_pb2

WORDS = st.integers(-(2**31), 2**31 - 1)
SMALL = st.integers(-2, 30)
FIELDS = generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
BOUNDS = PromptBounds(tokens=64, text_bytes=256)


@scaled(40)
@given(st.binary(max_size=400))
def test_any_bytes_are_commits_and_tables_or_a_frame_error(frame: bytes) -> None:
    check_frame(frame, lookahead=3)


@scaled(40)
@given(
    lookahead=st.sampled_from([1, 3, 16]),
    rows=st.lists(
        st.lists(SMALL | WORDS, min_size=row_width(16), max_size=row_width(16)), max_size=4
    ),
    is_of_this_width=st.booleans(),
)
def test_any_rows_are_commits_and_tables_within_their_bounds_or_a_frame_error(
    lookahead: int, rows: list[list[int]], *, is_of_this_width: bool
) -> None:
    width = row_width(lookahead) if is_of_this_width else 8
    rows_RW = np.array([row[:width] for row in rows], dtype="<i4").reshape(len(rows), width)
    check_frame(rows_RW.tobytes(), lookahead)


def check_frame(frame: bytes, lookahead: int) -> None:
    with contextlib.suppress(FrameError):
        for commit in unpack_commits(frame, lookahead, max_commits=4, num_token_ids=30):
            assert 0 <= commit.outcome.accepted <= lookahead
            assert 0 <= commit.outcome.bonus < 30
    with contextlib.suppress(FrameError):
        for table in unpack_tables(frame, lookahead, max_tables=2, branches=3, num_token_ids=30):
            assert 1 <= table.depth <= lookahead
            assert table.tokens_NK.max(initial=0) < 30


@pytest.mark.parametrize(
    ("kind", "read", "write"),
    [
        (speculation_pb2.SpeculateRequest, target_message, speculate_request),
        (speculation_pb2.SpeculateResponse, draft_message, speculate_response),
    ],
    ids=["target", "draft"],
)
@scaled(40)
@given(data=st.data())
def test_any_message_of_a_link_is_a_message_or_a_link_error(
    kind: Any, read: Callable[[Any], Any], write: Callable[[Any], Any], data: st.DataObject
) -> None:
    try:
        found = read(data.draw(messages(kind)))
    except LinkError:
        return
    assert _same(read(write(found)), found)


def _same(one: object, other: object) -> bool:
    """Equality by text, for NaN."""
    return repr(one) == repr(other)


@scaled(50)
@given(messages(generate_pb2.GenerateRequest))
def test_any_request_is_a_call_within_its_bounds_or_a_request_error(message: Any) -> None:
    try:
        call = generate_call(message, 30, BOUNDS)
    except (FieldError, ContextLengthError) as error:
        assert re.split(r"[.[]", error.field)[0] in {*FIELDS, "input"}  # noqa: PT017
        return
    assert generate_call(generate_request(call), 30, BOUNDS) == call
    assert 0.0 <= call.sampling.temperature <= 2.0
    assert (call.sampling.max_tokens or 1) >= 1


@scaled(40)
@given(messages(admin_pb2.SetSpeculationRequest))
def test_any_change_of_speculation_is_a_change_or_a_request_error(message: Any) -> None:
    try:
        change = speculation_change(message)
    except RequestError:
        return
    assert change.draft_deadline_ms is None or 0 < change.draft_deadline_ms <= 60_000


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (generate_pb2.GenerateResponse, generation_chunk),
        (generate_pb2.GetModelInfoResponse, model_info),
        (speculation_pb2.GetStatusResponse, draft_status),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@scaled(15)
@given(data=st.data())
def test_a_client_reads_any_response(
    kind: Any, read: Callable[[Any], object], data: st.DataObject
) -> None:
    read(data.draw(messages(kind)))


@scaled(15)
@given(messages(admin_pb2.GetPoolStatusResponse))
def test_any_status_of_a_target_is_read_or_refused(message: Any) -> None:
    try:
        status = pool_status(message)
    except FieldError:
        return
    assert all(math.isfinite(link.round_trip_seconds) for link in status.links)
    assert math.isfinite(status.eligible_sequences)


@scaled(40)
@given(almost(messages(speculation_pb2.SpeculateRequest)))
def test_any_bytes_are_a_message_or_undecodable(payload: bytes) -> None:
    found = tolerant(speculation_pb2.SpeculateRequest.FromString)(payload)
    if not isinstance(found, Undecodable):
        with contextlib.suppress(LinkError):
            target_message(found)


@scaled(40)
@given(
    code=st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]),
    details=st.text(max_size=60) | st.none(),
    trailer=st.binary(max_size=60),
)
def test_any_status_of_a_server_becomes_an_error_of_this_product(
    code: grpc.StatusCode, details: str | None, trailer: bytes
) -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", trailer))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details, "")
    assert isinstance(from_rpc_error(error, "host:1"), SSDError)
