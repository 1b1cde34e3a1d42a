"""The draft's step: read events, then a turn of one link.

A turn applies the commits of the link, then runs one pass of a tree or stores one prefill chunk.
The links share the time, see ``fair_turns``.

A table is sent once, when it is complete, if the next commit is expected after that. Otherwise it
is sent at the last step before that commit and after each later step. A commit ends the table of
its session at the next step. Everything here runs on the step thread.

*Decision*: after columns that are sent late, the draft waits for the commit, for at most 2 ms and
half a step. *Because*: the target waits for these columns, and the commit that follows them would
otherwise arrive just after the start of a step, which it makes useless. *Not chosen*: to end a pass
that runs. *Revisit when* targets often wait for more columns although they have some.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from statistics import median

import numpy as np

from ssd.errors import LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import (
    DRAFT_SESSIONS,
    DRAFT_TABLE_SECONDS,
    TABLE_BRANCHES,
    TABLE_COLUMNS,
    WIRE_TO_TABLE_SECONDS,
)
from ssd.ports import Clock
from ssd.runtime.step_thread import Watchdog
from ssd.speculation.estimates import Acceptance
from ssd.speculation.table import OutcomeTable
from ssd.types import CloseSession, Commit, OpenSession, RefusalReason
from ssd_draft.commit_forecast import CommitForecast
from ssd_draft.fair_turns import FairTurns
from ssd_draft.fan_out_learning import FanOutLearning
from ssd_draft.inbox import Event, Inbox, LinkChange
from ssd_draft.link_work import Batch, LinkWork, opening_due
from ssd_draft.sessions import GapError, LinkEnd, Move, Session, Sessions
from ssd_draft.table_build import TableBuild
from ssd_draft.table_size import Need, Size, SizeChoice
from ssd_draft.tree import Tree

_log = get_logger(__name__)
_REMEMBERED_TABLES = 64
_TEXT_DECAY = 0.9
"""Weight of the tokens of earlier rounds in the acceptance of a text, for each round that follows.
Texts differ by a factor of three, and so do the parts of one text."""
_SEND_SECONDS = 0.001
"""Time that a frame takes to its target, beside the model on a busy machine."""
_ANSWER_SECONDS = 0.002
"""Maximum time for which the draft waits for the commit that follows late columns."""
_WEIGHT = 0.125
"""Weight of the newest step in the mean duration of a step."""
MAX_PENDING = 128
"""Largest number of commits of one session that wait. A target sends one commit per round and stops
after three rounds without a table. Beyond this bound, the session is closed with "gap"."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """Owns the sessions and their KV entries. Step thread only.

    Any thread may read ``num_sessions`` and ``table_seconds`` and call ``start_draining``.
    """

    inbox: Inbox
    sessions: Sessions
    tree: Tree
    learning: FanOutLearning
    sizes: SizeChoice
    clock: Clock
    on_count: Callable[[int], None]
    """Called with the number of sessions after each change."""
    watchdog: Watchdog
    added_step_seconds: float = 0.0
    """Fault injection: the time by which each step of a tree is longer."""

    def __post_init__(self) -> None:
        self.num_sessions = 0
        self._recent_seconds: deque[float] = deque([0.0], _REMEMBERED_TABLES)
        self._work: defaultdict[int, LinkWork] = defaultdict(LinkWork)
        """Work by number of the link."""
        self._turns = FairTurns()
        self._is_draining = False

    @property
    def table_seconds(self) -> float:
        """Median seconds from the arrival of a commit to its complete table.

        A table that ends early counts with the time that its other columns would have taken.
        """
        return median(self._recent_seconds.copy())

    def start_draining(self) -> None:
        """Refuse sessions from now on."""
        self._is_draining = True

    def run(self) -> None:
        """Serve until the inbox is closed."""
        while not self.inbox.is_closed:
            if not self.run_step():
                with self.watchdog.idle():
                    self.inbox.wait()
        self.learning.save()

    def run_step(self) -> bool:
        """Read the events and take a turn of one link; returns False if there was no work."""
        self.watchdog.heartbeat()
        events = self.inbox.drain()
        for event in events:
            self._handle(event)
        self._publish()
        waiting = self._waiting_links()
        if not waiting:
            return self.tree.fill_ahead() or self.learning.learn() or bool(events)
        link = self._turns.next(waiting)
        begun_at = self.clock.now()
        self._take_turn(link, waiting)
        self._publish()
        self._turns.add_turn(link, self.clock.now() - begun_at)
        return True

    def _waiting_links(self) -> set[int]:
        """Return the links for which there is work."""
        return {
            session.link.number
            for session in self.sessions
            if session.table is None or session.pending or not session.is_open
        } | {number for number, work in self._work.items() if work.batches}

    def _take_turn(self, number: int, waiting: set[int]) -> None:
        """Apply the commits of a link, then run a step of its tables or store a prefill chunk."""
        work = self._work[number]
        work.resumed_at = self.clock.now()
        self._end_batches(work)
        self._advance(self.sessions.of(number))
        self._close_broken()
        sessions = self.sessions.of(number)
        due = [session for session in sessions if session.is_due]
        opening = opening_due(work, sessions, is_busy=bool(due or work.batches))
        if opening is not None:
            work.batches_since_chunk = 0
            self._prefill(opening)
        else:
            if due:
                work.batches_since_chunk += 1
                self._begin(due)
            if work.batches:
                self._run_batch(work, waiting)
        work.add_work(self.clock.now())

    def _handle(self, event: Event) -> None:
        link, content = event.link, event.content
        match content:
            case LinkChange.UP:
                self.sessions.join(link)
            case LinkChange.LOST:
                self.sessions.leave(link)
                self._work.pop(link.number, None)
                self._turns.remove(link.number)
                for session in self.sessions.of(link.number):
                    self._close(session)
            case OpenSession():
                self._open(link, content, event.arrived_at)
            case CloseSession():
                ended = self.sessions.find(link, content.session)
                if ended is not None:
                    self._close(ended)
            case commits:
                self._queue(link, commits, event.arrived_at)

    def _queue(self, link: LinkEnd, commits: Rows[Commit], arrived_at: float) -> None:
        """Queue the commits of a frame for their sessions."""
        waited_us = max((commit.waited_us for commit in commits), default=0)
        self._work[link.number].forecast.add_commits(
            arrived_at, waited_us / 1e6, is_plain=not any(commit.tokens for commit in commits)
        )
        for commit in commits:
            session = self.sessions.find(link, commit.session)
            if session is None:
                continue
            if len(session.pending) >= MAX_PENDING:
                _log.info("session_gap", session=session.number, reason="too far behind")
                self._refuse(session, RefusalReason.GAP)
            else:
                session.pending.append(commit)
                session.arrived_at, session.has_commit = arrived_at, True
                session.length = commit.length

    def _open(self, link: LinkEnd, opening: OpenSession, arrived_at: float) -> None:
        if self._is_draining:
            link.refuse(opening.session, RefusalReason.DRAINING)
            return
        try:
            admitted = self.sessions.open(link, opening, arrived_at)
        except LinkError as error:
            link.fail(error)
            return
        if isinstance(admitted, RefusalReason):
            link.refuse(opening.session, admitted)
            return
        admitted.acceptance = Acceptance(self._work[link.number].acceptance.rate, _TEXT_DECAY)
        self.tree.open(admitted.slot, admitted.blocks, opening, admitted.num_stored)

    def _advance(self, sessions: Rows[Session]) -> None:
        """Apply the waiting commits of some sessions together.

        Commits of one session without a branch are applied as one. All commits take at most two
        passes, whatever a target sends, and a third pass stores the tokens of the session that is
        farthest behind; the rest waits for the next step. While a session opens, commits need no
        pass.
        """
        for opening in [session for session in sessions if not session.is_open]:
            while opening.pending and (move := self._take_commit(opening)) is not None:
                opening.apply(move)
        behind = [session for session in sessions if session.is_open and session.pending]
        farthest = max(behind, key=lambda session: len(session.pending), default=None)
        moves_or_none = [
            self._apply_commits(session, stores=session is farthest) for session in behind
        ]
        planned = zip(behind, moves_or_none, strict=True)
        moving = [(session, move) for session, move in planned if move is not None]
        if moving:
            slots, moves = [session.slot for session, _ in moving], [move for _, move in moving]
            self.learning.add(self.tree.rounds_of(slots, moves))
            self.tree.advance(slots, moves)

    def _apply_commits(self, session: Session, *, stores: bool) -> Move | None:
        """Apply commits of a session and return their effect; None if the session was closed.

        The effect may contain tokens that no pass has run: as many as a proposal has columns, and
        with ``stores`` as many as a chunk of a prompt has.
        """
        combined: Move | None = None
        most_skipped = self.tree.engine.num_columns
        if stores:
            most_skipped = max(most_skipped, self.tree.engine.prefill_chunk)
        while session.pending:
            if combined is not None:
                num_skipped = len(combined.skipped) + session.pending[0].outcome.accepted + 1
                if combined.branch is not None or num_skipped > most_skipped:
                    break
            move = self._take_commit(session)
            if move is None:
                return None
            session.apply(move)
            combined = move if combined is None else combined.then(move)
        return combined

    def _take_commit(self, session: Session) -> Move | None:
        """Remove the next commit from the queue and return its effect.

        A commit that cannot be applied closes the session and returns None.
        """
        commit = session.pending.popleft()
        num_from_table, num_accepted = session.num_from_table, commit.outcome.accepted
        try:
            move = session.plan(commit)
        except GapError as error:
            _log.info("session_gap", session=session.number, reason=str(error))
            self._refuse(session, RefusalReason.GAP)
            return None
        if not self.sessions.has_room(session, move.num_entries):
            self._refuse(session, RefusalReason.LENGTH)
            return None
        of_table = min(num_accepted + 1, num_from_table), min(num_accepted, num_from_table)
        session.acceptance.add(*of_table)
        self._work[session.link.number].acceptance.add(*of_table)
        return move

    def _prefill(self, session: Session) -> None:
        """Store one aligned chunk of a prompt; after the last chunk, the session is open."""
        if self.sessions.share(session):
            self.tree.place(session.slot, session.blocks, session.num_stored)
        first, chunk = session.num_stored, self.tree.engine.prefill_chunk
        last = min(session.num_committed - 1, first - first % chunk + chunk)
        if first < last:
            self.tree.store(session.slot, first, session.tokens[first:last])
            session.num_stored = last
            if not self.tree.is_broken_X[session.slot]:
                self.sessions.offer(session, last)
        if session.num_to_store == 0:
            self.tree.start(session.slot, session.tokens[-1], session.proposal)
            session.is_open = True
            if not session.has_commit:
                # Its first table is expected from now on, not since the prompt was sent.
                session.arrived_at = self.clock.now()

    def _begin(self, due: list[Session]) -> None:
        """Begin the tables of these sessions of one link in one batch."""
        begun_at = self.clock.now()
        link, slots = due[0].link, [session.slot for session in due]
        work = self._work[link.number]
        policy = self.learning.policy_of(link.settings.fan_out_policy)
        outcomes = self.tree.select_outcomes(slots, policy)
        spent = begun_at - min(session.arrived_at for session in due) + _SEND_SECONDS
        wanted = max(session.length or self.tree.engine.lookahead for session in due)
        need = None
        if work.forecast.seconds > 0:
            acceptances = tuple(session.acceptance.rate for session in due)
            need = Need(work.forecast.seconds, spent, acceptances, wanted)
        lengths = self.tree.table_lengths(len(due), wanted)
        size = self.sizes.choose(len(due), lengths, need, outcomes.probability_BN)
        TABLE_BRANCHES.set(size.branches)
        TABLE_COLUMNS.set(size.length)
        build = self.tree.begin_tables(slots, outcomes.first(size.branches), size.length)
        arrivals = [session.arrived_at for session in due]
        is_timed = all(session.has_table for session in due)
        for row, session in enumerate(due):
            session.table, session.has_table = _table(session, build, row), True
        work.batches.append(Batch(due, arrivals, build, begun_at, is_timed=is_timed))

    def _run_batch(self, work: LinkWork, waiting: set[int]) -> None:
        """Run one pass of the next batch of a link, and send its tables if it is time."""
        batch = work.batches.popleft()
        build, old_depth = batch.build, batch.build.depth
        work.add_work(self.clock.now())
        seconds = self._run_pass(build)
        now = self.clock.now()
        work.add_steps(batch, now)
        weight = _WEIGHT if work.step_seconds else 1.0
        work.step_seconds += weight * (seconds - work.step_seconds)
        if build.is_complete:
            work.end_batch(batch)
        else:
            work.batches.append(batch)
        if build.depth == old_depth:
            # The last step chooses no column; on a device, the first step is not read yet.
            return
        # Before the next step ends, each other link that waits may run steps for as long, or one.
        others = (self._work[number].step_seconds for number in waiting)
        next_at = now + sum(max(work.step_seconds, seconds) for seconds in others)
        needed_at = _needed_at(batch.sessions, work.forecast)
        # The next turn may also be a prefill chunk, which takes longer.
        is_opening = not all(session.is_open for session in self.sessions)
        is_begun = batch.sent_depth > 0 or is_opening
        is_sent = build.depth == build.length or is_begun or next_at > needed_at
        if is_sent:
            self._push(batch, now)
        # The target may wait for the columns, and for nothing below.
        self._add_times(batch, old_depth, now)
        if is_sent and now > needed_at and self._has_time(work, waiting):
            work.add_work(self.clock.now())
            self.inbox.wait(min(_ANSWER_SECONDS, work.step_seconds / 2))
            work.resumed_at = self.clock.now()
        # A wait is not a part of the next step.
        batch.stepped_at = self.clock.now()

    def _run_pass(self, build: TableBuild) -> float:
        """Run one pass of a batch of tables; returns the seconds of each of its steps."""
        begun_at, old_steps = self.clock.now(), build.num_steps
        # The added time applies to each step, and a whole table has only one.
        if not (old_steps or self.added_step_seconds) and self.tree.can_run_whole(build):
            self.tree.run_whole(build)
        else:
            self.tree.run_step(build)
        if self.added_step_seconds:
            threading.Event().wait(self.added_step_seconds)
        return (self.clock.now() - begun_at) / (build.num_steps - old_steps)

    def _add_times(self, batch: Batch, old_depth: int, now: float) -> None:
        """Add the time of the newest columns of a batch, and of its tables if they are complete."""
        build = batch.build
        size = len(batch.sessions), Size(build.branches, build.length)
        if old_depth == 0:
            self.sizes.add_first(*size, now - batch.begun_at, build.depth)
        else:
            # Steps are timed from column to column: other links have turns between them.
            self.sizes.add_step(*size, now - batch.stepped_at)
        if build.depth == build.length:
            DRAFT_TABLE_SECONDS.observe(now - batch.begun_at)
            self._add_table_seconds(batch, batch.arrivals, now)

    def _has_time(self, work: LinkWork, waiting: set[int]) -> bool:
        """Return whether nothing but the step of one batch waits, and a commit is expected."""
        is_alone = len(waiting) == len(work.batches) == 1
        are_all_open = all(session.is_open for session in self.sessions)
        return is_alone and are_all_open and work.forecast.seconds > 0

    def _push(self, batch: Batch, now: float) -> None:
        """Send the columns of a batch in one frame."""
        tables = [
            session.table
            for session in batch.sessions
            if session.is_open and session.table and not self.tree.is_broken_X[session.slot]
        ]
        if tables:
            batch.sessions[0].link.push(tables)
        if not batch.sent_depth:
            for arrived_at in batch.arrivals:
                WIRE_TO_TABLE_SECONDS.observe(now - arrived_at)
        batch.sent_depth = batch.build.depth

    def _end_batches(self, work: LinkWork) -> None:
        """End the tables of the sessions of a link that have commits or are closed."""
        for batch in work.batches:
            rows = [
                row
                for row, session in enumerate(batch.sessions)
                if session.is_open and not session.pending
            ]
            if len(rows) == len(batch.sessions):
                continue
            if 0 < batch.build.depth < batch.build.length:
                pairs = zip(batch.sessions, batch.arrivals, strict=True)
                ended = [time for session, time in pairs if session.is_open and session.pending]
                self._add_table_seconds(batch, ended, self.clock.now())
            if not rows:
                work.end_batch(batch)
            batch.sessions = [batch.sessions[row] for row in rows]
            batch.arrivals = [batch.arrivals[row] for row in rows]
            self.tree.keep(batch.build, rows)
        work.batches = deque(batch for batch in work.batches if batch.sessions)

    def _add_table_seconds(self, batch: Batch, arrivals: Rows[float], now: float) -> None:
        """Add the time of tables that get no more columns, from the commits that they answer."""
        factor = batch.build.length / batch.build.depth
        for arrived_at in arrivals:
            self._recent_seconds.append((now - arrived_at) * factor)

    def _refuse(self, session: Session, reason: RefusalReason) -> None:
        session.link.refuse(session.number, reason)
        self._close(session)

    def _close_broken(self) -> None:
        """Close the sessions for which the model computed NaN or infinity."""
        if self.tree.is_broken_X.any():
            broken = [session for session in self.sessions if self.tree.is_broken_X[session.slot]]
            for session in broken:
                _log.warning("session_not_finite", session=session.number)
                self._refuse(session, RefusalReason.NOT_FINITE)

    def _close(self, session: Session) -> None:
        session.pending.clear()
        session.is_open = False
        is_broken = self.tree.is_broken_X[session.slot]
        num_stored = 0 if is_broken else self.tree.num_stored(session.slot)
        self.tree.close(session.slot)
        self.sessions.close(session, num_stored)

    def _publish(self) -> None:
        if self.num_sessions != len(self.sessions):
            self.num_sessions = len(self.sessions)
            DRAFT_SESSIONS.set(self.num_sessions)
            self.on_count(self.num_sessions)


def _needed_at(sessions: Rows[Session], forecast: CommitForecast) -> float:
    """Return when the first tables of a batch must be sent."""
    return min(session.arrived_at for session in sessions) + forecast.seconds - _SEND_SECONDS


def _table(session: Session, build: TableBuild, row: int) -> OutcomeTable:
    """Return the table of a session; its columns appear while it is built."""
    outcomes = build.outcomes
    count = int(outcomes.num_branches_B[row])
    return OutcomeTable(
        session=session.number,
        base_len=session.num_committed,
        accepted_N=outcomes.accepted_BN[row, :count].astype(np.int32),
        bonus_N=outcomes.bonus_BN[row, :count].astype(np.int32),
        tokens_NK=build.tables_BNK[row, :count],
        length=build.length,
    )
