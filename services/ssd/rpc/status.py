"""One table between errors, gRPC statuses and HTTP statuses, for both directions.

Each status of this product contains an ``ErrorInfo`` of the domain ``ssd``. Its reason names the
row of the table, so the client raises the class that the server raised. Errors of fields also
contain ``BadRequest``; overload contains ``RetryInfo`` and the trailer ``grpc-retry-pushback-ms``.
A status of other origin is converted by its code.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from ssd.errors import (
    AccessError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    FieldError,
    FrameError,
    HandshakeError,
    InternalError,
    LinkError,
    NotAllowedError,
    NotFiniteError,
    NotReadyError,
    OverloadedError,
    PromptSizeError,
    RequestError,
    SSDError,
    TooLargeError,
    UnknownHostError,
    UnknownModelError,
    UnsupportedError,
)

DOMAIN = "ssd"
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID_KEY = "x-request-id"
NOT_READY_RETRY_SECONDS = 1.0
_MESSAGE_BYTES = 900
_NAME_BYTES = 200
"""All trailers of a call must fit 8 KiB, gRPC's default. They contain a message four times: once
percent-encoded (up to three bytes for a byte), three times in the details (base64, 4/3)."""

Code = grpc.StatusCode
Trailers = tuple[tuple[str, str | bytes], ...]


Facts = Mapping[str, str]
"""Attributes of an error, as text."""
Rebuild = Callable[[str, Facts], SSDError]
"""Creates an error from its message and its facts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: the codes of an error class, and how a client rebuilds the error."""

    error: type[Exception]
    code: grpc.StatusCode
    http_status: int
    """Status of the gateway's response."""
    reason: str
    rebuild: Rebuild


def _from_text(kind: type[SSDError]) -> Rebuild:
    return lambda text, _facts: kind(text)


def _from_field(kind: Callable[[str, str], SSDError]) -> Rebuild:
    return lambda _text, facts: kind(facts["field"], facts["description"])


def _context_length(_message: str, facts: Facts) -> SSDError:
    return ContextLengthError(
        int(facts["prompt_tokens"]),
        int(facts["max_tokens"]),
        int(facts["max_model_len"]),
        facts.get("field", "input"),
    )


def _overloaded(message: str, facts: Facts) -> SSDError:
    return OverloadedError(message, float(facts.get("retry_after_seconds", "1")))


_deadline = _from_text(DeadlineError)
_INPUT = Code.INVALID_ARGUMENT
RULES: tuple[Rule, ...] = (
    Rule(PromptSizeError, _INPUT, 400, "PROMPT_SIZE", _from_field(PromptSizeError)),
    Rule(FieldError, _INPUT, 400, "FIELD", _from_field(FieldError)),
    Rule(ContextLengthError, _INPUT, 400, "CONTEXT_LENGTH_EXCEEDED", _context_length),
    Rule(UnknownModelError, Code.NOT_FOUND, 404, "UNKNOWN_MODEL", _from_text(UnknownModelError)),
    Rule(UnsupportedError, Code.UNIMPLEMENTED, 400, "UNSUPPORTED", _from_field(UnsupportedError)),
    Rule(TooLargeError, Code.RESOURCE_EXHAUSTED, 413, "TOO_LARGE", _from_text(TooLargeError)),
    Rule(RequestError, _INPUT, 400, "REQUEST", _from_text(RequestError)),
    Rule(OverloadedError, Code.RESOURCE_EXHAUSTED, 429, "OVERLOADED", _overloaded),
    Rule(NotReadyError, Code.UNAVAILABLE, 503, "NOT_READY", _from_text(NotReadyError)),
    Rule(NotAllowedError, Code.PERMISSION_DENIED, 403, "NOT_ALLOWED", _from_text(NotAllowedError)),
    Rule(AccessError, Code.UNAUTHENTICATED, 401, "ACCESS", _from_text(AccessError)),
    Rule(DeadlineError, Code.DEADLINE_EXCEEDED, 408, "DEADLINE", _deadline),
    Rule(TimeoutError, Code.DEADLINE_EXCEEDED, 408, "DEADLINE", _deadline),
    Rule(CancelledError, Code.CANCELLED, 499, "CANCELLED", _from_text(CancelledError)),
    Rule(FrameError, _INPUT, 400, "FRAME", _from_text(FrameError)),
    Rule(HandshakeError, Code.FAILED_PRECONDITION, 409, "HANDSHAKE", _from_field(HandshakeError)),
    Rule(NotFiniteError, Code.INTERNAL, 500, "NOT_FINITE", _from_text(NotFiniteError)),
    Rule(LinkError, Code.UNAVAILABLE, 503, "LINK", _from_text(LinkError)),
)
"""The first row whose class the error is an instance of applies."""
INTERNAL = Rule(Exception, Code.INTERNAL, 500, "INTERNAL", _from_text(InternalError))
"""Row of all other errors. The caller receives only the request id."""
_BY_REASON = {rule.reason: rule for rule in (*RULES, INTERNAL)}
_FACT_NAMES = ("field", "description", "prompt_tokens", "max_tokens", "max_model_len")


