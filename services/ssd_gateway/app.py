"""The ASGI application: routes, pages and error handlers."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from ssd import __version__
from ssd.errors import SSDError
from ssd.observability import log
from ssd.ports import Clock
from ssd_gateway.api import GenerationEndpoint
from ssd_gateway.api_keys import ApiKeys
from ssd_gateway.body import BodyBudget
from ssd_gateway.deadlines import Deadlines
from ssd_gateway.gate import Gate
from ssd_gateway.metrics import REGISTRY
from ssd_gateway.openapi import document
from ssd_gateway.parser import RequestParser
from ssd_gateway.problems import error_object, problem_response
from ssd_gateway.responses import ChatFormat, CompletionFormat, model_object
from ssd_gateway.schemas import ChatRequest, CompletionRequest
from ssd_gateway.settings import GatewaySettings
from ssd_gateway.targets import TargetPool

_PLAYGROUND = Path(__file__).parent / "playground"
_PAGES = {
    "/": ("index.html", "text/html"),
    "/playground/style.css": ("style.css", "text/css"),
    **{
        f"/playground/{name}": (name, "text/javascript")
        for name in ("app.js", "fields.js", "lane.js", "stream.js")
    },
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


_CDN = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/"
_DOCS_HEADERS = _PAGE_HEADERS | {
    # Swagger UI has styles in its elements.
    "content-security-policy": f"default-src 'none'; script-src 'self' {_CDN}; style-src {_CDN} "
    "'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}


def make_app(
    settings: GatewaySettings,
    targets: TargetPool,
    keys: ApiKeys,
    clock: Clock,
    deadlines: Deadlines,
) -> Gate:
    """Return the application."""
    started_at = int(datetime.now(UTC).timestamp())

    async def models(_request: Request) -> Response:
        objects = [
            model_object(info.model, info.max_model_len, started_at)
            for info in targets.models().values()
        ]
        return JSONResponse({"object": "list", "data": objects})

    async def model(request: Request) -> Response:
        info = targets.model(request.path_params["name"])
        return JSONResponse(model_object(info.model, info.max_model_len, started_at))

    async def livez(_request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def readyz(_request: Request) -> Response:
        if deadlines.draining.is_set():
            return PlainTextResponse("draining\n", 503)
        if not targets.num_ready:
            # The log has the causes: anyone reads this page, without a key.
            return PlainTextResponse(f"no target is ready, targets: {targets.num_targets}\n", 503)
        return PlainTextResponse(f"ready, targets: {targets.num_ready}\n")

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    reading = BodyBudget(settings.max_total_body_bytes), RequestParser(), settings.max_body_bytes
    of_all = *reading, deadlines, targets, clock
    chat = GenerationEndpoint(*of_all, ChatRequest, ChatFormat())
    completions = GenerationEndpoint(*of_all, CompletionRequest, CompletionFormat())
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", model),
        Route("/livez", livez),
        Route("/readyz", readyz),
        # vLLM's names.
        Route("/health", readyz),
        _page("/version", json.dumps({"version": __version__}).encode(), "application/json"),
        _page("/openapi.json", json.dumps(document()).encode(), "application/json"),
        _page("/docs", _file("docs.html"), "text/html", _DOCS_HEADERS),
        _page("/docs/docs.js", _file("docs.js"), "text/javascript"),
        Route("/metrics", metrics),
    ]
    if settings.playground:
        routes += [
            _page(path, _file(name), media_type) for path, (name, media_type) in _PAGES.items()
        ]
    handlers = {SSDError: _failed, HTTPException: _not_served, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    # A redirect names http, also behind TLS, so clients would send their prompt in plain text.
    app.router.redirect_slashes = False
    return Gate(app, settings, keys, deadlines)


def _file(name: str) -> bytes:
    return (_PLAYGROUND / name).read_bytes()


def _page(
    path: str, content: bytes, media_type: str, headers: Mapping[str, str] = _PAGE_HEADERS
) -> Route:
    async def page(_request: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, page)


async def _failed(_request: Request, error: Exception) -> Response:
    return problem_response(error, log.request_id.get())


async def _not_served(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not served."""
    status = cast(HTTPException, error).status_code
    target = f"{request.method} {request.url.path[:256]}"
    if status == 405:
        message, code = f"{target}: the method is not allowed", "method_not_allowed"
    else:
        message, code = f"Unknown request URL: {target}", "unknown_url"
    body = error_object(message, "invalid_request_error", code=code)
    return JSONResponse(body, status, dict(cast(HTTPException, error).headers or {}))
