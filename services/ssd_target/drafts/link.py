"""One link to a draft while it is up, and the sessions it carries."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ssd.errors import LinkError
from ssd.speculation.table import OutcomeTable, pack_commits
from ssd.transport.frame import Frame, FrameKind, TensorChannel
from ssd.types import (
    Commit,
    LinkWelcome,
    LookupResult,
    SequenceId,
    SessionClosing,
    SessionOpening,
    TargetMessage,
)
from ssd_target.drafts.link_health import CircuitBreaker, TableDeadline
from ssd_target.drafts.round_trip import RoundTrip
from ssd_target.drafts.sustainable_sessions import TablePace


class LinkState(StrEnum):
    """State of a link."""

    CONNECTING = "connecting"
    ACTIVE = "active"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True)
class Session:
    """A draft's copy of one sequence, as the target sees it. Guarded by the pool's lock."""

    session: int
    sequence_id: SequenceId
    link: "DraftLink"
    base_len: int
    """Committed tokens before the round in progress: the only table that fits has the same."""
    asked_at: float
    """When the commit or the opening left that asks for this table."""
    open_by: float = float("inf")
    """When a session that no table has opened is given up."""
    table: OutcomeTable | None = None
    table_seconds: float | None = None
    """How long the table took; None for the first, which waited for the prompt's prefill."""
    is_opened: bool = False
    """Whether a first table has come; before, nobody waits for it."""

    def seconds_taken(self, now: float) -> float | None:
        """How long the draft took for the table, or takes already; None if that says nothing."""
        return now - self.asked_at if self.table is None else self.table_seconds


@dataclass(slots=True)
class LinkCounts:
    """Rounds by result, since the link came up or the process began."""

    hits: int = 0
    misses: int = 0
    late: int = 0

    def note(self, result: LookupResult) -> None:
        """Count one round of one sequence."""
        self.hits += result is LookupResult.HIT
        self.misses += result is LookupResult.MISS
        self.late += result is LookupResult.LATE

    @property
    def hit_rate(self) -> float:
        """Hits over rounds that needed a table; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses + self.late)


class DraftLink:
    """A link to a draft after its handshake.

    Guarded by the lock of ``DraftPool``; ``round_trip`` belongs to the asyncio loop. Control
    messages travel through ``send_control`` and frames through the channel. Neither blocks.
    """

    def __init__(
        self,
        name: str,
        welcome: LinkWelcome,
        channel: TensorChannel,
        send_control: Callable[[TargetMessage], None],
    ) -> None:
        self.name = name
        self.epoch = welcome.epoch
        self.peer = welcome.peer
        self.max_sessions = max(1, welcome.max_sessions)
        self.max_len = welcome.max_len
        """Its sessions are shorter than this many tokens; 0 is unknown."""
        self.counts = LinkCounts()
        self.round_trip = RoundTrip()
        self.sessions: dict[int, Session] = {}
        self.table_pace = TablePace()
        self.table_deadline = TableDeadline(is_adaptive=False)
        self.circuit_breaker = CircuitBreaker(is_enabled=True)
        self.not_asked_until = 0.0
        """When it may be offered a session again, after one that came to nothing."""
        self.most_sessions = 0
        """Most sessions that it has carried at a time: its draft never keeps more."""
        self.tables_due = 0
        """Tables requested by openings and commits, less those received."""
        self.is_draining = False
        self.lost_because: str | None = None
        self._channel = channel
        self._send_control = send_control
        self._session_ids = itertools.count(1)
        self._sequence_numbers = itertools.count(1)

    def state(self, now: float) -> LinkState:
        """What the link is good for."""
        if self.lost_because is not None:
            return LinkState.LOST
        if self.is_draining:
            return LinkState.DRAINING
        if self.circuit_breaker.is_active(now):
            return LinkState.QUARANTINED
        return LinkState.ACTIVE

    def has_room(self, num_tokens: int, now: float) -> bool:
        """Whether it takes one more session, of so many tokens."""
        return (
            self.state(now) is LinkState.ACTIVE
            and (not self.max_len or num_tokens < self.max_len)
            and len(self.sessions) < self.max_sessions
            and now >= self.not_asked_until
        )

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Receive the frames of the draft from now on; see ``TensorChannel``."""
        self._channel.start(on_frame, on_lost)

    @property
    def transport(self) -> str:
        """How its bytes travel."""
        return self._channel.transport

    @property
    def load(self) -> float:
        """Sessions over ``max_sessions``."""
        return len(self.sessions) / self.max_sessions

    def next_session_id(self) -> int:
        """An id never used before on this link."""
        return next(self._session_ids)

    def keep(self, session: Session) -> None:
        """Note a session that is about to open."""
        self.sessions[session.session] = session
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        self.tables_due += 1

    def open(self, opening: SessionOpening) -> None:
        """Ask the draft for a session.

        Raises:
            LinkError: the link is closed or its outbox is full.
        """
        self._send_control(opening)

    def close_session(self, session: int) -> None:
        """Tell the draft that a sequence has ended; a link that is gone needs no telling."""
        try:
            self._send_control(SessionClosing(session))
        except LinkError as error:
            self.lost_because = self.lost_because or str(error)

    def send(self, commits: list[Commit], lookahead: int) -> None:
        """Send the commits of a round as one frame.

        Raises:
            LinkError: the link is closed or its outbox is full.
        """
        rows_RW = pack_commits(commits, lookahead)
        number = next(self._sequence_numbers)
        self._channel.send(Frame(FrameKind.COMMITS, self.epoch, number, rows_RW))

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()