_OUTCOMES: tuple[tuple[type[Exception], str], ...] = (
    (RequestError, "invalid"),
    (OverloadedError, "overloaded"),
    (NotReadyError, "unavailable"),
    (AccessError, "denied"),
    (DeadlineError, "deadline"),
    (TimeoutError, "deadline"),
    (CancelledError, "cancelled"),
)


def rule_of(error: Exception) -> Rule:
    """Return the row of an error."""
    return next((rule for rule in RULES if isinstance(error, rule.error)), INTERNAL)


def outcome_of(error: Exception) -> str:
    """Return the label ``outcome`` of a failed request in ``ssd_requests_total``."""
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "error")


def retry_after_seconds(error: Exception) -> float | None:
    """Return the time after which a retry can succeed, None if a retry cannot."""
    if isinstance(error, OverloadedError):
        return error.retry_after_seconds
    return NOT_READY_RETRY_SECONDS if isinstance(error, NotReadyError) else None


def to_status(error: Exception, request_id: str = "") -> status_pb2.Status:
    """Convert an error to a ``google.rpc.Status`` with details."""
    rule = rule_of(error)
    message = str(error) or type(error).__name__
    if rule is INTERNAL:
        message = f"internal error; see the server's log for request {request_id!r}"
    status = status_pb2.Status(code=rule.code.value[0], message=_cut(message, _MESSAGE_BYTES))
    facts = {name: str(getattr(error, name)) for name in _FACT_NAMES if hasattr(error, name)}
    pause_seconds = retry_after_seconds(error)
    if isinstance(error, OverloadedError):
        facts["retry_after_seconds"] = repr(error.retry_after_seconds)
    if request_id:
        facts["request_id"] = request_id
    facts = {
        name: _cut(text, _MESSAGE_BYTES if name == "description" else _NAME_BYTES)
        for name, text in facts.items()
    }
    if rule is INTERNAL:
        facts = {"request_id": request_id}
    info = error_details_pb2.ErrorInfo(reason=rule.reason, domain=DOMAIN, metadata=facts)
    status.details.add().Pack(info)
    if isinstance(error, FieldError | ContextLengthError):
        bad_request = error_details_pb2.BadRequest()
        description = facts.get("description", status.message)
        bad_request.field_violations.add(field=facts["field"], description=description)
        status.details.add().Pack(bad_request)
    if pause_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(round(pause_seconds * 1e6))
        status.details.add().Pack(retry)
    return status


Answer = tuple[grpc.StatusCode, str, Trailers]
"""Code, message and trailing metadata of a call that failed."""


def status_and_trailers(error: Exception, request_id: str = "") -> Answer:
    """Convert an error to the status that the caller receives."""
    status = to_status(error, request_id)
    trailers: Trailers = ((DETAILS_TRAILER, status.SerializeToString()),)
    pause_seconds = retry_after_seconds(error)
    if pause_seconds is not None:
        trailers += ((PUSHBACK_TRAILER, str(round(pause_seconds * 1000))),)
    if request_id:
        trailers += ((REQUEST_ID_KEY, request_id),)
    return rule_of(error).code, status.message, trailers


_TOO_LONG = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
"""gRPC's message, with the actual and the allowed bytes."""
_BY_CLIENT = "CLIENT: Received"
"""Part of this message if this end refused an answer."""
_NO_SUCH_SERVICE = "Method not found!"
"""gRPC's message for a service that the server does not have."""


def from_rpc_error(error: grpc.RpcError, endpoint: str) -> SSDError:
    """Convert the error of a call; name ``endpoint`` if the status is not of this product."""
    assert isinstance(error, grpc.aio.AioRpcError)
    message = _cut(error.details() or error.code().name, _MESSAGE_BYTES)
    info = _error_info(error.trailing_metadata())
    if info.reason in _BY_REASON:
        try:
            facts = {name: _cut(text, _MESSAGE_BYTES) for name, text in info.metadata.items()}
            return _BY_REASON[info.reason].rebuild(message, facts)
        except (KeyError, ValueError):
            return RequestError(message)
    return _from_code(error.code(), message, endpoint)


