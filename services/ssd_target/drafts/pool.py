"""The pool of drafts, as the step loop sees it: sessions, newest tables, commits.

A draft that dies, drains, stalls or lies costs speed and never a token: its sequences run plain in
the same step, and reopen on any link that has room. A table counts only if epoch, session and base
length match exactly; anything else is dropped and counted.
"""

import threading
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from ssd.errors import FrameError, LinkError
from ssd.ports import Clock
from ssd.speculation.backup import propose_ngram
from ssd.speculation.table import OutcomeTable, unpack_tables
from ssd.telemetry import (
    COMMIT_TO_TABLE_SECONDS,
    COMMIT_TO_WIRE_SECONDS,
    STALE_FRAMES_TOTAL,
    get_logger,
)
from ssd.transport.frame import Frame, FrameKind
from ssd.types import (
    Branch,
    Commit,
    Explicit,
    LookupResult,
    SequenceId,
    SessionOpening,
    SessionRefusal,
)
from ssd_target.decoding.round_result import NOTHING_FOUND, WITHOUT_DRAFT, Lookup, RoundResult
from ssd_target.decoding.sequence import Sequence
from ssd_target.drafts.link import DraftLink, LinkCounts, LinkState, Session
from ssd_target.drafts.link_health import CircuitBreaker, TableDeadline, opening_seconds
from ssd_target.settings import TargetSettings

_log = get_logger(__name__)
_ASK_AGAIN_SECONDS = 1.0
"""How long a draft is not asked again after a session that it refused or never opened."""
_ABOUT_ONE_SEQUENCE = ("length", "not finite")
"""Reasons of a refusal that hold for that sequence on that draft for ever."""


Found = tuple[Session | None, OutcomeTable | None]
"""A sequence's session and its table, where there are any."""


