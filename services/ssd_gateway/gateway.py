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

    ``drain`` refuses new connections; ``run`` returns when the running requests have ended.
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
        app = make_app(settings, self.targets, keys, clock, self._deadlines)
        self._server = HttpServer(app, settings)

    def drain(self) -> None:
        """Start the drain. After ``drain_seconds``, the requests that still run end with an error.

        Only the first call has an effect.
        """
        if self._deadlines.is_draining:
            return
        self._deadlines.is_draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.drain_seconds, self._deadlines.pass_all)
        self._server.should_exit = True

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
            async with self.targets.running(), beside(self._log_ready(started_at)):
                await self._server.serve([listening])

    async def _log_ready(self, started_at: float) -> None:
        await self.targets.wait_ready()
        _log.info("ready", seconds=round(self._clock.now() - started_at, 3))
