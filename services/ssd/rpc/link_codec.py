"""Messages of a link to dataclasses and back, with the bounds of ``speculation.proto`` checked.

A control message that is out of bounds is a ``FrameError``, a greeting a ``HandshakeError`` that
names the field. Whether the two ends fit each other is for those who hold the models to say.
"""

import math

from ssd.errors import FrameError, HandshakeError
from ssd.rpc.bounds import LARGEST_ID, MAX_TEMPERATURE
from ssd.types import (
    DraftMessage,
    Draining,
    Heartbeat,
    LinkHello,
    LinkPolicy,
    LinkWelcome,
    Peer,
    SessionClosing,
    SessionOpening,
    SessionRefusal,
    TargetMessage,
)
from ssd.v1 import speculation_pb2, types_pb2

MAX_LOOKAHEAD = 16
MAX_BRANCHES = 128
MAX_WORD_CHARACTERS = 256
"""Of a name, a reason, a fingerprint."""

_Request = speculation_pb2.SpeculateRequest
_Response = speculation_pb2.SpeculateResponse


def speculate_request(message: TargetMessage | bytes) -> speculation_pb2.SpeculateRequest:
    """The wire form of what a target says."""
    match message:
        case bytes():
            return _Request(frame=message)
        case Heartbeat(nonce, echo):
            return _Request(heartbeat=speculation_pb2.Heartbeat(nonce=nonce, echo=echo))
        case SessionOpening():
            return _Request(
                open_session=speculation_pb2.OpenSession(
                    session=message.session,
                    token_ids=message.token_ids,
                    seed=message.seed,
                    choice=message.choice,
                    temperature=message.temperature,
                    max_len=message.max_len,
                )
            )
        case SessionClosing(session):
            return _Request(close_session=speculation_pb2.CloseSession(session=session))
        case LinkPolicy():
            return _Request(
                link_settings=speculation_pb2.LinkSettings(
                    fan_out_policy=message.fan_out_policy,
                    fan_out=message.fan_out,
                )
            )
        case LinkHello():
            return _Request(hello=_hello_message(message))


def target_message(
    message: speculation_pb2.SpeculateRequest, max_tokens: int = LARGEST_ID
) -> TargetMessage | bytes:
    """What a target said.

    Of an opening the first ``max_tokens`` ids are taken and the others never looked at: the
    caller, which sets the bound, refuses an opening that reaches it.

    Raises:
        HandshakeError: a Hello with a field out of bounds.
        FrameError: any other message that is empty or out of bounds.
    """
    match message.WhichOneof("message"):
        case "frame":
            return message.frame
        case "heartbeat":
            return Heartbeat(message.heartbeat.nonce, message.heartbeat.echo)
        case "open_session":
            return _opening(message.open_session, max_tokens)
        case "close_session":
            return SessionClosing(_session(message.close_session.session))
        case "link_settings":
            return _policy(message.link_settings)
        case "hello":
            return _hello(message.hello)
    raise FrameError("a message of the link says nothing, or what this version does not know")


def speculate_response(message: DraftMessage | bytes) -> speculation_pb2.SpeculateResponse:
    """The wire form of what a draft says."""
    match message:
        case bytes():
            return _Response(frame=message)
        case Heartbeat(nonce, echo):
            return _Response(heartbeat=speculation_pb2.Heartbeat(nonce=nonce, echo=echo))
        case Draining():
            return _Response(draining=speculation_pb2.Draining())
        case SessionRefusal(session, reason):
            return _Response(
                session_refused=speculation_pb2.SessionRefused(session=session, reason=reason)
            )
        case LinkWelcome():
            return _Response(
                welcome=speculation_pb2.Welcome(
                    epoch=message.epoch,
                    max_sessions=message.max_sessions,
                    lookahead=message.lookahead,
                    branches=message.branches,
                    peer=_peer_message(message.peer),
                    max_len=message.max_len,
                )
            )


def draft_message(message: speculation_pb2.SpeculateResponse) -> DraftMessage | bytes:
    """What a draft said.

    Raises:
        HandshakeError: a Welcome with a field out of bounds.
        FrameError: any other message that is empty or out of bounds.
    """
    match message.WhichOneof("message"):
        case "frame":
            return message.frame
        case "heartbeat":
            return Heartbeat(message.heartbeat.nonce, message.heartbeat.echo)
        case "draining":
            return Draining()
        case "session_refused":
            refused = message.session_refused
            _check_words(reason=refused.reason)
            return SessionRefusal(_session(refused.session), refused.reason)
        case "welcome":
            return _welcome(message.welcome)
    raise FrameError("a message of the link says nothing, or what this version does not know")


def _hello_message(hello: LinkHello) -> speculation_pb2.Hello:
    return speculation_pb2.Hello(
        wire_version=hello.wire_version,
        vocab_size=hello.vocab_size,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        lookahead=hello.lookahead,
        branches=hello.branches,
        sampling_mode=types_pb2.SAMPLING_MODE_COUPLED,
        channel=hello.channel,
        peer=_peer_message(hello.peer),
        epoch=hello.epoch,
    )


