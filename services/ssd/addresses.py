"""Addresses of peers: those of the settings, and those behind the DNS names among them."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from ssd.errors import SettingsError
from ssd.observability.log import get_logger
from ssd.rpc.listen import join_address
from ssd.runtime.threads import in_daemon_thread

_log = get_logger(__name__)
DNS_SCHEME = "dns:///"
"""Prefix of an address that is always a DNS name."""
MAX_RESOLVE_SECONDS = 5.0
"""A name server that takes longer counts as one that does not answer."""

Resolver = Callable[[str, int], Awaitable[set[str]]]
"""Host and port to the addresses behind them; raises ``OSError`` if there is no answer."""


def check_address(setting: str, address: str) -> None:
    """Check an address of a setting.

    Raises:
        SettingsError: it has no host, no port 1..65535, or white space.
    """
    host, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
    if any(map(str.isspace, address)):
        raise SettingsError(f"{setting}: {address!r} contains white space; remove it")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"{setting}: {address!r} is not host:port with port 1..65535")


async def resolve(host: str, port: int) -> set[str]:
    """Return the addresses of a name; none if the name has no addresses or does not exist.

    Raises:
        OSError: no name server answers.
    """
    try:
        answers = await in_daemon_thread(
            partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except socket.gaierror as error:
        # The answer of Kubernetes for a Service without ready pods.
        if error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
            return set()
        raise
    return {join_address(str(answer[4][0]), int(answer[4][1])) for answer in answers}


def is_literal(address: str) -> bool:
    """Whether an address is an IP address or ``localhost``, not a DNS name."""
    if address.startswith(DNS_SCHEME):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Addresses:
    """Resolves the DNS names among the configured addresses.

    Asyncio loop. A name keeps its last answer while its name server does not answer.
    """

    def __init__(
        self,
        peers: str,
        configured: tuple[str, ...],
        resolver: Resolver,
        *,
        ignores_empty: bool = False,
    ) -> None:
        """Prepare.

        Args:
            peers: what the addresses are of, for the log: ``drafts``.
            configured: ``host:port``, or ``dns:///host:port``, which is always a name.
            resolver: returns the addresses behind a name.
            ignores_empty: a name also keeps its last answer while it has no addresses.
        """
        self._ignores_empty = ignores_empty
        self._peers = peers
        self._resolver = resolver
        self._literal = {address for address in configured if is_literal(address)}
        names = [address for address in configured if not is_literal(address)]
        self._names = [name.removeprefix(DNS_SCHEME) for name in names]
        self._answers: dict[str, set[str]] = {}
        self._queries: dict[str, asyncio.Future[set[str]]] = {}
        """Queries without an answer so far. A name has at most one."""

    @property
    def has_names(self) -> bool:
        """Whether the addresses can change."""
        return bool(self._names)

    @property
    def without_answer(self) -> set[str]:
        """Names that have had no address so far."""
        return {name for name in self._names if not self._answers.get(name)}

    async def current(self) -> set[str]:
        """Return all addresses, after one query for each name."""
        for name in self._names:
            await self._resolve(name)
        return self._literal.union(*self._answers.values())

    def close(self) -> None:
        """Cancel the queries."""
        for query in self._queries.values():
            query.cancel()

    async def _resolve(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        if name not in self._queries:
            self._queries[name] = asyncio.ensure_future(self._resolver(host, int(port)))
        query = self._queries[name]
        try:
            async with asyncio.timeout(MAX_RESOLVE_SECONDS):
                answer = await asyncio.shield(query)
        except (OSError, UnicodeError) as error:
            _log.info(f"{self._peers}_not_resolved", name=name, reason=str(error) or "no answer")
            if query.done():
                del self._queries[name]
            return
        del self._queries[name]
        if not answer and self._ignores_empty:
            answer = self._answers.get(name, answer)
        if answer != self._answers.get(name):
            _log.info(f"{self._peers}_resolved", name=name, addresses=len(answer))
        self._answers[name] = answer
