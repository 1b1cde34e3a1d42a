"""Errors as OpenAI error objects, by the table of ``ssd.rpc.status``."""

import asyncio
import contextlib
import math
import re
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from ssd.errors import (
    AccessError,
    ContextLengthError,
    DeadlineError,
    FieldError,
    NotAllowedError,
    NotReadyError,
    OverloadedError,
    PromptSizeError,
    RequestError,
    UnknownModelError,
    UnsupportedError,
)
from ssd.rpc.status import INTERNAL, retry_after_seconds, rule_of

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (ContextLengthError, "context_length_exceeded"),
    (PromptSizeError, "context_length_exceeded"),
    (UnknownModelError, "model_not_found"),
    (UnsupportedError, "unsupported_value"),
    (FieldError, "invalid_value"),
    (NotAllowedError, "host_not_allowed"),
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
_NAMES = (
    (re.compile(r"(text|token_ids(\.ids)?)\b"), "prompt"),
    (re.compile(r"chat(\.messages)?\b"), "messages"),
    (re.compile(r"sampling\."), ""),
)
"""Beginnings of paths in the target's request that have another name in OpenAI's."""
WITHOUT_NAME = "input"
"""Field of an error that names no field of the body."""
BODY_READ_KEY = "ssd.body_read"
"""Key of the scope of a request whose body was read to its end."""
CLOSE_SECONDS = 1.0
"""Maximum time for which the rest of a request is discarded after its response."""


class MediaTypeError(RequestError):
    """The body of a request is not declared as JSON, or is compressed."""


class SlowBodyError(DeadlineError):
    """The body of a request arrives too slowly."""


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


def problem_response(error: Exception, request_id: str, *, closes: bool = False) -> JSONResponse:
    """Return the response of a request that failed; ``closes`` also ends its connection."""
    status, body = problem(error, request_id)
    headers = {}
    if isinstance(error, DeadlineError) and not isinstance(error, SlowBodyError):
        # OpenAI's clients send a request again after 408: it would run as long each time.
        headers["x-should-retry"] = "false"
    pause_seconds = retry_after_seconds(error)
    if pause_seconds is not None:
        headers = {
            "retry-after": str(max(1, math.ceil(pause_seconds))),
            "retry-after-ms": str(math.ceil(pause_seconds * 1000)),
        }
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if closes or status == 413:
        return _ClosingResponse(body, status, headers | {"connection": "close"})
    return JSONResponse(body, status, headers)


class _ClosingResponse(JSONResponse):
    """A response to a part of a request; the connection closes after it.

    The rest of the request is discarded until the client stops sending, but at most for
    ``CLOSE_SECONDS``: a connection that closes with unread bytes is reset, often before the client
    has read the response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        if scope.get(BODY_READ_KEY):
            await super().__call__(scope, receive, send)
            return

        async def send_part(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await super().__call__(scope, receive, send_part)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _param(error: Exception) -> str | None:
    """Return the path of the field in OpenAI's request that an error names."""
    if isinstance(error, UnknownModelError):
        return "model"
    name = getattr(error, "field", None)
    if not isinstance(name, str) or name == WITHOUT_NAME:
        return None
    for beginning, replacement in _NAMES:
        if beginning.match(name):
            return beginning.sub(replacement, name, count=1)
    return name