def _hello(message: speculation_pb2.Hello) -> LinkHello:
    _check_greeting("vocab_size", message.vocab_size, 1, LARGEST_ID)
    _check_greeting("lookahead", message.lookahead, 1, MAX_LOOKAHEAD)
    _check_greeting("branches", message.branches, 1, MAX_BRANCHES)
    _check_greeting("epoch", message.epoch, 1, LARGEST_ID)
    if message.sampling_mode not in {
        types_pb2.SAMPLING_MODE_UNSPECIFIED,
        types_pb2.SAMPLING_MODE_COUPLED,
    }:
        raise HandshakeError("sampling_mode", "only coupled sampling is served by this version")
    _check_words(
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        channel=message.channel,
    )
    return LinkHello(
        wire_version=message.wire_version,
        vocab_size=message.vocab_size,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        lookahead=message.lookahead,
        branches=message.branches,
        channel=message.channel,
        epoch=message.epoch,
        peer=_peer(message.peer),
    )


def _welcome(message: speculation_pb2.Welcome) -> LinkWelcome:
    _check_greeting("epoch", message.epoch, 1, LARGEST_ID)
    _check_greeting("max_sessions", message.max_sessions, 0, LARGEST_ID)
    _check_greeting("lookahead", message.lookahead, 1, MAX_LOOKAHEAD)
    _check_greeting("branches", message.branches, 1, MAX_BRANCHES)
    return LinkWelcome(
        epoch=message.epoch,
        max_sessions=message.max_sessions,
        lookahead=message.lookahead,
        branches=message.branches,
        peer=_peer(message.peer),
        max_len=message.max_len,
    )


def _opening(message: speculation_pb2.OpenSession, max_tokens: int) -> SessionOpening:
    session = _session(message.session)
    num_tokens = len(message.token_ids)
    token_ids = tuple(message.token_ids[:max_tokens])
    if not token_ids:
        raise FrameError(f"session {session} opens with no token; 1 at least")
    if max(token_ids) > LARGEST_ID:
        raise FrameError(f"session {session} opens with token id {max(token_ids)}")
    if not (0.0 <= message.temperature <= MAX_TEMPERATURE and math.isfinite(message.temperature)):
        raise FrameError(
            f"session {session} has temperature {message.temperature:g}, must be in "
            f"0..{MAX_TEMPERATURE:g}"
        )
    if not num_tokens <= message.max_len <= LARGEST_ID:
        raise FrameError(
            f"session {session} opens with {num_tokens} tokens and max_len {message.max_len}"
        )
    return SessionOpening(
        session=session,
        token_ids=token_ids,
        seed=message.seed,
        choice=message.choice,
        temperature=message.temperature,
        max_len=message.max_len,
    )


def _policy(message: speculation_pb2.LinkSettings) -> LinkPolicy:
    _check_words(fan_out_policy=message.fan_out_policy)
    num_lengths = len(message.fan_out)
    fan_out = tuple(message.fan_out[: MAX_LOOKAHEAD + 1])
    if num_lengths > MAX_LOOKAHEAD + 1 or sum(fan_out) > MAX_BRANCHES:
        raise FrameError(
            f"fan_out has {num_lengths} entries of sum {sum(fan_out)}, allowed are "
            f"{MAX_LOOKAHEAD + 1} of sum {MAX_BRANCHES}"
        )
    return LinkPolicy(fan_out_policy=message.fan_out_policy, fan_out=fan_out)


def _session(session: int) -> int:
    if not 1 <= session <= LARGEST_ID:
        raise FrameError(f"session {session} is outside 1..{LARGEST_ID}")
    return session


def _check_greeting(field: str, found: int, lowest: int, highest: int) -> None:
    if not lowest <= found <= highest:
        raise HandshakeError(field, f"is {found}, must be in {lowest}..{highest}")


def _check_words(**words: str) -> None:
    for name, word in words.items():
        if len(word) > MAX_WORD_CHARACTERS:
            raise FrameError(
                f"{name} has {len(word)} characters, allowed are {MAX_WORD_CHARACTERS}"
            )


def _peer_message(peer: Peer) -> speculation_pb2.Peer:
    return speculation_pb2.Peer(
        pod=peer.pod,
        node=peer.node,
        cell=peer.cell,
        weights_fingerprint=peer.weights_fingerprint,
    )


def _peer(message: speculation_pb2.Peer) -> Peer:
    _check_words(
        pod=message.pod,
        node=message.node,
        cell=message.cell,
        weights_fingerprint=message.weights_fingerprint,
    )
    return Peer(
        pod=message.pod,
        node=message.node,
        cell=message.cell,
        weights_fingerprint=message.weights_fingerprint,
    )
