"""The pool of drafts, as the step loop sees it: sessions, newest tables, commits.

A draft that dies, drains, stalls or lies costs speed and never a token: its sequences run plain in
the same step, and reopen on any link that has room. A table counts only if epoch, session and base
length match exactly; anything else is dropped and counted.
"""

import threading
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from ssd.errors import FrameError, LinkError
from ssd.ports import Clock
from ssd.speculation.backup import propose_ngram
from ssd.speculation.table import OutcomeTable, unpack_tables
from ssd.telemetry import (
    COMMIT_TO_WIRE_SECONDS,
    DRAFT_SESSIONS,
    DRAFT_TABLE_SECONDS,
    STALE_FRAMES_TOTAL,
    get_logger,
)
from ssd.transport.frame import Frame, FrameKind
from ssd.types import (
    Branch,
    Commit,
    Explicit,
    LookupResult,
    Outcome,
    SequenceId,
    SessionOpening,
    SessionRefusal,
    TokenId,
)
from ssd_target.draft_link import DraftLink, LinkCounts, LinkState, Session
from ssd_target.patience import Patience, Quarantine
from ssd_target.scheduler import Load
from ssd_target.sequence import Emission, Sequence

_log = get_logger(__name__)
_RETRY_FULL_SECONDS = 1.0
"""How long a draft that refused a session for capacity is not asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What the pool needs to know of the process."""

    lookahead: int
    num_token_ids: int
    deadline_seconds: float
    """Longest wait of a round for its tables."""
    is_adaptive: bool = True
    may_quarantine: bool = True
    backup: str = "ngram"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round decided on one sequence."""

    sequence: Sequence
    base_len: int
    """Committed tokens before the round."""
    num_proposed: int
    outcome: Outcome
    emission: Emission


@dataclass(frozen=True, slots=True)
class Lookup:
    """What follows from a decision: the next proposal and where it comes from."""

    result: LookupResult = LookupResult.NONE
    next: Branch | Explicit = field(default_factory=Explicit)
    tokens: tuple[TokenId, ...] = ()


_NOTHING = Lookup()


class DraftPool:
    """Links, sessions and tables.

    ``attach``, ``detach``, ``refuse`` and ``receive`` belong to the asyncio loop, the others to the
    step thread. One lock guards all of it and is never held while waiting or sending.
    """

    def __init__(self, settings: PoolSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._changed = threading.Condition()
        self._links: dict[str, DraftLink] = {}
        self._sessions: dict[SequenceId, Session] = {}
        self._barred: set[SequenceId] = set()
        """Sequences that no draft can hold."""
        self.counts = LinkCounts()
        """Rounds of all links since the start."""
        self.load = Load()
        """What the target had to do when it last said so."""

    # The asyncio loop.

    def attach(self, link: DraftLink) -> None:
        """A link is up."""
        link.patience = Patience(is_adaptive=self._settings.is_adaptive)
        link.quarantine = Quarantine(is_enabled=self._settings.may_quarantine)
        with self._changed:
            self._links[link.name] = link

    def detach(self, link: DraftLink, reason: str) -> None:
        """A link is gone; its sequences go on without it, at once."""
        with self._changed:
            link.lost_because = link.lost_because or reason
            if self._links.get(link.name) is link:
                del self._links[link.name]
            self._forget_sessions(link)
            self._changed.notify_all()

    def drain(self, link: DraftLink) -> None:
        """The draft takes no more sessions; those it has go on."""
        with self._changed:
            link.is_draining = True

    def refuse(self, link: DraftLink, refusal: SessionRefusal) -> None:
        """The draft does not, or no longer, keep a session."""
        with self._changed:
            session = link.sessions.pop(refusal.session, None)
            if session is None:
                return
            self._sessions.pop(session.sequence_id, None)
            if refusal.reason == "capacity":
                link.full_until = self._clock.now() + _RETRY_FULL_SECONDS
            elif refusal.reason == "length":
                self._barred.add(session.sequence_id)
            self._changed.notify_all()
        _log.info("session_refused", draft=link.name, reason=refusal.reason)

    def receive(self, link: DraftLink, frame: Frame) -> None:
        """Keep the tables of a frame that match exactly.

        Raises:
            FrameError: the frame is malformed or claims what cannot be; the link is to be closed.
        """
        if frame.epoch != link.epoch:
            STALE_FRAMES_TOTAL.inc()
            return
        if frame.kind is not FrameKind.TABLES:
            raise FrameError(f"a draft sent a frame of kind {frame.kind.name}")
        tables = unpack_tables(frame.rows_RW, self._settings.lookahead)
        for table in tables:
            self._refuse_nonsense(table)
        now = self._clock.now()
        with self._changed:
            for table in tables:
                self._keep(link, table, now)
            self._changed.notify_all()

    def _refuse_nonsense(self, table: OutcomeTable) -> None:
        highest = max(
            int(table.bonus_N.max(initial=0)),
            int(table.tokens_NK.max(initial=0)),
        )
        if highest >= self._settings.num_token_ids:
            raise FrameError(
                f"a table holds token id {highest}, the vocabulary has "
                f"{self._settings.num_token_ids}"
            )

    def _keep(self, link: DraftLink, table: OutcomeTable, now: float) -> None:
        session = link.sessions.get(table.session)
        if session is not None and table.base_len > session.base_len:
            raise FrameError(
                f"a table answers base length {table.base_len}, the newest commit is for "
                f"{session.base_len}"
            )
        if session is not None:
            session.is_opened = True
        if session is None or table.base_len != session.base_len:
            STALE_FRAMES_TOTAL.inc()
            return
        session.table = table
        link.patience.observe(now - session.asked_at)
        DRAFT_TABLE_SECONDS.observe(now - session.asked_at)

    # Any thread.

    def links(self) -> tuple[DraftLink, ...]:
        """Links that are up."""
        with self._changed:
            return tuple(self._links.values())

    def state(self, link: DraftLink) -> LinkState:
        """What a link is good for now."""
        return link.state(self._clock.now())

    @property
    def num_active(self) -> int:
        """Links that are up now."""
        return len(self._links)

    # The step thread.

    def has_session(self, sequence: Sequence) -> bool:
        """Whether a draft follows this sequence."""
        return sequence.sequence_id in self._sessions

    def open_sessions(self, sequences: Iterable[Sequence]) -> None:
        """Give each of these sequences a draft, the least loaded first, while there is room.

        A sequence must not carry a proposal into the coming round: the draft supposes that the
        round after an opening proposes nothing.
        """
        if not self._links:
            return
        for sequence in sequences:
            sequence_id = sequence.sequence_id
            if sequence_id in self._sessions or sequence_id in self._barred:
                continue
            link = self._least_loaded()
            if link is None:
                return
            if sequence.num_remaining > 1:
                self._open(link, sequence)

    def close(self, sequence_id: SequenceId) -> None:
        """A sequence has ended: its draft forgets it too."""
        with self._changed:
            self._barred.discard(sequence_id)
            session = self._sessions.pop(sequence_id, None)
            if session is not None:
                session.link.sessions.pop(session.session, None)
        if session is not None:
            session.link.close_session(session.session)

    def look_up(self, decisions: Rows[Decision]) -> list[Lookup]:
        """Find each continuing row's outcome in its table, waiting no longer than the deadline."""
        going_on = [each for each in decisions if each.emission.finish_reason is None]
        with self._changed:
            self._wait_for_tables([each.sequence.sequence_id for each in going_on])
            tables = self._tables_in_time(going_on)
        return [
            _NOTHING
            if each.emission.finish_reason is not None
            else self._look_up_one(each, *tables[each.sequence.sequence_id])
            for each in decisions
        ]

    def send(self, decisions: Rows[Decision], lookups: Rows[Lookup], decided_at: float) -> None:
        """Tell the drafts what was decided: one frame a link, with all its sessions."""
        commits: dict[DraftLink, list[Commit]] = {}
        now = self._clock.now()
        with self._changed:
            for decision, lookup in zip(decisions, lookups, strict=True):
                session = self._sessions.get(decision.sequence.sequence_id)
                if session is None or decision.emission.finish_reason is not None:
                    continue
                commit = Commit(session.session, decision.base_len, decision.outcome, lookup.next)
                commits.setdefault(session.link, []).append(commit)
                session.base_len = len(decision.sequence.tokens)
                session.table = None
                session.asked_at = now
        for link, link_commits in commits.items():
            try:
                link.send(link_commits, self._settings.lookahead)
            except LinkError as error:
                self.detach(link, str(error))
            else:
                COMMIT_TO_WIRE_SECONDS.observe(self._clock.now() - decided_at)

    def _least_loaded(self) -> DraftLink | None:
        now = self._clock.now()
        with self._changed:
            open_links = [link for link in self._links.values() if link.has_room(now)]
        return min(open_links, key=lambda link: link.load, default=None)

    def _open(self, link: DraftLink, sequence: Sequence) -> None:
        sampling = sequence.arrival.request.sampling
        opening = SessionOpening(
            session=link.next_session_id(),
            token_ids=tuple(sequence.tokens),
            seed=sampling.seed,
            temperature=sampling.temperature,
            max_len=sequence.arrival.max_len,
        )
        session = Session(
            session=opening.session,
            sequence_id=sequence.sequence_id,
            link=link,
            base_len=len(sequence.tokens),
            asked_at=self._clock.now(),
        )
        with self._changed:
            if link.lost_because is not None:
                return
            link.sessions[session.session] = session
            self._sessions[session.sequence_id] = session
        try:
            link.open(opening)
        except LinkError as error:
            self.detach(link, str(error))

    def _wait_for_tables(self, sequence_ids: list[SequenceId]) -> None:
        """Wait until every opened session has its table, or the round's deadline. Lock held."""

        def missing() -> list[Session]:
            sessions = (self._sessions.get(sequence_id) for sequence_id in sequence_ids)
            return [each for each in sessions if each and each.is_opened and each.table is None]

        late = missing()
        if not late:
            return
        now = self._clock.now()
        until = min(
            now + self._settings.deadline_seconds,
            max(each.asked_at + each.link.patience.limit_seconds for each in late),
        )
        self._changed.wait_for(lambda: not missing(), max(0.0, until - now))

    def _tables_in_time(
        self, decisions: list[Decision]
    ) -> dict[SequenceId, tuple[Session | None, OutcomeTable | None]]:
        """Sessions and tables as they stand at the deadline; a link late again is left alone."""
        now = self._clock.now()
        found: dict[SequenceId, tuple[Session | None, OutcomeTable | None]] = {}
        is_timely: dict[DraftLink, bool] = {}
        for decision in decisions:
            sequence_id = decision.sequence.sequence_id
            session = self._sessions.get(sequence_id)
            found[sequence_id] = (session, session.table if session else None)
            if session is not None and session.is_opened:
                in_time = session.table is not None
                is_timely[session.link] = is_timely.get(session.link, False) or in_time
        for link, any_in_time in is_timely.items():
            if not any_in_time:
                link.patience.forget()
            if link.quarantine.note_round(now, any_in_time=any_in_time):
                self._quarantine(link, link.quarantine.until - now)
        return found

    def _quarantine(self, link: DraftLink, seconds: float) -> None:
        sessions = list(link.sessions)
        self._forget_sessions(link)
        for session in sessions:
            link.close_session(session)
        _log.warning("link_quarantined", draft=link.name, seconds=seconds)

    def _forget_sessions(self, link: DraftLink) -> None:
        for session in link.sessions.values():
            self._sessions.pop(session.sequence_id, None)
        link.sessions.clear()

    def _look_up_one(
        self, decision: Decision, session: Session | None, table: OutcomeTable | None
    ) -> Lookup:
        if session is None or not session.is_opened:
            return _NOTHING
        limit = min(self._settings.lookahead, decision.sequence.num_remaining - 1)
        index = table.look_up(decision.outcome) if table is not None else None
        if table is not None and index is not None:
            self._note(session.link, LookupResult.HIT)
            tokens = table.proposal(index, limit)
            return Lookup(LookupResult.HIT, Branch(index, len(tokens)), tokens)
        result = LookupResult.LATE if table is None else LookupResult.MISS
        self._note(session.link, result)
        tokens = ()
        if self._settings.backup == "ngram" and limit > 0:
            tokens = propose_ngram(decision.sequence.tokens, limit)
        return Lookup(result, Explicit(tokens), tokens)

    def _note(self, link: DraftLink, result: LookupResult) -> None:
        link.counts.note(result)
        self.counts.note(result)

    def publish(self) -> None:
        """Refresh the gauges of the pool."""
        DRAFT_SESSIONS.set(len(self._sessions))
