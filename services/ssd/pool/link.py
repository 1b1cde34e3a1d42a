"""A link to a draft, its sessions and their sequences, as the pool uses them."""

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from ssd.errors import FrameError, LinkError
from ssd.observability.metrics import COMMIT_TO_TABLE_SECONDS, STALE_FRAMES_TOTAL
from ssd.pool.circuit_breaker import CircuitBreaker
from ssd.pool.rounds import Lookup, LookupCounts, RoundResult
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.pool.table_deadline import ColumnTimes, Prospect, opening_seconds
from ssd.rpc.link import ChannelStatus
from ssd.speculation.backup import WINDOW_TOKENS
from ssd.speculation.sources import NO_CANDIDATES
from ssd.speculation.table import OutcomeTable
from ssd.types import (
    CloseSession,
    Heartbeat,
    OpenSession,
    Outcome,
    TargetMessage,
    TokenId,
    Welcome,
)

RETRY_SECONDS = 1.0
"""Pause of a link after an opening that was refused or not answered."""
MOVE_RETRY_SECONDS = 30.0
"""Pause of moves to such a link; longer, because a refused move loses tables and gains nothing."""

SESSION_TOKENS = 1024
"""New tokens for which a session opens: drafts reserve memory for its maximum length. A longer text
gets another session, whose entries the prefix cache of the draft has."""
_GRPC = ChannelStatus()
_NEWEST_COMMITS = 8
"""Commits of a session whose tables are measured although they arrive after their round."""


class LinkState(StrEnum):
    """State of a link; the values are those of ``LinkState`` in ``admin.proto``."""

    CONNECTING = "connecting"
    ACTIVE = "active"
    QUARANTINED = "quarantined"
    """The circuit breaker is open."""
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


class DraftedSequence:
    """A sequence for which drafts may work, and the result of its newest round.

    Step thread only; the lock of ``DraftPool`` guards ``session``, ``excluded_links`` and
    ``refused_at``.
    """

    def __init__(self, opening: OpenSession) -> None:
        self.opening = opening
        """Opening of a session before the first round; the pool sets number and tokens."""
        self.num_tokens = len(opening.token_ids)
        """Number of committed tokens."""
        # numpy copies such an array of 1,024 in 1 us, a list in 20 us.
        self.newest_tokens: array[TokenId] = array("q", opening.token_ids[-WINDOW_TOKENS:])
        """The last tokens of the opening, for the backup, and all tokens after it."""
        self.outcome = Outcome(0, 0)
        self.max_proposed = 0
        """Limit of the next proposal; it leaves room for the bonus token."""
        self.candidates = NO_CANDIDATES
        """What the sources propose for the current round."""
        self.session: Session | None = None
        self.excluded_links: set[DraftLink] = set()
        """Links that cannot serve the sequence."""
        self.refused_at = -inf
        """When a draft refused its session, closed it or did not open it in time; -inf: never."""

    @property
    def num_remaining(self) -> int:
        """Tokens up to the maximum length."""
        return self.opening.max_len - self.num_tokens

    @property
    def session_len(self) -> int:
        """Maximum length of a session that opens now."""
        return min(self.opening.max_len, self.num_tokens + SESSION_TOKENS)

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """The committed tokens."""
        num_new = self.num_tokens - len(self.opening.token_ids)
        first_new = len(self.newest_tokens) - num_new
        return self.opening.token_ids + tuple(self.newest_tokens[first_new:])

    def add_round(self, result: RoundResult, lookahead: int) -> None:
        """Append the tokens of a round."""
        self.num_tokens += len(result.token_ids)
        self.newest_tokens.extend(result.token_ids)
        self.outcome = result.outcome
        self.max_proposed = min(lookahead, result.max_proposed, self.num_remaining - 1)


class SentCommit(NamedTuple):
    """A commit whose table has not arrived yet."""

    base_len: int
    sent_at: float
    is_branch: bool
    """Whether its next proposal is a branch of the draft."""


