"""Link messages to dataclasses and back, within the bounds of ``speculation.proto``.

A control message out of bounds is a ``FrameError``. A Hello or Welcome out of bounds is a
``HandshakeError`` that names the field. The processes check whether target and draft match.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ssd.errors import FrameError, HandshakeError
from ssd.rpc.bounds import LARGEST_ID, MAX_TEMPERATURE
from ssd.rpc.codec import shared_fields
from ssd.types import (
    WIRE_VERSION,
    ChannelState,
    CloseSession,
    DraftMessage,
    Draining,
    Heartbeat,
    Hello,
    LinkSettings,
    OpenSession,
    Peer,
    Rendezvous,
    SessionRefused,
    TargetMessage,
    Welcome,
)
from ssd.v1 import speculation_pb2

MAX_LOOKAHEAD = 16
MAX_BRANCHES = 128
MAX_WORD_CHARACTERS = 256
"""Maximum length of a name, a reason or a fingerprint."""
MAX_BACKENDS = 8
MAX_BATCH_SIZES = 256
"""The largest number of sessions of a draft."""
MAX_RENDEZVOUS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class OpeningBounds:
    """What an OpenSession may have."""

    max_tokens: int = LARGEST_ID
    """Only so many token ids are copied; the draft refuses a session that reaches this number."""
    num_token_ids: int = LARGEST_ID + 1
    """Token ids are below."""


NO_BOUNDS = OpeningBounds()
_Request = speculation_pb2.SpeculateRequest
_Response = speculation_pb2.SpeculateResponse
_FIELDS = {
    field.message_type.name: field.name
    for stream in (_Request, _Response)
    for field in stream.DESCRIPTOR.fields
    if field.message_type is not None
}
"""Field of a stream by the name of its message. The dataclass has the same name."""


def speculate_request(message: TargetMessage | bytes) -> speculation_pb2.SpeculateRequest:
    """Convert a message of a target, or its commits, to its wire form."""
    return _Request(**_field("commits", message))


def target_message(
    message: speculation_pb2.SpeculateRequest, bounds: OpeningBounds = NO_BOUNDS
) -> TargetMessage | bytes:
    """Convert the wire form of a target's message.

    Raises:
        HandshakeError: a Hello with a field out of bounds.
        FrameError: any other message that is empty or out of bounds.
    """
    match message.WhichOneof("message"):
        case "commits":
            return message.commits
        case "open_session":
            return _opening(message.open_session, bounds)
        case "close_session":
            return CloseSession(_session(message.close_session.session))
        case "link_settings":
            return _settings(message.link_settings)
        case "hello":
            return _hello(message.hello)
    return _common_message(message)


def speculate_response(message: DraftMessage | bytes) -> speculation_pb2.SpeculateResponse:
    """Convert a message of a draft, or its tables, to its wire form."""
    return _Response(**_field("tables", message))


def draft_message(message: speculation_pb2.SpeculateResponse) -> DraftMessage | bytes:
    """Convert the wire form of a draft's message.

    Raises:
        HandshakeError: a Welcome with a field out of bounds.
        FrameError: any other message that is empty or out of bounds.
    """
    match message.WhichOneof("message"):
        case "tables":
            return message.tables
        case "draining":
            return Draining()
        case "session_refused":
            refused = message.session_refused
            _check_words(reason=refused.reason)
            return SessionRefused(_session(refused.session), refused.reason)
        case "welcome":
            return _welcome(message.welcome)
    return _common_message(message)


def _hello(message: speculation_pb2.Hello) -> Hello:
    # First: another version may have other fields and bounds.
    if message.wire_version != WIRE_VERSION:
        raise HandshakeError(
            "wire_version",
            f"this draft has {WIRE_VERSION}, the target has {message.wire_version}",
        )
    _check_handshake("vocab_size", message.vocab_size, 1, LARGEST_ID)
    _check_handshake("lookahead", message.lookahead, 1, MAX_LOOKAHEAD)
    _check_handshake("branches", message.branches, 1, MAX_BRANCHES)
    _check_handshake("epoch", message.epoch, 1, LARGEST_ID)
    _check_words(tokenizer_fingerprint=message.tokenizer_fingerprint)
    num_backends = len(message.backends)
    if num_backends > MAX_BACKENDS:
        raise HandshakeError("backends", f"has {num_backends} entries, at most {MAX_BACKENDS}")
    for backend in message.backends:
        _check_words(backend=backend)
    fields = shared_fields(message, Hello, "peer", "backends")
    return Hello(peer=_peer(message.peer), backends=tuple(message.backends), **fields)


def _welcome(message: speculation_pb2.Welcome) -> Welcome:
    _check_handshake("epoch", message.epoch, 1, LARGEST_ID)
    _check_handshake("max_sessions", message.max_sessions, 0, LARGEST_ID)
    _check_handshake("lookahead", message.lookahead, 1, MAX_LOOKAHEAD)
    _check_handshake("branches", message.branches, 1, MAX_BRANCHES)
    _check_words(backend=message.backend, backend_refusal=message.backend_refusal)
    _check_words(tokenizer_fingerprint=message.tokenizer_fingerprint)
    return Welcome(peer=_peer(message.peer), **shared_fields(message, Welcome, "peer"))


def _field(of_frames: str, message: TargetMessage | DraftMessage | bytes) -> dict[str, Any]:
    """Return a message as a field of its stream; ``of_frames`` is the field of a frame."""
    if isinstance(message, bytes):
        return {of_frames: message}
    name = type(message).__name__
    values = shared_fields(message, type(message))
    if isinstance(message, Hello | Welcome):
        values["peer"] = asdict(message.peer)
    elif isinstance(message, ChannelState):
        values["error"] = message.error[:MAX_WORD_CHARACTERS]
    return {_FIELDS[name]: getattr(speculation_pb2, name)(**values)}


def _common_message(
    message: speculation_pb2.SpeculateRequest | speculation_pb2.SpeculateResponse,
) -> Heartbeat | Rendezvous | ChannelState:
    """Convert a message that both ends send; raises as ``target_message``."""
    match message.WhichOneof("message"):
        case "heartbeat":
            return _heartbeat(message.heartbeat)
        case "rendezvous":
            return _rendezvous(message.rendezvous)
        case "channel_state":
            _check_words(error=message.channel_state.error)
            return ChannelState(message.channel_state.error)
    raise FrameError(
        "a message of the link is empty, or of a kind that this version does not support"
    )


def _heartbeat(message: speculation_pb2.Heartbeat) -> Heartbeat:
    batch_seconds = dict(message.batch_seconds)
    if len(batch_seconds) > MAX_BATCH_SIZES:
        raise FrameError(
            f"batch_seconds has {len(batch_seconds)} entries, allowed are {MAX_BATCH_SIZES}"
        )
    for count, seconds in batch_seconds.items():
        if count < 1 or not 0.0 <= seconds < math.inf:
            raise FrameError(
                f"batch_seconds has {seconds:g} s for {count} sessions, must be at least 0 s for "
                "at least 1"
            )
    return Heartbeat(message.nonce, message.echo, batch_seconds)


def _rendezvous(message: speculation_pb2.Rendezvous) -> Rendezvous:
    _check_words(key=message.key)
    num_bytes = len(message.value)
    if not message.key or num_bytes > MAX_RENDEZVOUS_BYTES:
        raise FrameError(
            f"the rendezvous entry {message.key!r} has {num_bytes} bytes, allowed are a key and "
            f"{MAX_RENDEZVOUS_BYTES} bytes"
        )
    return Rendezvous(message.key, message.value)


def _opening(message: speculation_pb2.OpenSession, bounds: OpeningBounds) -> OpenSession:
    session = _session(message.session)
    num_tokens = len(message.token_ids)
    token_ids = tuple(message.token_ids[: bounds.max_tokens])
    if not token_ids:
        raise FrameError(f"OpenSession of session {session} has no token; at least 1 is required")
    if max(token_ids) >= bounds.num_token_ids:
        raise FrameError(
            f"OpenSession of session {session} has token id {max(token_ids)}, allowed are "
            f"0..{bounds.num_token_ids - 1}"
        )
    if not (0.0 <= message.temperature <= MAX_TEMPERATURE and math.isfinite(message.temperature)):
        raise FrameError(
            f"session {session} has temperature {message.temperature:g}, must be in "
            f"0..{MAX_TEMPERATURE:g}"
        )
    if message.top_k > LARGEST_ID:
        raise FrameError(f"session {session} has top_k {message.top_k}, must be in 0..{LARGEST_ID}")
    if not 0.0 <= message.min_p <= 1.0:
        raise FrameError(f"session {session} has min_p {message.min_p:g}, must be in 0..1")
    if not num_tokens <= message.max_len <= LARGEST_ID:
        raise FrameError(
            f"OpenSession of session {session} has {num_tokens} tokens and max_len "
            f"{message.max_len}"
        )
    return OpenSession(token_ids=token_ids, **shared_fields(message, OpenSession, "token_ids"))


def _settings(message: speculation_pb2.LinkSettings) -> LinkSettings:
    _check_words(fan_out_policy=message.fan_out_policy)
    return LinkSettings(fan_out_policy=message.fan_out_policy)


def _session(session: int) -> int:
    if not 1 <= session <= LARGEST_ID:
        raise FrameError(f"session {session} is outside 1..{LARGEST_ID}")
    return session


def _check_handshake(field: str, number: int, lowest: int, highest: int) -> None:
    if not lowest <= number <= highest:
        raise HandshakeError(field, f"is {number}, must be in {lowest}..{highest}")


def _check_words(**words: str) -> None:
    for name, word in words.items():
        if len(word) > MAX_WORD_CHARACTERS:
            raise FrameError(
                f"{name} has {len(word)} characters, allowed are {MAX_WORD_CHARACTERS}"
            )


def _peer(message: speculation_pb2.Peer) -> Peer:
    fields = shared_fields(message, Peer)
    _check_words(**fields)
    return Peer(**fields)
