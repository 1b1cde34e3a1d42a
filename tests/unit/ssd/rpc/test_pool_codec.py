from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd.rpc.values import any_of, tuples_of

from ssd.rpc.pool_codec import (
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


@given(any_of(DraftStatus))
def test_draft_status_is_unchanged_after_encoding_and_decoding(status: DraftStatus) -> None:
    wire = draft_status_response(status).SerializeToString()
    assert draft_status(speculation_pb2.GetStatusResponse.FromString(wire)) == status
