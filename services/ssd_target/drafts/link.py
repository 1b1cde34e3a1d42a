"""A link to a draft and its sessions, as the pool uses them."""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from ssd.errors import FrameError, LinkError
from ssd.speculation.table import OutcomeTable, pack_commits
from ssd.telemetry import COMMIT_TO_TABLE_SECONDS, STALE_FRAMES_TOTAL
from ssd.transport.frame import Frame, FrameKind, TensorChannel
from ssd.types import (
    CloseSession,
    Commit,
    OpenSession,
    SequenceId,
    TargetMessage,
    Welcome,
)
from ssd_target.decoding.round_result import LookupCounts
from ssd_target.drafts.circuit_breaker import CircuitBreaker
from ssd_target.drafts.round_trip import RoundTrip
from ssd_target.drafts.sustainable_sessions import BatchTimes
from ssd_target.drafts.table_deadline import TableDeadline


class LinkState(StrEnum):
    """State of a link; the values are those of ``LinkState`` in ``admin.proto``."""

    CONNECTING = "connecting"
    ACTIVE = "active"
    QUARANTINED = "quarantined"
    """The circuit breaker is open."""
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True)
class Session:
    """The state of a session on the target.

    Guarded by the lock of ``DraftPool``.
    """

    number: int
    sequence_id: SequenceId
    link: "DraftLink"
    base_len: int
    """Committed tokens before the current round. Only a table with this base length is used."""
    requested_at: float
    """When the commit or opening was sent that the next table answers."""
    open_by: float
    """When a session without any table is closed."""
    table: OutcomeTable | None = None
    """The table of the current round."""
    table_seconds: float | None = None
    """Time from the commit to ``table``. None for the first table, which includes the prefill."""
    is_open: bool = False
    """Whether the first table has arrived. Rounds do not wait for a session that is opening."""

    def receive(self, table: OutcomeTable, now: float) -> bool:
        """Keep the table of the current round; False if the table is stale."""
        was_open, self.is_open = self.is_open, True
        if table.base_len != self.base_len or self.table is not None:
            return False
        self.table = table
        self.table_seconds = now - self.requested_at if was_open else None
        return True

    def begin_round(self, base_len: int, now: float) -> None:
        """Expect the table of the next round, whose commit is sent now."""
        self.base_len = base_len
        self.table = None
        self.requested_at = now
        self.link.num_due_tables += 1

    def seconds_so_far(self, now: float) -> float | None:
        """Time from the commit to the table, or to now; None for the first table."""
        return now - self.requested_at if self.table is None else self.table_seconds


class DraftLink:
    """A link to a draft after its handshake.

    Changed under the lock of ``DraftPool``; ``round_trip`` and ``newest_frame`` on the asyncio
    loop. Any thread may read single values for a status. Control messages travel through
    ``send_control`` and frames through the channel. Neither blocks.
    """

    def __init__(
        self,
        name: str,
        welcome: Welcome,
        channel: TensorChannel,
        send_control: Callable[[TargetMessage], None],
    ) -> None:
        self.name = name
        self.epoch = welcome.epoch
        self.peer = welcome.peer
        self.max_sessions = max(1, welcome.max_sessions)
        self.max_len = welcome.max_len
        """Its sessions are shorter than this many tokens; 0 is unknown."""
        self.counts = LookupCounts()
        self.round_trip = RoundTrip()
        self.batch_times = BatchTimes()
        self.table_deadline = TableDeadline()
        self.circuit_breaker = CircuitBreaker()
        self.sessions: dict[int, Session] = {}
        """By number; ``SessionRegistry`` adds and removes them."""
        self.peak_sessions = 0
        """Maximum number of sessions at one time so far. The draft never has more."""
        self.num_due_tables = 0
        """Tables that openings and commits have requested and that have not arrived."""
        self.no_openings_before = 0.0
        """Time of the next opening, after one that was refused or not answered."""
        self.is_draining = False
        self.lost_because: str | None = None
        self._channel = channel
        self._send_control = send_control
        self._session_numbers = itertools.count(1)
        self._frame_numbers = itertools.count(1)
        self.newest_frame = 0
        """Number of the newest frame of the draft. A frame with no higher number is stale."""

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Receive the frames of the draft from now on; see ``TensorChannel``."""
        self._channel.start(on_frame, on_lost)

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()

    @property
    def transport(self) -> str:
        """How its bytes travel."""
        return self._channel.transport

    def state(self, now: float) -> LinkState:
        """Return the state of the link."""
        if self.lost_because is not None:
            return LinkState.LOST
        if self.is_draining:
            return LinkState.DRAINING
        if self.circuit_breaker.is_open(now):
            return LinkState.QUARANTINED
        return LinkState.ACTIVE

    def next_session_number(self) -> int:
        """Return a number that was never used on this link."""
        return next(self._session_numbers)

    def overdue_openings(self, now: float) -> list[Session]:
        """Return all sessions that are opening, if one of them has exceeded its time."""
        opening = [each for each in self.sessions.values() if not each.is_open]
        return opening if any(now > each.open_by for each in opening) else []

    def receive(self, tables: Collection[OutcomeTable], now: float) -> None:
        """Keep the tables that match a session and its round; count the others as stale.

        Raises:
            FrameError: more tables than were requested, or a table of a later round.
        """
        self.num_due_tables -= len(tables)
        if self.num_due_tables < 0:
            raise FrameError(f"a draft sent {-self.num_due_tables} tables that were not requested")
        table_seconds: list[float] = []
        for table in tables:
            session = self.sessions.get(table.session)
            if session is not None and table.base_len > session.base_len:
                raise FrameError(
                    f"a table has base length {table.base_len}, the newest commit has "
                    f"{session.base_len}"
                )
            if session is None or not session.receive(table, now):
                STALE_FRAMES_TOTAL.inc()
            elif session.table_seconds is not None:
                table_seconds.append(session.table_seconds)
                COMMIT_TO_TABLE_SECONDS.observe(session.table_seconds)
        self.table_deadline.observe(table_seconds)

    def note_round(self, sessions: Collection[Session], now: float) -> bool:
        """Note the tables of a round; True if at least one of its open sessions has one."""
        seconds = [each.seconds_so_far(now) for each in sessions]
        if known := [each for each in seconds if each is not None]:
            self.batch_times.note(known)
        any_in_time = any(each.table is not None for each in sessions)
        if not any_in_time:
            self.table_deadline.reset()
        return any_in_time

    def send_opening(self, opening: OpenSession) -> None:
        """Request a session.

        Raises:
            LinkError: the link is closed or its outbox is full.
        """
        self._send_control(opening)

    def send_closing(self, number: int) -> None:
        """Close a session on the draft. A failure marks the link as lost."""
        try:
            self._send_control(CloseSession(number))
        except LinkError as error:
            self.lost_because = self.lost_because or str(error)

    def send_commits(self, commits: Collection[Commit], lookahead: int) -> None:
        """Send the commits of a round in one frame.

        Raises:
            LinkError: the link is closed or its outbox is full.
        """
        rows_RW = pack_commits(commits, lookahead)
        number = next(self._frame_numbers)
        self._channel.send(Frame(FrameKind.COMMITS, self.epoch, number, rows_RW))