@dataclass(slots=True, eq=False)
class Session:
    """The state of a session on the target.

    Guarded by the lock of ``DraftPool``.
    """

    number: int
    sequence: DraftedSequence
    link: "DraftLink"
    base_len: int
    """Committed tokens before the current round. Only a table with this base length is used."""
    requested_at: float
    """When the opening or commit that the next table answers was sent."""
    open_by: float
    """When a session without any table is closed."""
    max_len: int
    """Maximum length for which the draft reserves memory."""
    table: OutcomeTable | None = None
    """The columns of the current round's table that have arrived."""
    depth: int = 0
    """Number of these columns."""
    received_at: float = 0.0
    """Arrival time of its newest column."""
    is_open: bool = False
    """Whether the first table has arrived. Rounds do not wait for a session that is opening."""
    is_timed: bool = False
    """Whether the time of the current table is known. The first time includes the prefill."""
    is_branch: bool = False
    """Whether the newest commit continues a branch of the draft."""
    unanswered: deque[SentCommit] = field(default_factory=lambda: deque(maxlen=_NEWEST_COMMITS))
    """The newest commits without a table so far."""

    def is_full(self, lookahead: int) -> bool:
        """Whether the next round could exceed this session, although its text may be longer."""
        sequence = self.sequence
        is_near = sequence.num_tokens + lookahead + 1 >= self.max_len
        return is_near and self.max_len < sequence.opening.max_len

    def remove(self) -> None:
        """Remove the session from its link and its sequence. Idempotent."""
        self.link.sessions.pop(self.number, None)
        if self.sequence.session is self:
            self.sequence.session = None

    def receive(self, table: OutcomeTable, now: float) -> int:
        """Keep the columns of the current round; return how many are new, 0 if none.

        Raises:
            FrameError: the table contradicts the columns that arrived before.
        """
        was_open, self.is_open = self.is_open, True
        self.link.most_opening += not was_open
        depth = table.depth
        num_new = depth - self.depth
        if table.base_len != self.base_len or num_new <= 0:
            return 0
        if self.table is None:
            self.is_timed = was_open
        elif not table.extends(self.table):
            raise FrameError(
                f"a table of session {table.session} contradicts the columns sent before"
            )
        self.table = table
        self.depth = depth
        self.received_at = now
        return num_new

    def begin_round(self, base_len: int, now: float, *, is_branch: bool) -> None:
        """Expect the table of the next round, whose commit is sent now."""
        self.base_len = base_len
        self.table = None
        self.depth = 0
        self.requested_at = now
        self.is_timed = True
        self.is_branch = is_branch
        self.unanswered.append(SentCommit(base_len, now, is_branch))
        self.link.request_table()

    def answer(self, base_len: int) -> SentCommit | None:
        """Return the commit that a table answers; None if there is none, or not any more."""
        while self.unanswered and self.unanswered[0].base_len <= base_len:
            commit = self.unanswered.popleft()
            if commit.base_len == base_len:
                return commit
        return None

    def prospect(self, lookup: Lookup, max_tokens: int) -> Prospect:
        """Return a proposal of this session, and the columns that may still arrive.

        Args:
            lookup: its newest one.
            max_tokens: limit of the proposal.
        """
        depth, repeats = lookup.num_from_table, lookup.candidates.repeats
        num_backup = len(lookup.tokens) - depth
        times = self.link.column_times
        if self.table is None:
            first = times.expected_first(is_branch=self.is_branch)
            next_at = self._begins_at(first.seconds) + first.seconds
            of_branch = times.expected_first(is_branch=True).seconds
            num_columns = min(first.depth, max_tokens)
            return Prospect(
                0, num_backup, num_columns, next_at, branch_seconds=of_branch, repeats=repeats
            )
        if not depth:
            return Prospect(0, num_backup, repeats=repeats)
        next_at = self.received_at + times.seconds
        num_columns = max(0, min(1, min(max_tokens, self.table.length) - depth))
        return Prospect(depth, num_backup, num_columns, next_at, self.received_at, repeats=repeats)

    def add_late(self, now: float) -> None:
        """Raise the times of what has not arrived at the end of the wait of a round."""
        times = self.link.column_times
        if self.table is None:
            first = times.first[self.is_branch]
            first.add_late_frame(now - self._begins_at(first.seconds))
        elif self.depth < self.table.length:
            times.add_late_column(now - self.received_at)

    def _begins_at(self, first_seconds: float) -> float:
        """Return when the draft can begin with the current table, if each takes so long.

        The draft may still work for the commit before.
        """
        if len(self.unanswered) < 2:
            return self.requested_at
        return max(self.requested_at, self.unanswered[-2].sent_at + first_seconds)

    def table_seconds(self, now: float) -> float | None:
        """Return the time from the commit to a complete table, estimated from its columns.

        Without a column, it is the time until now. None for the first table.
        """
        if not self.is_timed:
            return None
        if self.table is None:
            return now - self.requested_at
        seconds = self.received_at - self.requested_at
        return seconds * self.table.length / self.depth


