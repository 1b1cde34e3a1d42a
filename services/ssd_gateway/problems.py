"""Errors as OpenAI error objects, by the table of ``ssd.rpc.status``."""

import math
import re
from typing import Any

from starlette.responses import JSONResponse

from ssd.errors import (
    AccessError,
    ContextLengthError,
    FieldError,
    NotReadyError,
    OverloadedError,
    RequestError,
    UnknownModelError,
    UnsupportedError,
)
from ssd.rpc.status import INTERNAL, retry_after_seconds, rule_of

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (ContextLengthError, "context_length_exceeded"),
    (UnknownModelError, "model_not_found"),
    (UnsupportedError, "unsupported_value"),
    (FieldError, "invalid_value"),
    (AccessError, "invalid_api_key"),
    (OverloadedError, "rate_limit_exceeded"),
    (NotReadyError, "service_unavailable"),
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_NAMES = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "input": None,
    "sampling.json_schema": "response_format",
}
"""Fields of the target's request that have another name in OpenAI's."""


class MediaTypeError(RequestError):
    """The body of a request is not declared as JSON."""


def problem(error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the error object of an error."""
    rule = rule_of(error)
    status = 415 if isinstance(error, MediaTypeError) else rule.http_status
    message = str(error)
    param = _param(error)
    if isinstance(error, FieldError | UnsupportedError) and param is not None:
        # The target's names of fields have prefixes.
        message = f"{param}: {error.description}"
    if rule is INTERNAL:
        message = f"internal error; see the server's log for request {request_id!r}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = next((code for type_, code in _CODES if isinstance(error, type_)), None)
    return status, error_object(message, kind, param, code)


def error_object(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def problem_response(error: Exception, request_id: str) -> JSONResponse:
    """Return the response of a request that failed."""
    status, body = problem(error, request_id)
    headers = {}
    pause_seconds = retry_after_seconds(error)
    if pause_seconds is not None:
        headers = {
            "retry-after": str(max(1, math.ceil(pause_seconds))),
            "retry-after-ms": str(math.ceil(pause_seconds * 1000)),
        }
    if status == 413:
        # The rest of the body is not read.
        headers["connection"] = "close"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


def _param(error: Exception) -> str | None:
    """Return the path of the field in OpenAI's request that an error names."""
    if isinstance(error, UnknownModelError):
        return "model"
    name = getattr(error, "field", None)
    if not isinstance(name, str):
        return None
    if name in _NAMES:
        return _NAMES[name]
    name = name.removeprefix("sampling.")
    return re.sub(r"^chat(\.messages)?\b", "messages", name)
