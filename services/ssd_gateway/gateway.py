"""The gateway process as one object: it listens, follows the targets, serves and drains."""

import asyncio
import contextlib

from ssd.observability.log import get_logger
from ssd.observability.metrics import TLS_CERTIFICATE_EXPIRY
from ssd.ports import Clock
from ssd.rpc.credentials import ClientCredentials, TlsFiles
from ssd.rpc.listen import join_address
from ssd.tasks import beside
from ssd_gateway.api_keys import ApiKeys
from ssd_gateway.app import make_app
from ssd_gateway.deadlines import Deadlines
from ssd_gateway.http_server import HttpServer, bind
from ssd_gateway.settings import GatewaySettings
from ssd_gateway.targets import TargetPool

_log = get_logger("ssd_gateway")


def credentials_of(settings: GatewaySettings) -> ClientCredentials:
    """Return what the gateway presents to targets, and read its files.

    Raises:
        SettingsError: a file is missing or invalid, or a token would be sent in plain text.
    """
    tls = TlsFiles(
        certificate=settings.target_certificate, key=settings.target_key, ca=settings.target_ca
    )
    credentials = ClientCredentials(
        tls if tls.paths else None,
        settings.target_token_file,
        settings.target_server_name,
        allow_insecure=settings.allow_insecure,
    )
    for address in settings.targets:
        credentials.check(address)
    if settings.target_certificate:
        expiry = TLS_CERTIFICATE_EXPIRY.labels(role="client")
        expiry.set_function(lambda: credentials.expires_at)
    return credentials


class Gateway:
    """Owns all objects of the process. Asyncio loop.

    ``drain`` refuses new requests; ``run`` returns when the running ones have ended.
    """

    def __init__(self, settings: GatewaySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.targets = TargetPool(settings.targets, credentials_of(settings))
        self.port = 0
        """The port in use, once ``is_listening`` is set."""
        self.is_listening = asyncio.Event()
        self._deadlines = Deadlines(settings.request_timeout_seconds)
        keys = ApiKeys(settings.api_keys_file)
        self._app = make_app(settings, self.targets, keys, clock, self._deadlines)
        self._server = HttpServer(self._app, settings)

    def drain(self) -> None:
        """Start the drain. After ``drain_seconds``, the requests that still run end with an error.

        Only the first call has an effect.
        """
        self._deadlines.draining.set()

    async def run(self) -> None:
        """Serve until the drain ends.

        Raises:
            SetupError: the port is in use.
        """
        started_at = self._clock.now()
        with contextlib.closing(bind(self._settings)) as listening:
            self.port = listening.getsockname()[1]
            _log.info("listening", http=join_address(self._settings.host, self.port))
            self.is_listening.set()
            async with self.targets.running(), beside(self._log_ready(started_at), self._end()):
                await self._server.serve([listening])

    async def _end(self) -> None:
        """End the server after the drain. Until then, new requests get an error."""
        await self._deadlines.draining.wait()
        loop = asyncio.get_running_loop()
        end_at = loop.time() + self._settings.drain_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_at):
                await self._app.is_idle.wait()
        self._deadlines.pass_all()
        self._server.end(max(0.0, end_at - loop.time()))

    async def _log_ready(self, started_at: float) -> None:
        await self.targets.wait_ready()
        _log.info("ready", seconds=round(self._clock.now() - started_at, 3))