class _FrameTimes:
    """What the tables of one frame measure. A frame counts once, however many sessions it has."""

    def __init__(self, before: float, now: float) -> None:
        """Construct; the frame before arrived at ``before``."""
        self._before = before
        self._now = now
        self._first: dict[bool, tuple[float, int]] = {}
        """Seconds and columns of the first frames, by the kind of their commits."""
        self._between_seconds = 0.0

    def receive(self, session: Session, table: OutcomeTable) -> int:
        """Keep the new columns of a session; returns their number."""
        is_first, newest_at, was_open = session.table is None, session.received_at, session.is_open
        num_new = session.receive(table, self._now)
        answered = session.answer(table.base_len)
        if answered is not None and was_open:
            # A table of an earlier round counts too, else no round would wait after a late table.
            _, sent_at, is_branch = answered
            measured = self._now - max(sent_at, self._before), table.depth
            self._first[is_branch] = max(self._first.get(is_branch, (0.0, 0)), measured)
        if num_new and not is_first:
            seconds = (self._now - newest_at) / num_new
            self._between_seconds = max(self._between_seconds, seconds)
        elif num_new and session.is_timed:
            COMMIT_TO_TABLE_SECONDS.observe(self._now - session.requested_at)
        return num_new

    def add_to(self, times: ColumnTimes) -> None:
        """Add the longest times."""
        for is_branch, (seconds, depth) in self._first.items():
            times.first[is_branch].add_frame(depth, seconds)
        if self._between_seconds:
            times.add_column(self._between_seconds)


class RoundTrip:
    """Measures the time from a heartbeat to its echo.

    Asyncio loop. One heartbeat at a time has a nonce, so a slow echo is measured in full.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The newest measurement; 0 before the first."""
        self._nonce = 0
        self._sent_at: float | None = None

    def next_heartbeat(self, now: float) -> Heartbeat:
        """Return the next heartbeat to send."""
        if self._sent_at is not None:
            return Heartbeat()
        self._nonce += 1
        self._sent_at = now
        return Heartbeat(nonce=self._nonce)

    def receive(self, heartbeat: Heartbeat, now: float) -> bool:
        """Receive a heartbeat of the draft; true if it was the echo and a measurement."""
        if self._sent_at is None or heartbeat.echo != self._nonce:
            return False
        self.seconds = now - self._sent_at
        self._sent_at = None
        return True


