"""What an error means over gRPC and over HTTP: one table, read in both directions.

Every status that this product sends carries an ``ErrorInfo`` of the domain ``ssd`` whose reason is
the row of the table, so that a client raises the very class that the server raised. Field errors
carry ``BadRequest`` as well, overload carries ``RetryInfo`` and the trailer
``grpc-retry-pushback-ms``. A status of another origin is read by its code alone.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
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
    NotFiniteError,
    NotReadyError,
    OverloadedError,
    RequestError,
    SSDError,
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
"""All trailers of a call must fit 8 KiB, gRPC's default. A message stands in them four times: once
with up to three bytes a byte (percent), and three times in the details with 4/3 (base64)."""

Code = grpc.StatusCode
Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: how a class of errors is told, and how it is made again from what was told."""

    error: type[Exception]
    code: grpc.StatusCode
    http_status: int
    reason: str
    rebuild: Callable[[str, Mapping[str, str]], SSDError]


def _context_length(_message: str, facts: Mapping[str, str]) -> SSDError:
    return ContextLengthError(
        int(facts["prompt_tokens"]),
        int(facts["max_tokens"]),
        int(facts["max_model_len"]),
        facts.get("field", "input"),
    )


def _overloaded(message: str, facts: Mapping[str, str]) -> SSDError:
    return OverloadedError(message, float(facts.get("retry_after_seconds", "1")))


RULES: tuple[Rule, ...] = (
    Rule(
        FieldError,
        Code.INVALID_ARGUMENT,
        400,
        "FIELD",
        lambda _, facts: FieldError(facts["field"], facts["description"]),
    ),
    Rule(
        ContextLengthError, Code.INVALID_ARGUMENT, 400, "CONTEXT_LENGTH_EXCEEDED", _context_length
    ),
    Rule(
        UnknownModelError,
        Code.NOT_FOUND,
        404,
        "UNKNOWN_MODEL",
        lambda text, _: UnknownModelError(text),
    ),
    Rule(
        UnsupportedError,
        Code.UNIMPLEMENTED,
        400,
        "UNSUPPORTED",
        lambda _, facts: UnsupportedError(facts["field"], facts["description"]),
    ),
    Rule(RequestError, Code.INVALID_ARGUMENT, 400, "REQUEST", lambda text, _: RequestError(text)),
    Rule(OverloadedError, Code.RESOURCE_EXHAUSTED, 429, "OVERLOADED", _overloaded),
    Rule(NotReadyError, Code.UNAVAILABLE, 503, "NOT_READY", lambda text, _: NotReadyError(text)),
    Rule(AccessError, Code.UNAUTHENTICATED, 401, "ACCESS", lambda text, _: AccessError(text)),
    Rule(
        DeadlineError,
        Code.DEADLINE_EXCEEDED,
        408,
        "DEADLINE",
        lambda text, _: DeadlineError(text),
    ),
    Rule(
        TimeoutError, Code.DEADLINE_EXCEEDED, 408, "DEADLINE", lambda text, _: DeadlineError(text)
    ),
    Rule(CancelledError, Code.CANCELLED, 499, "CANCELLED", lambda text, _: CancelledError(text)),
    Rule(FrameError, Code.INVALID_ARGUMENT, 400, "FRAME", lambda text, _: FrameError(text)),
    Rule(
        HandshakeError,
        Code.FAILED_PRECONDITION,
        409,
        "HANDSHAKE",
        lambda _, facts: HandshakeError(facts["field"], facts["description"]),
    ),
    Rule(NotFiniteError, Code.INTERNAL, 500, "NOT_FINITE", lambda text, _: NotFiniteError(text)),
    Rule(LinkError, Code.UNAVAILABLE, 503, "LINK", lambda text, _: LinkError(text)),
)
"""Read from the top: the first class that the error is an instance of."""
INTERNAL = Rule(Exception, Code.INTERNAL, 500, "INTERNAL", lambda text, _: InternalError(text))
"""What stands in no other row: the caller learns the request id and nothing else."""
_BY_REASON = {rule.reason: rule for rule in (*RULES, INTERNAL)}
_FACTS = ("field", "description", "prompt_tokens", "max_tokens", "max_model_len")


_OUTCOMES = {
    Code.INVALID_ARGUMENT: "invalid",
    Code.NOT_FOUND: "invalid",
    Code.UNIMPLEMENTED: "invalid",
    Code.RESOURCE_EXHAUSTED: "overloaded",
    Code.UNAVAILABLE: "unavailable",
    Code.DEADLINE_EXCEEDED: "deadline",
    Code.CANCELLED: "cancelled",
}


def rule_of(error: Exception) -> Rule:
    """The row of an error."""
    return next((rule for rule in RULES if isinstance(error, rule.error)), INTERNAL)


def outcome_of(error: Exception) -> str:
    """How a request ended, as ``ssd_requests_total`` counts it."""
    return _OUTCOMES.get(rule_of(error).code, "error")


def http_status(error: Exception) -> int:
    """HTTP status of an error."""
    return rule_of(error).http_status