def is_answer(error: BaseException | None) -> bool:
    """Whether a server of this product created the status of an error, not gRPC or a proxy."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    return _error_info(error.trailing_metadata()).reason in _BY_REASON


_CONNECT_FAILED = re.compile(
    r".*(?:Failed to connect to remote host|address lookup failed for [^\s]+): ([^\]]*)\]?", re.S
)
"""gRPC's message for a failed connection: nested causes, the last one is that of the system."""
_NOT_GRPC = "Failed parsing HTTP/2"
_TLS_FAILURES = {
    "WRONG_VERSION_NUMBER": "the server does not use TLS",
    "Hostname Verification Check failed": "the server's certificate is not for this name",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not accepted",
    "Tls handshake failed": "the TLS handshake failed",
}
"""Parts of gRPC's message, and the cause of each. The first part that is found applies."""
_TLS_REASON = re.compile(r"OPENSSL_internal:(?:CERTIFICATE_VERIFY_FAILED: )?([^:\]]+)")
"""What the TLS library reports: a description, or its name of the error."""
_NO_SUCH_HOST = "Domain name not found"
_DROPPED = "Socket closed"
"""End of gRPC's message if the server ended the connection during its handshake."""


def _unreachable(message: str, endpoint: str) -> SSDError:
    """Convert UNAVAILABLE to the cause that the system or TLS reported."""
    if _NOT_GRPC in message:
        return NotReadyError(f"{endpoint} cannot be reached: it is not a gRPC port")
    for part, problem in _TLS_FAILURES.items():
        if part in message:
            reason = _TLS_REASON.search(message)
            return AccessError(f"{endpoint}: {problem}" + (f": {reason[1]}" if reason else ""))
    cause = _CONNECT_FAILED.sub(r"\1", message)
    if message.endswith(_DROPPED):
        cause = f"{_DROPPED}; perhaps the port needs TLS or a client certificate"
    # With dns:, a name stands for all ready targets: it has no address until one is ready.
    is_unknown = cause == _NO_SUCH_HOST and not endpoint.startswith("dns:")
    kind = UnknownHostError if is_unknown else NotReadyError
    return kind(f"{endpoint} cannot be reached: {cause}")


def _from_code(code: grpc.StatusCode, message: str, endpoint: str) -> SSDError:
    """Convert a status that gRPC itself or a proxy created."""
    text = f"{endpoint}: {message}"
    if code is Code.UNIMPLEMENTED and message == _NO_SUCH_SERVICE:
        return RequestError(
            f"{endpoint} does not have this service; is it the port of a draft or another process?"
        )
    kinds: dict[grpc.StatusCode, SSDError] = {
        Code.UNAVAILABLE: _unreachable(message, endpoint),
        Code.DEADLINE_EXCEEDED: DeadlineError(f"{endpoint} did not answer within the deadline"),
        # Servers of this product add details. gRPC sends a bare CANCELLED for calls that reach a
        # server while it stops. A call that the client cancels has no status.
        Code.CANCELLED: NotReadyError(f"{endpoint} stopped during the call: {message}"),
        Code.RESOURCE_EXHAUSTED: _exhausted(message, endpoint),
        Code.UNAUTHENTICATED: AccessError(text),
        Code.PERMISSION_DENIED: NotAllowedError(text),
        Code.UNIMPLEMENTED: UnsupportedError(endpoint, message),
        Code.NOT_FOUND: UnknownModelError(text),
        Code.INVALID_ARGUMENT: RequestError(text),
        Code.FAILED_PRECONDITION: RequestError(text),
        Code.OUT_OF_RANGE: RequestError(text),
    }
    return kinds.get(code, InternalError(f"{endpoint}: {code.name}: {message}"))


def _exhausted(message: str, endpoint: str) -> SSDError:
    """Convert RESOURCE_EXHAUSTED: the message is too long, or the server is overloaded."""
    sizes = _TOO_LONG.search(message)
    if sizes is None:
        return OverloadedError(f"{endpoint}: {message}")
    actual, allowed = (f"{int(size):,} bytes" for size in sizes.groups())
    if _BY_CLIENT in message:
        return TooLargeError(f"{endpoint}: the answer has {actual}, allowed are {allowed}")
    # Most prompts with so many tokens are much shorter, so this size is no advice.
    return PromptSizeError(
        "input",
        f"the prompt is too long: the request has {actual}, and no prompt of max_model_len tokens "
        f"has over {allowed}",
    )


def _cut(text: str, num_bytes: int) -> str:
    """Cut a text to this UTF-8 size, between characters."""
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def _error_info(trailers: Any) -> error_details_pb2.ErrorInfo:
    """Return the ``ErrorInfo`` of this product in trailers; empty if there is none."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = status_pb2.Status.FromString(dict(trailers or ()).get(DETAILS_TRAILER, b""))
        is_ours = any(detail.Unpack(info) and info.domain == DOMAIN for detail in status.details)
    except DecodeError:
        is_ours = False
    return info if is_ours else error_details_pb2.ErrorInfo()