class DraftLink:
    """A link to a draft after its handshake.

    Changed under the lock of ``DraftPool``; ``round_trip`` and ``work_seconds`` on the asyncio
    loop. Any thread may read single values for a status. No method blocks.
    """

    def __init__(
        self,
        name: str,
        welcome: Welcome,
        send: Callable[[TargetMessage | bytes], None],
        channel: ChannelStatus = _GRPC,
    ) -> None:
        self.name = name
        self.welcome = welcome
        self.max_sessions = max(1, welcome.max_sessions)
        self.counts = LookupCounts()
        self.round_trip = RoundTrip()
        self.batch_times = BatchTimes()
        self.work_seconds: Mapping[int, float] = {}
        """Seconds that the draft works for a batch, by the number of sessions in it, without its
        turns for other targets; empty if it does not report them."""
        self.column_times = ColumnTimes()
        self.circuit_breaker = CircuitBreaker()
        self.sessions: dict[int, Session] = {}
        """Sessions by number."""
        self.peak_sessions = 0
        """Maximum number of sessions at one time so far. The draft never has more."""
        self.num_due_columns = 0
        """Columns that may still arrive: K for each opening and commit, less the columns that have
        arrived and the columns that a shorter table will never have."""
        self.no_openings_before = 0.0
        """Time of the next opening, after one that was refused or not answered."""
        self.longest_in_pause = 0.0
        """Maximum length of the sessions that may open before that time."""
        self.most_opening = self.max_sessions
        """Sessions that may open together. Each opening carries a whole text, so after a refusal
        it is one, and one more for each session that opens."""
        self.no_moves_before = 0.0
        """Earliest time at which sessions of other links may move to this link."""
        self.is_draining = False
        self.lost_because: str | None = None
        self.channel = channel
        self.send = send
        """Send a message or a frame; raises ``LinkError`` if the link is closed or its outbox full.
        """
        self._session_numbers = itertools.count(1)
        self.table_at = -inf
        """When the newest table arrived, for a round of any session."""
        self._round_at = -inf
        """End of the newest round in which the link had open sessions."""

    def state(self, now: float) -> LinkState:
        """Return the state of the link."""
        if self.lost_because is not None:
            return LinkState.LOST
        if self.is_draining:
            return LinkState.DRAINING
        if self.circuit_breaker.is_open(now):
            return LinkState.QUARANTINED
        return LinkState.ACTIVE

    def pause_openings(self, now: float, max_len: float = 0.0) -> None:
        """Pause openings, because one of this maximum length was refused, or not answered (0).

        A draft without room for a long session can have room for one of half the length. A full
        draft so receives few openings in a pause, each half as long as the one before.
        """
        is_paused = now < self.no_openings_before
        self.longest_in_pause = min(max_len / 2, self.longest_in_pause if is_paused else inf)
        self.most_opening = 1
        self.no_openings_before = now + RETRY_SECONDS
        self.no_moves_before = now + MOVE_RETRY_SECONDS

    def add_session(self, sequence: DraftedSequence, now: float) -> Session:
        """Add a session that is about to open."""
        base_len = sequence.num_tokens
        # A draft prefills prompts one after the other, so earlier openings come first.
        earlier = sum(other.base_len for other in self.opening())
        session = Session(
            number=next(self._session_numbers),
            sequence=sequence,
            link=self,
            base_len=base_len,
            requested_at=now,
            open_by=now + opening_seconds(earlier + base_len),
            max_len=sequence.session_len,
        )
        sequence.session = self.sessions[session.number] = session
        self.peak_sessions = max(self.peak_sessions, len(self.sessions))
        self.request_table()
        return session

    def opening(self) -> list[Session]:
        """Return the sessions that are opening."""
        return [session for session in self.sessions.values() if not session.is_open]

    def overdue_openings(self, now: float) -> list[Session]:
        """Return all sessions that are opening, if one of them has exceeded its time."""
        opening = self.opening()
        return opening if any(now > session.open_by for session in opening) else []

    def request_table(self) -> None:
        """Count the columns that an opening or a commit requests."""
        self.num_due_columns += self.welcome.lookahead

    def receive(self, tables: Collection[OutcomeTable], now: float) -> None:
        """Keep the columns that match a session and its round; count other tables as stale.

        Raises:
            FrameError: more tables than were requested, a table of a later round, or one that
                contradicts the columns before.
        """
        times = _FrameTimes(self.table_at, now)
        if tables:
            self.table_at = now
        for table in tables:
            session = self.sessions.get(table.session)
            if session is not None and table.base_len > session.base_len:
                raise FrameError(
                    f"a table has base length {table.base_len}, the newest commit has "
                    f"{session.base_len}"
                )
            num_new = 0 if session is None else times.receive(session, table)
            if num_new == 0:
                STALE_FRAMES_TOTAL.inc()
            # A stale table had at least one new column when it was sent.
            self.num_due_columns -= max(1, num_new)
            if table.depth == table.length:  # no other column answers its request
                self.num_due_columns -= self.welcome.lookahead - table.length
        times.add_to(self.column_times)
        if self.num_due_columns < 0:
            raise FrameError("a draft sent more tables than were requested")

    def add_round(self, sessions: Collection[Session], now: float) -> bool:
        """Add the times of a round's tables; True if one has arrived since the round before."""
        times = [session.table_seconds(now) for session in sessions]
        if measured := [seconds for seconds in times if seconds is not None]:
            self.batch_times.add_batch(measured)
        for session in sessions:
            session.add_late(now)
        before, self._round_at = self._round_at, now
        return self.table_at > before or any(session.table is not None for session in sessions)

    def send_closing(self, number: int) -> None:
        """Close a session on the draft. A failure marks the link as lost."""
        try:
            self.send(CloseSession(number))
        except LinkError as error:
            self.lost_because = self.lost_because or str(error)