def retry_after_seconds(error: Exception) -> float | None:
    """How long a caller should wait before trying again; None where it need not try."""
    if isinstance(error, OverloadedError):
        return error.retry_after_seconds
    return NOT_READY_RETRY_SECONDS if isinstance(error, NotReadyError) else None


def to_status(error: Exception, request_id: str = "") -> status_pb2.Status:
    """The ``google.rpc.Status`` of an error, details included."""
    rule = rule_of(error)
    message = str(error) or type(error).__name__
    if rule is INTERNAL:
        message = f"internal error; the server's log says more about request {request_id!r}"
    status = status_pb2.Status(code=rule.code.value[0], message=_cut(message, _MESSAGE_BYTES))
    facts = {name: str(getattr(error, name)) for name in _FACTS if hasattr(error, name)}
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
    details: list[error_details_pb2.ErrorInfo | error_details_pb2.BadRequest] = [info]
    if isinstance(error, FieldError | ContextLengthError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=facts["field"], description=facts.get("description", status.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    for detail in details:
        _pack(status, detail)
    if pause_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(pause_seconds * 1e6))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def trailers_of(error: Exception, status: status_pb2.Status) -> Trailers:
    """Trailing metadata that goes with a status."""
    trailers: Trailers = ((DETAILS_TRAILER, status.SerializeToString()),)
    pause_seconds = retry_after_seconds(error)
    if pause_seconds is not None:
        trailers += ((PUSHBACK_TRAILER, str(round(pause_seconds * 1000))),)
    return trailers


Answer = tuple[grpc.StatusCode, str, Trailers]
"""Code, message and trailing metadata of a call that failed."""


def status_and_trailers(error: Exception, request_id: str = "") -> Answer:
    """What a caller receives for an error."""
    status = to_status(error, request_id)
    trailers = trailers_of(error, status)
    if request_id:
        trailers += ((REQUEST_ID_KEY, request_id),)
    return rule_of(error).code, status.message, trailers


_TOO_LONG = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
"""The words of gRPC, with the bytes found and the bytes allowed."""
_NO_SUCH_SERVICE = "Method not found!"
"""What gRPC servers say of services they do not have."""


def from_rpc_error(error: grpc.RpcError, endpoint: str) -> SSDError:
    """The error of a failed call; ``endpoint`` is named where the server itself was silent."""
    assert isinstance(error, grpc.aio.AioRpcError)
    message = _cut(error.details() or error.code().name, _MESSAGE_BYTES)
    status = _status_in(cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ()))
    info = _info_in(status) if status is not None else None
    if info is not None and info.reason in _BY_REASON:
        try:
            facts = {name: _cut(text, _MESSAGE_BYTES) for name, text in info.metadata.items()}
            return _BY_REASON[info.reason].rebuild(message, facts)
        except (KeyError, ValueError):
            return RequestError(message)
    return _from_code(error.code(), message, endpoint)


def _from_code(code: grpc.StatusCode, message: str, endpoint: str) -> SSDError:
    """Read a status that gRPC itself or a proxy made."""
    text = f"{endpoint}: {message}"
    if code is Code.UNIMPLEMENTED and message == _NO_SUCH_SERVICE:
        return RequestError(
            f"{endpoint} does not serve this call; is it the port of another process, of a draft?"
        )
    kinds: dict[grpc.StatusCode, SSDError] = {
        Code.UNAVAILABLE: NotReadyError(f"{endpoint} cannot be reached: {message}"),
        Code.DEADLINE_EXCEEDED: DeadlineError(f"{endpoint} did not answer within the deadline"),
        # Ours say why. gRPC says no more than this to calls that reach a server as it stops, and
        # of one that we cancel ourselves there is no status at all.
        Code.CANCELLED: NotReadyError(f"{endpoint} ended the call as it went away: {message}"),
        Code.RESOURCE_EXHAUSTED: _exhausted(message, endpoint),
        Code.UNAUTHENTICATED: AccessError(text),
        Code.PERMISSION_DENIED: AccessError(text),
        Code.UNIMPLEMENTED: UnsupportedError(endpoint, message),
        Code.NOT_FOUND: UnknownModelError(text),
        Code.INVALID_ARGUMENT: RequestError(text),
        Code.FAILED_PRECONDITION: RequestError(text),
        Code.OUT_OF_RANGE: RequestError(text),
    }
    return kinds.get(code, InternalError(f"{endpoint}: {code.name}: {message}"))


def _exhausted(message: str, endpoint: str) -> SSDError:
    """Return the error of RESOURCE_EXHAUSTED: a message that is too long, or a full server."""
    sizes = _TOO_LONG.search(message)
    if sizes is None:
        return OverloadedError(f"{endpoint}: {message}")
    found, allowed = (f"{int(size):,} bytes" for size in sizes.groups())
    return RequestError(
        f"{endpoint}: the prompt is too long: the request has {found}, allowed are {allowed}; "
        "the limit follows from the target's max_model_len"
    )


def _cut(text: str, num_bytes: int) -> str:
    """The beginning of a text, in whole characters of UTF-8."""
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def _pack(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _status_in(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, text in metadata:
        if key == DETAILS_TRAILER and isinstance(text, bytes):
            try:
                return status_pb2.Status.FromString(text)
            except DecodeError:
                return None
    return None


def _info_in(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None