class DraftPool:
    """Links, sessions and tables.

    ``attach``, ``detach``, ``refuse`` and ``receive`` belong to the asyncio loop, the others to the
    step thread. One lock guards all of it and is never held while waiting or sending.
    """

    def __init__(self, settings: TargetSettings, num_token_ids: int, clock: Clock) -> None:
        self._settings = settings
        self._num_token_ids = num_token_ids
        self._clock = clock
        self._changed = threading.Condition()
        self._links: dict[str, DraftLink] = {}
        self._sessions: dict[SequenceId, Session] = {}
        self._barred: dict[SequenceId, set[DraftLink]] = {}
        """Links whose drafts cannot follow a sequence."""
        self.counts = LinkCounts()
        """Rounds of all links since the start."""

    # The asyncio loop.

    def attach(self, link: DraftLink) -> None:
        """A link is up."""
        link.table_deadline = TableDeadline(is_adaptive=self._settings.adaptive_deadline)
        link.circuit_breaker = CircuitBreaker(is_enabled=self._settings.circuit_breaker)
        with self._changed:
            self._links[link.name] = link

    def detach(self, link: DraftLink, reason: str) -> None:
        """A link is gone; its sequences go on without it, at once."""
        with self._changed:
            link.lost_because = link.lost_because or reason
            if self._links.get(link.name) is link:
                del self._links[link.name]
            self._forget(list(link.sessions.values()))
            self._changed.notify_all()

    def drain(self, link: DraftLink) -> None:
        """The draft is leaving: it gets no more sessions, and loses those it has in next round."""
        with self._changed:
            link.is_draining = True

    def refuse(self, link: DraftLink, refusal: SessionRefusal) -> None:
        """The draft does not, or no longer, keep a session."""
        with self._changed:
            session = link.sessions.pop(refusal.session, None)
            if session is None:
                return
            self._sessions.pop(session.sequence_id, None)
            if refusal.reason in _ABOUT_ONE_SEQUENCE:
                self._barred.setdefault(session.sequence_id, set()).add(link)
            else:
                link.not_asked_until = self._clock.now() + _ASK_AGAIN_SECONDS
            self._changed.notify_all()
        _log.info("session_refused", draft=link.name, reason=refusal.reason)

    def receive(self, link: DraftLink, frame: Frame) -> None:
        """Keep the tables of a frame that match exactly.

        A draft sends one table at most for each opening and commit, and in a frame one at most for
        each session: it costs this loop no more than was asked of it.

        Raises:
            FrameError: the frame is malformed, claims what cannot be or was not asked for; the link
                is to be closed.
        """
        if frame.epoch != link.epoch:
            STALE_FRAMES_TOTAL.inc()
            return
        if frame.kind is not FrameKind.TABLES:
            raise FrameError(f"a draft sent a frame of kind {frame.kind.name}")
        settings = self._settings
        num_rows = len(frame.rows_RW)
        most_rows = link.most_sessions * (settings.branches + 1)
        if num_rows > most_rows:
            raise FrameError(
                f"a frame has {num_rows} rows, the tables of {link.most_sessions} sessions have "
                f"{most_rows} at most"
            )
        tables = unpack_tables(frame.rows_RW, settings.lookahead, self._num_token_ids)
        widest = max((len(table.bonus_N) for table in tables), default=0)
        if widest > settings.branches:
            raise FrameError(f"a table has {widest} branches, agreed are {settings.branches}")
        now = self._clock.now()
        with self._changed:
            link.tables_due -= len(tables)
            if link.tables_due < 0:
                raise FrameError(f"a draft sent {-link.tables_due} tables that were not asked for")
            for table in tables:
                self._keep(link, table, now)
            self._changed.notify_all()

    def _keep(self, link: DraftLink, table: OutcomeTable, now: float) -> None:
        session = link.sessions.get(table.session)
        if session is not None and table.base_len > session.base_len:
            raise FrameError(
                f"a table answers base length {table.base_len}, the newest commit is for "
                f"{session.base_len}"
            )
        if session is None:
            STALE_FRAMES_TOTAL.inc()
            return
        was_opened, session.is_opened = session.is_opened, True
        if table.base_len != session.base_len or session.table is not None:
            STALE_FRAMES_TOTAL.inc()
            return
        session.table = table
        if not was_opened:
            # It took the prompt's prefill and the queue before it: no measure of tables.
            return
        session.table_seconds = now - session.asked_at
        link.table_deadline.observe(session.table_seconds)
        COMMIT_TO_TABLE_SECONDS.observe(session.table_seconds)

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

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    # The step thread.

    def open_sessions(self, sequences: Iterable[Sequence]) -> None:
        """Give each of these sequences a draft, the least loaded first, while there is room.

        Those of a draft that is leaving get another one, and it ends the sooner. A sequence must
        not carry a proposal into the coming round: the draft supposes that the
        round after an opening proposes nothing.
        """
        if not self._links:
            return
        self._give_up_openings()
        self._move_out()
        for sequence in sequences:
            if sequence.sequence_id in self._sessions or sequence.num_remaining <= 1:
                continue
            link = self._least_loaded(sequence)
            if link is not None:
                self._open(link, sequence)

    def close(self, sequence_id: SequenceId) -> None:
        """A sequence has ended: its draft forgets it too."""
        with self._changed:
            self._barred.pop(sequence_id, None)
            session = self._sessions.get(sequence_id)
            ended = [session] if session is not None else []
            self._forget(ended)
        _tell_closed(ended)

    def look_up(self, results: Rows[RoundResult]) -> list[Lookup]:
        """Find each continuing row's outcome in its table, waiting no longer than the deadline."""
        going_on = [each for each in results if each.emission.finish_reason is None]
        with self._changed:
            self._wait_for_tables([each.sequence.sequence_id for each in going_on])
            tables = self._tables_in_time(going_on)
            dropped = self._drop_late_links(tables.values())
        _tell_closed(dropped)
        return [
            NOTHING_FOUND
            if each.emission.finish_reason is not None
            else self._look_up_one(each, *tables[each.sequence.sequence_id])
            for each in results
        ]

    def send(self, results: Rows[RoundResult], lookups: Rows[Lookup], decided_at: float) -> None:
        """Tell the drafts what was decided: one frame a link, with all its sessions."""
        commits: dict[DraftLink, list[Commit]] = {}
        now = self._clock.now()
        with self._changed:
            for result, lookup in zip(results, lookups, strict=True):
                session = self._sessions.get(result.sequence.sequence_id)
                if session is None or result.emission.finish_reason is not None:
                    continue
                commit = Commit(session.session, result.base_len, result.outcome, lookup.next)
                commits.setdefault(session.link, []).append(commit)
                session.base_len = len(result.sequence.tokens)
                session.table = None
                session.asked_at = now
                session.link.tables_due += 1
        for link, link_commits in commits.items():
            try:
                link.send(link_commits, self._settings.lookahead)
            except LinkError as error:
                self.detach(link, str(error))
            else:
                COMMIT_TO_WIRE_SECONDS.observe(self._clock.now() - decided_at)

    def _give_up_openings(self) -> None:
        """Close the openings of drafts that have left one without a table for too long."""
        now = self._clock.now()
        with self._changed:
            opening = [each for each in self._sessions.values() if not each.is_opened]
            silent = {each.link for each in opening if now > each.open_by}
            given_up = [each for each in opening if each.link in silent]
            self._forget(given_up)
            for link in silent:
                link.not_asked_until = now + _ASK_AGAIN_SECONDS
                link.circuit_breaker.begin(now)
                _log.warning("openings_unanswered", draft=link.name)
        _tell_closed(given_up)

    def _move_out(self) -> None:
        """Close the sessions of drafts that are leaving."""
        with self._changed:
            leaving = [link for link in self._links.values() if link.is_draining and link.sessions]
            closed = [session for link in leaving for session in link.sessions.values()]
            self._forget(closed)
        _tell_closed(closed)
        for link in leaving:
            _log.info("moved_out", draft=link.name)

    def _least_loaded(self, sequence: Sequence) -> DraftLink | None:
        now, num_tokens = self._clock.now(), len(sequence.tokens)
        with self._changed:
            barred = self._barred.get(sequence.sequence_id, ())
            links = [each for each in self._links.values() if each not in barred]
            links = [each for each in links if each.has_room(num_tokens, now)]
        return min(links, key=lambda link: link.load, default=None)

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
            # A draft prefills in turn: what is opening before this one comes first.
            before = sum(each.base_len for each in link.sessions.values() if not each.is_opened)
            session.open_by = session.asked_at + opening_seconds(before + session.base_len)
            link.keep(session)
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
            now + self._settings.draft_deadline_seconds,
            max(each.asked_at + each.link.table_deadline.limit_seconds for each in late),
        )
        self._changed.wait_for(lambda: not missing(), max(0.0, until - now))

    def _tables_in_time(self, results: list[RoundResult]) -> dict[SequenceId, Found]:
        """Sessions and tables as they stand at the deadline. Lock held."""
        found: dict[SequenceId, Found] = {}
        for result in results:
            session = self._sessions.get(result.sequence.sequence_id)
            found[result.sequence.sequence_id] = (session, session.table if session else None)
        return found

    def _drop_late_links(self, found: Iterable[Found]) -> list[Session]:
        """Judge links by their tables; take the sessions from those late too often. Lock held."""
        now = self._clock.now()
        by_link: dict[DraftLink, list[Session]] = {}
        for session, _ in found:
            if session is not None and session.is_opened:
                by_link.setdefault(session.link, []).append(session)
        dropped: list[Session] = []
        for link, sessions in by_link.items():
            taken = [each.seconds_taken(now) for each in sessions]
            if known := [seconds for seconds in taken if seconds is not None]:
                link.table_pace.note(known)
            any_in_time = any(each.table is not None for each in sessions)
            if not any_in_time:
                link.table_deadline.forget()
            if link.circuit_breaker.note_round(now, any_in_time=any_in_time):
                dropped += link.sessions.values()
                seconds = link.circuit_breaker.until - now
                _log.warning("link_quarantined", draft=link.name, seconds=seconds)
        self._forget(dropped)
        return dropped

    def _forget(self, sessions: Iterable[Session]) -> None:
        """Take sessions off the books. Lock held."""
        for session in sessions:
            self._sessions.pop(session.sequence_id, None)
            session.link.sessions.pop(session.session, None)

    def _look_up_one(
        self, result: RoundResult, session: Session | None, table: OutcomeTable | None
    ) -> Lookup:
        limit = min(self._settings.lookahead, result.sequence.num_remaining - 1)
        if session is None or not session.is_opened:
            needs_table = result.sequence.wants_draft and limit > 0
            return WITHOUT_DRAFT if needs_table else NOTHING_FOUND
        index = table.look_up(result.outcome) if table is not None else None
        if table is not None and index is not None:
            self._note(session.link, LookupResult.HIT)
            tokens = table.proposal(index, limit)
            return Lookup(LookupResult.HIT, Branch(index, len(tokens)), tokens)
        missed = LookupResult.LATE if table is None else LookupResult.MISS
        self._note(session.link, missed)
        tokens = ()
        if self._settings.backup == "ngram" and limit > 0:
            tokens = propose_ngram(result.sequence.tokens, limit)
        return Lookup(missed, Explicit(tokens), tokens)

    def _note(self, link: DraftLink, result: LookupResult) -> None:
        link.counts.note(result)
        self.counts.note(result)


def _tell_closed(sessions: Iterable[Session]) -> None:
    """Tell the drafts that these sessions are over. No lock held: this sends."""
    for session in sessions:
        session.link.close_session(session.session)
