import base64
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from ssd import errors
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
from ssd.rpc.status import from_rpc_error, rule_of, status_and_trailers, to_status

Code = grpc.StatusCode
TABLE: list[tuple[Exception, grpc.StatusCode, int]] = [
    (FieldError("sampling.temperature", "is 3, must be in 0..2"), Code.INVALID_ARGUMENT, 400),
    (PromptSizeError("text", "has 71 bytes"), Code.INVALID_ARGUMENT, 400),
    (ContextLengthError(100, 50, 128, "token_ids.ids"), Code.INVALID_ARGUMENT, 400),
    (RequestError("the message cannot be decoded"), Code.INVALID_ARGUMENT, 400),
    (UnknownModelError("model 'x' is not served"), Code.NOT_FOUND, 404),
    (UnsupportedError("sampling.top_k"), Code.UNIMPLEMENTED, 400),
    (OverloadedError("256 requests wait", 2.5), Code.RESOURCE_EXHAUSTED, 429),
    (NotReadyError("the model is loading"), Code.UNAVAILABLE, 503),
    (TooLargeError("17 MiB, allowed are 16"), Code.RESOURCE_EXHAUSTED, 413),
    (AccessError("no token"), Code.UNAUTHENTICATED, 401),
    (NotAllowedError("a link needs the identity of a target"), Code.PERMISSION_DENIED, 403),
    (DeadlineError("600 s have passed"), Code.DEADLINE_EXCEEDED, 408),
    (CancelledError("the target drained"), Code.CANCELLED, 499),
    (FrameError("a frame has 3 bytes"), Code.INVALID_ARGUMENT, 400),
    (HandshakeError("lookahead", "6, not 8"), Code.FAILED_PRECONDITION, 409),
    (LinkError("no heartbeat for 1.5 s"), Code.UNAVAILABLE, 503),
    (NotFiniteError("NaN or infinity at position 3"), Code.INTERNAL, 500),
]


def rpc_error(error: Exception) -> grpc.aio.AioRpcError:
    """The exception of a client's stub if the server ends the call with this error."""
    code, message, trailers = status_and_trailers(error, "r1")
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message, debug_error_string=""
    )


