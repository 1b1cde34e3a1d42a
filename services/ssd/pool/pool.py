"""The pool: the links and sessions of a target, as its rounds use them.

A draft that fails, drains, stalls or sends wrong data costs speed and never a token. Its sequences
run without a draft in the same step, and open sessions on other links that have room.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from math import inf

from ssd.errors import LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import COMMIT_TO_WIRE_SECONDS
from ssd.pool.circuit_breaker import SILENT_ROUNDS
from ssd.pool.link import DraftedSequence, DraftLink, LinkState, Session
from ssd.pool.rounds import NO_TABLE_NEEDED, Lookup, LookupCounts, PoolRound, RoundResult
from ssd.pool.router import choose_link, longest_session, session_to_move
from ssd.pool.settings import DraftsSettings
from ssd.pool.sustainable_sessions import sustainable_sessions
from ssd.pool.table_deadline import RoundPace
from ssd.pool.tables import TableCollector, without_session
from ssd.ports import Clock
from ssd.speculation.sources import NO_CANDIDATES
from ssd.speculation.table import OutcomeTable, pack_commits, unpack_tables
from ssd.types import (
    Commit,
    OpenSession,
    RefusalReason,
    SequenceId,
    SessionRefused,
)

_log = get_logger(__name__)
_MAX_WAITED_US = 2**31 - 1
MAX_OPENED_TOKENS = 131_072
"""Tokens of texts after which a round opens no more sessions. Each text takes time of the round."""
_PERMANENT_REASONS = (RefusalReason.LENGTH, RefusalReason.NOT_FINITE)
"""Reasons of a refusal that stay true for this sequence on this draft."""

SequenceResult = tuple[RoundResult, DraftedSequence | None]
"""A result and its sequence; None if the sequence is not in the pool."""


class DraftPool:
    """Opens sessions on drafts, looks outcomes up in their tables, and sends them commits.

    A target calls ``begin`` for each sequence that may speculate, ``open_sessions`` before and
    ``round`` after each of its verifies, and ``end``. Nothing here needs the target's model.

    Asyncio loop: ``configure``, ``attach``, ``detach``, ``drain``, ``receive``, ``refuse``. Step
    thread: ``begin``, ``open_sessions``, ``release``, ``round``, ``end``, ``skip_interval``. Any
    thread: all others. One lock guards links and sessions. It is not held while waiting or sending
    to drafts; readers of tokens are woken under it.
    """

    def __init__(
        self, settings: DraftsSettings, lookahead: int, num_token_ids: int, clock: Clock
    ) -> None:
        """Construct.

        Args:
            settings: of the target.
            lookahead: tokens of a full proposal (K).
            num_token_ids: token ids are below.
            clock: clock of the step thread.
        """
        self.settings = settings
        """Set with the lock held; rounds use them from the next one on."""
        self._lookahead = lookahead
        self._num_token_ids = num_token_ids
        self._clock = clock
        self._pace = RoundPace()
        self._changed = threading.Condition()
        self._links: dict[str, DraftLink] = {}
        self._sequences: dict[SequenceId, DraftedSequence] = {}
        self._reopening: set[DraftedSequence] = set()
        """Sequences whose session has moved and is not requested yet; at most one."""
        self._looked_up_at: float | None = None
        """When the lookups of the newest round were known; None if no round follows it directly."""
        self.counts = LookupCounts()
        """Lookups of all links since the start."""

    def configure(self, settings: DraftsSettings) -> None:
        """Use other settings from the next round on: the backup and the table deadline."""
        with self._changed:
            self.settings = settings

    def attach(self, link: DraftLink) -> None:
        """Use a link that is up."""
        with self._changed:
            self._links[link.name] = link

    def detach(self, link: DraftLink, reason: str) -> None:
        """Stop using a link that is lost; rounds no longer wait for its sessions."""
        with self._changed:
            link.lost_because = link.lost_because or reason
            if self._links.get(link.name) is link:
                del self._links[link.name]
            _remove(list(link.sessions.values()))
            self._changed.notify_all()

    def drain(self, link: DraftLink) -> None:
        """Open no more sessions on a link, and close its sessions in the next round."""
        with self._changed:
            link.is_draining = True

    def receive(self, link: DraftLink, frame: bytes) -> None:
        """Keep the tables of a frame that match a session and its round exactly.

        A draft sends at most K tables for each opening and commit, each with more columns, and a
        frame has at most one table of each session. This bounds the time of the asyncio loop.

        Raises:
            FrameError: the frame is malformed or contains what was not requested; the caller ends
                the link.
        """
        tables = unpack_tables(
            frame,
            self._lookahead,
            max_tables=link.peak_sessions,
            branches=self.settings.branches,
            num_token_ids=self._num_token_ids,
        )
        with self._changed:
            link.receive(tables, self._clock.now())
            self._changed.notify_all()

    def refuse(self, link: DraftLink, refusal: SessionRefused) -> None:
        """Remove a session that the draft has refused or closed."""
        with self._changed:
            session = link.sessions.get(refusal.session)
            if session is None:
                return
            session.remove()
            if refusal.reason in _PERMANENT_REASONS:
                session.sequence.excluded_links.add(link)
            else:
                now = self._clock.now()
                session.sequence.refused_at = now
                link.pause_openings(now, session.max_len)
            self._changed.notify_all()
        _log.info("session_refused", draft=link.name, reason=refusal.reason)

    def links(self) -> tuple[DraftLink, ...]:
        """Return the links that are up."""
        with self._changed:
            return tuple(self._links.values())

    def state(self, link: DraftLink) -> LinkState:
        """Return the state of a link."""
        return link.state(self._clock.now())

    @property
    def num_active(self) -> int:
        """Number of links that accept sessions: they neither drain nor are suspended."""
        return sum(self.state(link) is LinkState.ACTIVE for link in self.links())

    @property
    def num_sessions(self) -> int:
        """Number of sessions."""
        return sum(len(link.sessions) for link in self.links())

    def begin(self, sequence_id: SequenceId, opening: OpenSession) -> None:
        """Add a sequence; ``open_sessions`` then opens a session for it."""
        self._sequences[sequence_id] = DraftedSequence(opening)

    def open_sessions(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Open a session for each of these sequences that has none, while links have room.

        Sessions that move are closed first: all sessions on draining links, and one on a link that
        serves too many while another link serves fewer. Their sequences open on other links. A
        sequence must not have a proposal: the draft assumes none for the round after an opening.

        A call opens at least one session, and no more after ``MAX_OPENED_TOKENS``. The next calls
        open the others, in the same order.

        Sequences that were refused open after the others. A refusal pauses a link, so a refused
        text that came first would prevent the sessions of the others.
        """
        if not self._links:
            return
        self._close_unserved()
        sequences = map(self._sequences.__getitem__, sequence_ids)
        waiting = [each for each in sequences if each.session is None and each.num_remaining > 1]
        if any(sequence.refused_at > -inf for sequence in waiting):
            waiting.sort(key=lambda sequence: sequence.refused_at)
        num_opened, longest = 0, inf
        for sequence in waiting:
            if num_opened >= MAX_OPENED_TOKENS or not longest:
                break
            if sequence.session_len > longest:
                continue
            num_tokens = self._open(sequence)
            num_opened += num_tokens
            if not num_tokens:
                # To ask full drafts for each of a thousand texts would take milliseconds a round.
                longest = self._longest_session()

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Close the sessions of sequences that continue without a draft.

        The drafts then have no work for them. They may open sessions again later.
        """
        with self._changed:
            sequences = set(filter(None, map(self._sequences.get, sequence_ids)))
            self._reopening -= sequences
            released = [sequence.session for sequence in sequences if sequence.session]
            _remove(released)
        _send_closings(released)

    def end(self, sequence_id: SequenceId) -> None:
        """Remove a sequence that has ended, and close its session. Idempotent."""
        self.release([sequence_id])
        self._sequences.pop(sequence_id, None)

    def round(
        self,
        results: Rows[RoundResult],
        decided_at: float,
        before_wait: Callable[[], None],
        *,
        prompt_seconds: float = 0.0,
    ) -> PoolRound:
        """Look the outcomes of a round up in their tables, and send them to the drafts.

        It waits for more columns of tables while that pays. A wait saves rounds, but no time in
        which prompts are stored.

        Args:
            results: results of all sequences of the round, also of sequences outside the pool.
            decided_at: when the outcomes were known.
            before_wait: called once if it waits.
            prompt_seconds: time of the round in which prompts were stored.

        Returns:
            The lookup of each result, with the proposal for the next round.
        """
        if not self._sequences:
            self._looked_up_at = None
            return PoolRound([NO_TABLE_NEEDED] * len(results), self._clock.now())
        pairs = [(result, self._sequences.get(result.sequence_id)) for result in results]
        self._add_outcomes(pairs, prompt_seconds)
        lookups, waited_seconds = self._look_up(pairs, before_wait)
        looked_up_at = self._clock.now()
        # The time from the last sequence to the next request belongs to no round.
        is_last = all(result.is_finished for result in results)
        self._looked_up_at = None if is_last else looked_up_at
        commits = self._commits(pairs, lookups, waited_seconds, looked_up_at)
        self._send(commits, decided_at)
        return PoolRound(lookups, looked_up_at)

    def skip_interval(self) -> None:
        """Do not measure the time up to the next round: nothing decodes, or prompts are stored."""
        self._looked_up_at = None

    def _add_outcomes(self, pairs: Rows[SequenceResult], prompt_seconds: float) -> None:
        """Add a round to its sequences that continue and to the pace."""
        for result, sequence in pairs:
            if sequence is not None and not result.is_finished:
                sequence.add_round(result, self._lookahead)
        if self._looked_up_at is not None:
            is_plain = not any(result.num_proposed for result, _ in pairs)
            seconds = self._clock.now() - self._looked_up_at - prompt_seconds
            self._pace.add_round(max(0.0, seconds), is_plain=is_plain)
        self._pace.sources.add_round(
            (sequence.candidates, result.token_ids)
            for result, sequence in pairs
            if sequence is not None and sequence.candidates is not NO_CANDIDATES
        )

    def _look_up(
        self,
        pairs: Rows[SequenceResult],
        before_wait: Callable[[], None],
    ) -> tuple[list[Lookup], float]:
        """Return the lookup of each result, and for how many seconds it waited for tables."""
        continuing = [sequence for result, sequence in pairs if sequence and not result.is_finished]
        num_others = sum(not result.is_finished for result, _ in pairs) - len(continuing)
        tables = TableCollector(self.settings, self._pace, self._changed, self._clock)
        with self._changed:
            answering, waited_seconds = tables.collect(continuing, num_others, before_wait)
            suspended = self._suspend_silent_links(session for session, _ in answering.values())
        _send_closings(suspended)
        lookups = [
            self._look_up_sequence(tables, sequence, answering.get(sequence))
            if sequence and not result.is_finished
            else NO_TABLE_NEEDED
            for result, sequence in pairs
        ]
        return lookups, waited_seconds

    def _commits(
        self,
        pairs: Rows[SequenceResult],
        lookups: Rows[Lookup],
        waited_seconds: float,
        now: float,
    ) -> Mapping[DraftLink, list[Commit]]:
        """Return the commits of the sessions that continue, by link."""
        commits: dict[DraftLink, list[Commit]] = {}
        waited_us = min(int(waited_seconds * 1e6), _MAX_WAITED_US)
        with self._changed:
            for (result, sequence), lookup in zip(pairs, lookups, strict=True):
                if sequence is None or sequence.session is None or result.is_finished:
                    continue
                session, num_tokens = sequence.session, sequence.num_tokens
                base_len = num_tokens - len(result.token_ids)
                commit = Commit(
                    session.number,
                    base_len,
                    result.outcome,
                    tokens=lookup.tokens,
                    waited_us=waited_us,
                    # The next proposal has this length, the proposal of the table about the same.
                    # Before the last token it is 1: a table of K is never used.
                    length=sequence.max_proposed or int(sequence.num_remaining == 1),
                )
                commits.setdefault(session.link, []).append(commit)
                session.begin_round(num_tokens, now, is_branch=lookup.is_branch)
        return commits

    def _send(self, commits: Mapping[DraftLink, list[Commit]], decided_at: float) -> None:
        """Send commits in one frame for each link."""
        for link, of_link in commits.items():
            try:
                link.send(pack_commits(of_link, self._lookahead))
            except LinkError as error:
                self.detach(link, str(error))
            else:
                COMMIT_TO_WIRE_SECONDS.observe(self._clock.now() - decided_at)

    def _close_unserved(self) -> None:
        """Close sessions that move to another link or are full, and openings without an answer."""
        now = self._clock.now()
        closed: list[Session] = []
        with self._changed:
            for link in self._links.values():
                if link.is_draining:
                    if link.sessions:
                        _log.info("sessions_moved", draft=link.name, sessions=len(link.sessions))
                    closed += link.sessions.values()
                elif overdue := link.overdue_openings(now):
                    _log.warning("openings_unanswered", draft=link.name, sessions=len(overdue))
                    closed += overdue
                    for session in overdue:
                        session.sequence.refused_at = now
                    link.pause_openings(now)
                    if self.settings.circuit_breaker:
                        link.circuit_breaker.open(now)
                else:
                    sessions = link.sessions.values()
                    closed += [each for each in sessions if each.is_full(self._lookahead)]
            if not closed and (moved := self._session_to_move(now)):
                _log.info("session_moved", draft=moved.link.name)
                closed.append(moved)
                self._reopening.add(moved.sequence)
            _remove(closed)
        _send_closings(closed)

    def _session_to_move(self, now: float) -> Session | None:
        """Return the session that closes because another link serves it better. Lock held."""
        if len(self._links) < 2 or self._reopening:
            return None
        round_seconds = self._pace.proposed_seconds
        return session_to_move(
            self._links.values(),
            lambda link: sustainable_sessions(
                link.batch_times.seconds_by_sessions, round_seconds, link.max_sessions
            ),
            now,
        )

    def _open(self, sequence: DraftedSequence) -> int:
        """Open a session on the link with the most room, if there is one; return its tokens."""
        now = self._clock.now()
        with self._changed:
            link = choose_link(self._links.values(), sequence, now)
            if link is None:
                return 0
            session = link.add_session(sequence, now)
            self._reopening.discard(sequence)
        tokens = sequence.token_ids
        try:
            opening = replace(sequence.opening, token_ids=tokens, max_len=session.max_len)
            link.send(replace(opening, session=session.number))
        except LinkError as error:
            self.detach(link, str(error))
        return len(tokens)

    def _longest_session(self) -> float:
        """Return the maximum length of a session that a link would open; 0 if none opens any."""
        now = self._clock.now()
        with self._changed:
            return max((longest_session(link, now) for link in self._links.values()), default=0.0)

    def _suspend_silent_links(self, answering: Iterable[Session]) -> list[Session]:
        """Remove and return the sessions of links that send no tables. Lock held.

        A draft whose tables arrive after their rounds is slow: rounds do not wait for it. It is not
        suspended.
        """
        now = self._clock.now()
        oldest = now - SILENT_ROUNDS * self.settings.deadline_seconds
        by_link: dict[DraftLink, list[Session]] = {}
        for session in answering:
            by_link.setdefault(session.link, []).append(session)
        suspended: list[Session] = []
        for link, sessions in by_link.items():
            is_silent = not link.add_round(sessions, now) and link.table_at <= oldest
            if self.settings.circuit_breaker and link.circuit_breaker.add_round(
                now, is_silent=is_silent
            ):
                suspended += link.sessions.values()
                seconds = link.circuit_breaker.open_until - now
                _log.warning("link_quarantined", draft=link.name, seconds=seconds)
        _remove(suspended)
        return suspended

    def _look_up_sequence(
        self,
        tables: TableCollector,
        sequence: DraftedSequence,
        answering: tuple[Session, OutcomeTable | None] | None,
    ) -> Lookup:
        if answering is None:
            sequence.candidates = NO_CANDIDATES
            return without_session(sequence)
        session, table = answering
        lookup = tables.look_up(sequence, table)
        sequence.candidates = lookup.candidates
        if table is not None and sequence.max_proposed:
            self._pace.hits.add(1, bool(lookup.candidates.from_draft))
        session.link.counts.add(lookup.result)
        self.counts.add(lookup.result)
        return lookup


def _remove(sessions: Iterable[Session]) -> None:
    """Remove sessions. Lock held."""
    for session in sessions:
        session.remove()


def _send_closings(sessions: Iterable[Session]) -> None:
    """Close sessions on their drafts. No lock is held, because this sends."""
    for session in sessions:
        session.link.send_closing(session.number)
