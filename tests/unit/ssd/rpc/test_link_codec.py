import math
from dataclasses import replace

import pytest
from tests import handshake

from ssd.errors import FrameError, HandshakeError, LinkError
from ssd.rpc.link_codec import (
    OpeningBounds,
    draft_message,
    speculate_request,
    speculate_response,
    target_message,
)
from ssd.types import (
    ChannelState,
    CloseSession,
    DraftMessage,
    Draining,
    Heartbeat,
    LinkSettings,
    OpenSession,
    Peer,
    Rendezvous,
    SessionRefused,
    TargetMessage,
)
from ssd.v1 import speculation_pb2 as pb2

HELLO = replace(handshake.HELLO, peer=Peer(pod="p", node="n", cell="c"), backends=("nccl", "gloo"))
WELCOME = replace(
    handshake.WELCOME,
    peer=Peer(pod="d", weights_fingerprint="sha256:d"),
    max_len=4096,
    backend="gloo",
    backend_refusal="none",
)
OPENING = OpenSession(
    session=1,
    token_ids=(5, 6),
    seed=2**64 - 1,
    choice=2,
    temperature=0.5,
    max_len=64,
    top_k=20,
    min_p=0.25,
)


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        OPENING,
        CloseSession(9),
        LinkSettings(fan_out_policy="uniform"),
        Heartbeat(),
        Heartbeat(nonce=2**64 - 1),
        Rendezvous("0/1", b"\x00\xff"),
        ChannelState("gloo does not connect"),
        b"\x00\xff",
    ],
    ids=lambda each: type(each).__name__,
)
def test_target_messages_are_unchanged_after_encoding_and_decoding(message: TargetMessage) -> None:
    wire = speculate_request(message).SerializeToString()
    assert target_message(pb2.SpeculateRequest.FromString(wire)) == message


@pytest.mark.parametrize(
    "message",
    [
        WELCOME,
        SessionRefused(4, "max_sessions"),
        Draining(),
        Heartbeat(),
        Heartbeat(echo=7),
        Heartbeat(batch_seconds={1: 0.25, 256: 1e-9}),
        Rendezvous("0/1", b""),
        ChannelState(),
        b"",
    ],
    ids=lambda each: type(each).__name__,
)
def test_draft_messages_are_unchanged_after_encoding_and_decoding(message: DraftMessage) -> None:
    wire = speculate_response(message).SerializeToString()
    assert draft_message(pb2.SpeculateResponse.FromString(wire)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("vocab_size", 0), ("vocab_size", 2**31), ("max_sessions", 2**31)),
        *(("lookahead", 0), ("lookahead", 17), ("branches", 0), ("branches", 129)),
        *(("epoch", 0), ("epoch", 2**31)),
    ],
)
def test_a_handshake_out_of_bounds_is_refused_with_its_field(field: str, value: int) -> None:
    request, response = speculate_request(HELLO), speculate_response(WELCOME)
    if hasattr(request.hello, field):
        setattr(request.hello, field, value)
        with pytest.raises(HandshakeError) as caught:
            target_message(request)
        assert caught.value.field == field
    if hasattr(response.welcome, field):
        setattr(response.welcome, field, value)
        with pytest.raises(HandshakeError) as caught:
            draft_message(response)
        assert caught.value.field == field


def test_another_wire_version_is_refused_before_any_other_field_is_read() -> None:
    message = pb2.SpeculateRequest(hello=pb2.Hello(wire_version=1))
    with pytest.raises(HandshakeError, match="the target has 1") as caught:
        target_message(message)
    assert caught.value.field == "wire_version"


@pytest.mark.parametrize(
    "rendezvous",
    [
        pb2.Rendezvous(key="", value=b"x"),
        pb2.Rendezvous(key="k" * 257),
        pb2.Rendezvous(key="k", value=b"x" * (64 * 1024 + 1)),
    ],
    ids=["no key", "long key", "long value"],
)
def test_a_rendezvous_entry_out_of_bounds_is_rejected(rendezvous: pb2.Rendezvous) -> None:
    with pytest.raises(FrameError):
        target_message(pb2.SpeculateRequest(rendezvous=rendezvous))
    with pytest.raises(FrameError):
        draft_message(pb2.SpeculateResponse(rendezvous=rendezvous))


