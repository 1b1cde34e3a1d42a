"""What every request to vLLM's server passes: its token, and the newest certificate of the server.

*Decision*: a middleware. *Because* vLLM has ``--middleware`` for it, and the files of a Secret may
change at any time. *Not chosen*: ``--api-key``, whose keys are arguments of the process, are read
once, and protect no page outside ``/v1`` (``/tokenize``, ``/invocations``);
``--enable-ssl-refresh``, which watches the files behind the kubelet's links and sees only the first
change of a Secret, because the kubelet deletes them (tried with vLLM 0.32). *Revisit when* both
follow a Secret.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ssd.errors import SettingsError
from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY
from ssd.rpc.credentials import AcceptedTokens, Reloaded, TlsFiles, bearer_token
from ssd_vllm.settings import read

OPEN_PAGES = frozenset({"/health", "/metrics"})
"""The kubelet and Prometheus have no token."""
_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], _Send], Awaitable[None]]


class Gate:
    """ASGI middleware, which vLLM constructs. Asyncio loop.

    The files are read at the first request. One that is missing or invalid then fails all
    requests; ``python -m ssd_vllm`` has checked that of the tokens, and vLLM its certificate.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._has_read = False
        self._tokens: AcceptedTokens | None = None
        self._certificate: Reloaded[None] | None = None

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: _Send
    ) -> None:
        """Serve a request, or refuse it with 401."""
        if scope["type"] in ("http", "websocket"):
            self._read(scope["app"].state)
            if self._certificate is not None:
                # Probes are requests too, so a new certificate is in use within seconds.
                self._certificate.current()
            if not self._is_admitted(scope):
                await _refuse(scope["type"], send)
                return
        await self._app(scope, receive, send)

    def _read(self, state: Any) -> None:
        if self._has_read:
            return
        self._tokens = read(state.vllm_config.additional_config).tokens()
        config = state.server.config
        if config.ssl is not None:
            self._certificate = _certificate_of(config)
        self._has_read = True

    def _is_admitted(self, scope: _Message) -> bool:
        # OPTIONS asks which origins of pages in browsers are allowed, and carries no token.
        is_open = scope["path"] in OPEN_PAGES or scope.get("method") == "OPTIONS"
        if self._tokens is None or is_open:
            return True
        headers = (
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"]
        )
        return self._tokens.accept(bearer_token(tuple(headers)))


def _certificate_of(config: Any) -> Reloaded[None]:
    """Return the certificate of uvicorn's configuration, which new connections use."""
    # One file may have both.
    key = config.ssl_keyfile or config.ssl_certfile
    files = TlsFiles(certificate=config.ssl_certfile, key=key)

    def load() -> None:
        # Read first: otherwise half of a new pair would stay in the context.
        expires_at = files.read().expires_at
        try:
            config.ssl.load_cert_chain(files.certificate, files.key)
        except OSError as error:
            raise SettingsError(f"{files.certificate}: {error}") from error
        TLS_CERTIFICATE_EXPIRY.labels(role="server").set(expires_at)

    return Reloaded(files.paths, load)


async def _refuse(kind: str, send: _Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = {
        "message": "no token, or a wrong one; send the header 'Authorization: Bearer TOKEN'",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