def bare(code: grpc.StatusCode, details: str = "reason") -> grpc.aio.AioRpcError:
    """A status that gRPC creates, without details."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")


def facts_of(error: BaseException) -> dict[str, object]:
    return {name: found for name, found in vars(error).items() if not name.startswith("_")}


@pytest.mark.parametrize(("error", "code", "http"), TABLE, ids=lambda each: type(each).__name__)
def test_each_error_has_a_grpc_code_and_an_http_status(
    error: Exception, code: grpc.StatusCode, http: int
) -> None:
    assert to_status(error).code == code.value[0]
    assert rule_of(error).http_status == http


@pytest.mark.parametrize("error", [row[0] for row in TABLE], ids=lambda each: type(each).__name__)
def test_an_error_is_unchanged_after_encoding_and_decoding(error: Exception) -> None:
    found = from_rpc_error(rpc_error(error), "host:1")
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert facts_of(found) == facts_of(error)


def test_each_error_class_is_in_the_table_or_cannot_reach_a_caller() -> None:
    served = {type(row[0]) for row in TABLE}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, SSDError) and error is not SSDError:
            is_not_sent = issubclass(
                error,
                errors.SetupError
                | errors.InternalError
                | errors.IncompleteTextError
                | errors.UnknownHostError
                | errors.RankError,
            )
            assert error in served or is_not_sent, error


def test_overload_contains_the_retry_delay() -> None:
    error = OverloadedError("full", 2.5)
    status = to_status(error)
    retry = error_details_pb2.RetryInfo()
    assert any(each.Unpack(retry) for each in status.details)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert ("grpc-retry-pushback-ms", "2500") in status_and_trailers(error)[2]


def test_an_internal_error_contains_only_the_request_id() -> None:
    for bug in (ValueError("secret prompt"), SSDError("secret"), errors.WeightsError("secret")):
        status = to_status(bug, "r42")
        assert status.code == Code.INTERNAL.value[0]
        assert "r42" in status.message
        assert "secret" not in str(status)
    assert isinstance(from_rpc_error(rpc_error(KeyError("secret")), "host:1"), InternalError)


def test_a_timeout_in_a_servicer_is_a_deadline_error() -> None:
    assert to_status(TimeoutError()).code == Code.DEADLINE_EXCEEDED.value[0]
    assert isinstance(from_rpc_error(rpc_error(TimeoutError()), "host:1"), DeadlineError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNAVAILABLE, NotReadyError),
        (Code.DEADLINE_EXCEEDED, DeadlineError),
        (Code.CANCELLED, NotReadyError),
        (Code.RESOURCE_EXHAUSTED, OverloadedError),
        (Code.UNAUTHENTICATED, AccessError),
        (Code.PERMISSION_DENIED, NotAllowedError),
        (Code.UNIMPLEMENTED, UnsupportedError),
        (Code.INVALID_ARGUMENT, RequestError),
        (Code.NOT_FOUND, UnknownModelError),
        (Code.INTERNAL, InternalError),
        (Code.DATA_LOSS, InternalError),
    ],
)
def test_a_foreign_status_is_converted_by_its_code(
    code: grpc.StatusCode, kind: type[SSDError]
) -> None:
    found = from_rpc_error(bare(code), "host:1")
    assert type(found) is kind
    assert "host:1" in str(found)


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:1: "
            "Failed to connect to remote host: Connection refused",
            "Connection refused",
        ),
        (
            "errors resolving nowhere:1: [field:hostname lookup error:address lookup failed for "
            "nowhere:1: Domain name not found]",
            "Domain name not found",
        ),
        (
            "connections to all backends failing; last error: UNAVAILABLE: ipv4:127.0.0.1:9090: "
            "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)",
            "it is not a gRPC port",
        ),
        (
            "connections to all backends failing; last error: UNAVAILABLE: ipv4:127.0.0.1:9: "
            "Socket closed",
            "Socket closed; perhaps the port needs TLS or a client certificate",
        ),
    ],
)
def test_a_failed_connection_names_the_cause_and_nothing_of_grpc(details: str, cause: str) -> None:
    found = from_rpc_error(bare(Code.UNAVAILABLE, details), "host:1")
    is_unknown = cause == "Domain name not found"
    assert type(found) is (UnknownHostError if is_unknown else NotReadyError)
    assert str(found) == f"host:1 cannot be reached: {cause}"
    assert type(from_rpc_error(bare(Code.UNAVAILABLE, details), "dns:///x:1")) is NotReadyError


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL "
            "routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer "
            "certificate: OK",
            "the server's certificate is not accepted: unable to get local issuer certificate",
        ),
        (
            "failed with error: Hostname Verification Check failed.",
            "certificate is not for this name",
        ),
        (
            "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1a000064:ECDSA "
            "routines:OPENSSL_internal:BAD_SIGNATURE: certificate signature failure: OK",
            "the TLS handshake failed: BAD_SIGNATURE",
        ),
    ],
)
def test_a_failed_handshake_is_an_error_of_access(details: str, cause: str) -> None:
    found = from_rpc_error(bare(Code.UNAVAILABLE, details), "host:1")
    assert type(found) is AccessError
    assert str(found).endswith(cause)


def test_a_message_that_is_too_long_names_the_prompt_and_both_sizes() -> None:
    details = "SERVER: Received message larger than max (5130017 vs. 354304)"
    found = from_rpc_error(bare(Code.RESOURCE_EXHAUSTED, details), "host:1")
    assert type(found) is PromptSizeError
    assert str(found) == (
        "input: the prompt is too long: the request has 5,130,017 bytes, and no prompt of "
        "max_model_len tokens has over 354,304 bytes"
    )


def test_an_answer_that_is_too_long_is_not_blamed_on_the_prompt() -> None:
    details = "Stream removed (CLIENT: Received message larger than max (1000004 vs. 262144))"
    found = from_rpc_error(bare(Code.RESOURCE_EXHAUSTED, details), "host:1")
    assert type(found) is TooLargeError
    assert str(found) == "host:1: the answer has 1,000,004 bytes, allowed are 262,144 bytes"


def test_undecodable_details_are_ignored() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(Code.UNAVAILABLE, grpc.aio.Metadata(), trailers, "closed", "")
    assert isinstance(from_rpc_error(error, "host:1"), NotReadyError)


@pytest.mark.parametrize("character", ["x", "%", "é", "漢", "😀", "\ud800"])
def test_a_long_message_is_cut_to_fit_a_trailer(character: str) -> None:
    error = FieldError(character * 100_000, character * 100_000)
    _, message, trailers = status_and_trailers(error, "r" * 128)
    num_bytes = len("r" * 128) + len(quote(message, safe=""))
    for _, value in trailers:
        num_bytes += len(base64.b64encode(value) if isinstance(value, bytes) else value)
    assert 4096 < num_bytes < 8192 - 256, "the names of the entries need some of the 8 KiB"


@pytest.mark.parametrize("character", ["é", "漢", "😀"])
def test_a_message_is_cut_between_characters(character: str) -> None:
    for shift in range(len(character.encode())):
        status = to_status(RequestError("x" * shift + character * 5000))
        assert set(status.message) == {"x", character} - ({"x"} if shift == 0 else set())
