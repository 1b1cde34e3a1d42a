"""The report of each draft address, whether a link to it is up or not."""

from dataclasses import dataclass

from ssd.observability.log import get_logger
from ssd.observability.metrics import LINK_RTT_SECONDS, LINK_STATE, remove_series
from ssd.pool.link import DraftLink, LinkState
from ssd.types import Peer

_log = get_logger(__name__)
_UNKNOWN = Peer()


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The state of one address."""

    address: str
    state: LinkState
    reason: str = ""
    link: DraftLink | None = None
    transport: str = ""
    """How the bytes of a link travel that was refused because of its measurement."""
    round_trip_seconds: float = 0.0
    """This measurement."""
    peer: Peer = _UNKNOWN
    """The draft of this link."""


class LinkReports:
    """The newest report of each address; logs the changes.

    Set on the asyncio loop; read from any thread.
    """

    def __init__(self) -> None:
        self._reports: dict[str, LinkReport] = {}

    def set(self, report: LinkReport) -> None:
        """Replace the report of an address."""
        previous = self._reports.get(report.address)
        self._reports[report.address] = report
        LINK_STATE.labels(draft=report.address).set(report.state is LinkState.ACTIVE)
        if report.state is LinkState.CONNECTING or (
            previous is not None
            and (previous.state, previous.reason) == (report.state, report.reason)
        ):
            return
        _log.info("link", draft=report.address, state=str(report.state), reason=report.reason)

    def remove(self, address: str) -> None:
        """Remove an address and its gauges."""
        del self._reports[address]
        for gauge in (LINK_STATE, LINK_RTT_SECONDS):
            remove_series(gauge, address)

    def link(self, address: str) -> DraftLink | None:
        """Return the link to an address, if one is up."""
        return self._reports[address].link

    def all(self) -> list[LinkReport]:
        """Return one report for each address."""
        return list(self._reports.values())
