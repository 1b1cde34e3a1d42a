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


def test_pool_status_is_unchanged_after_encoding_and_decoding() -> None:
    pool = PoolStatus(
        links=(
            LinkStatus(
                address="a:1",
                state="active",
                epoch=2,
                hits=5,
                round_trip_seconds=0.25,
                draft_pod="demo-draft-0-x",
                draft_node="n1",
                transport="tcp",
                draft_weights="sha256:d",
            ),
            LinkStatus(
                address="c:1",
                state="active",
                channel="collective",
                channel_round_trip_seconds=0.0001,
                channel_bytes_per_second=1e9,
            ),
            LinkStatus(address="d:1", state="active", channel_reason="gloo does not connect"),
            LinkStatus(address="b:1", state="refused", reason="lookahead: 6 here, 8 there"),
        ),
        running_sequences=3,
        waiting_sequences=1,
        hit_rate=0.5,
        eligible_sequences=2.5,
        speculative_sequences=0.0,
        speculating=False,
        tokens_per_round=3.1,
        desired_draft_replicas=1.25,
        efficiency=0.95,
        weights_fingerprint="sha256:t",
        dtype="float32",
        dtype_reason="set explicitly",
    )
    wire = pool_status_response(pool).SerializeToString()
    assert pool_status(admin_pb2.GetPoolStatusResponse.FromString(wire)) == pool


def test_a_target_of_an_earlier_version_reports_no_speculative_sequences() -> None:
    assert pool_status(admin_pb2.GetPoolStatusResponse()).speculative_sequences is None


def test_each_link_state_has_a_name() -> None:
    for name in admin_pb2.LinkState.keys():  # noqa: SIM118 - an enum wrapper, not a dict
        word = name.removeprefix("LINK_STATE_").lower()
        pool = PoolStatus(links=(LinkStatus(address="a", state=word),))
        assert pool_status(pool_status_response(pool)).links[0].state == word


def test_an_unknown_link_state_is_unspecified() -> None:
    message = admin_pb2.GetPoolStatusResponse(
        links=[admin_pb2.LinkStatus(state=77)]  # type: ignore[arg-type]
    )
    assert pool_status(message).links[0].state == "unspecified"


def test_draft_status_is_unchanged_after_encoding_and_decoding() -> None:
    status = DraftStatus(
        model="d",
        sessions=1,
        max_sessions=16,
        links=2,
        draining=True,
        table_seconds=0.5,
        dtype="bfloat16",
        dtype_reason="set explicitly",
    )
    wire = draft_status_response(status).SerializeToString()
    assert draft_status(speculation_pb2.GetStatusResponse.FromString(wire)) == status