def test_a_long_error_of_a_channel_is_sent_up_to_its_bound() -> None:
    wire = speculate_request(ChannelState("x" * 1000)).SerializeToString()
    received = target_message(pb2.SpeculateRequest.FromString(wire))
    assert received == ChannelState("x" * 256)
    state = pb2.ChannelState(error="x" * 257)
    with pytest.raises(FrameError):
        target_message(pb2.SpeculateRequest(channel_state=state))


def test_a_hello_with_too_many_backends_is_refused_with_its_field() -> None:
    message = speculate_request(replace(HELLO, backends=("gloo",) * 9))
    with pytest.raises(HandshakeError, match="backends: has 9 entries, at most 8"):
        target_message(message)


def opening(**changes: object) -> pb2.SpeculateRequest:
    fields = {"session": 1, "token_ids": [5], "temperature": 1.0, "max_len": 8} | changes
    return pb2.SpeculateRequest(open_session=pb2.OpenSession(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        pb2.SpeculateRequest(),
        opening(session=0),
        opening(session=2**31),
        opening(token_ids=[]),
        opening(token_ids=[2**31]),
        opening(temperature=math.nan),
        opening(temperature=-1.0),
        opening(temperature=2.5),
        opening(top_k=2**31),
        opening(min_p=math.nan),
        opening(min_p=math.inf),
        opening(min_p=-0.5),
        opening(min_p=1.5),
        opening(max_len=0),
        opening(token_ids=[1, 2], max_len=1),
        pb2.SpeculateRequest(close_session=pb2.CloseSession(session=0)),
        pb2.SpeculateRequest(link_settings=pb2.LinkSettings(fan_out_policy="x" * 257)),
    ],
)
def test_a_control_message_out_of_bounds_is_a_frame_error(message: pb2.SpeculateRequest) -> None:
    with pytest.raises(FrameError):
        target_message(message)


@pytest.mark.parametrize(
    "message",
    [
        pb2.SpeculateResponse(),
        pb2.SpeculateResponse(session_refused=pb2.SessionRefused(session=0)),
        pb2.SpeculateResponse(session_refused=pb2.SessionRefused(session=1, reason="x" * 257)),
        pb2.SpeculateResponse(heartbeat=pb2.Heartbeat(batch_seconds={0: 1.0})),
        pb2.SpeculateResponse(heartbeat=pb2.Heartbeat(batch_seconds={1: -1.0})),
        pb2.SpeculateResponse(heartbeat=pb2.Heartbeat(batch_seconds={1: math.nan})),
        pb2.SpeculateResponse(heartbeat=pb2.Heartbeat(batch_seconds={1: math.inf})),
        pb2.SpeculateResponse(
            heartbeat=pb2.Heartbeat(batch_seconds=dict.fromkeys(range(1, 258), 1.0))
        ),
    ],
)
def test_a_draft_message_out_of_bounds_is_a_link_error(message: pb2.SpeculateResponse) -> None:
    with pytest.raises(LinkError):
        draft_message(message)


def test_a_long_opening_is_cut_to_max_tokens() -> None:
    bounds = OpeningBounds(max_tokens=10)
    found = target_message(opening(token_ids=[1] * 100_000, max_len=100_000), bounds)
    assert isinstance(found, OpenSession)
    assert found.token_ids == (1,) * 10
    with pytest.raises(FrameError, match="100000 tokens and max_len 99999"):
        target_message(opening(token_ids=[1] * 100_000, max_len=99_999), bounds)


def test_an_opening_with_a_token_outside_the_vocabulary_is_a_frame_error() -> None:
    bounds = OpeningBounds(num_token_ids=10)
    assert target_message(opening(token_ids=[9]), bounds)
    with pytest.raises(FrameError, match=r"token id 10, allowed are 0\.\.9"):
        target_message(opening(token_ids=[1, 10]), bounds)
