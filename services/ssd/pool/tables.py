"""The tables of a round: waiting for columns while it pays, and the next proposals.

*Decision*: the backup continues a proposal with fewer than K tokens of a table, and proposes after
a miss or a late table, while at least ``MIN_ACCEPTANCE`` of its tokens are accepted. *Because*: a
slow draft has few columns in time, and more rows of a verify take little time: 200 tokens of the
embedded pair on two cores took 59 rounds instead of 69 (medians of 5, on a machine in use). *Not
chosen*: to continue a complete table, whose branch the draft has run as it is; and the durations of
rounds with and without proposals, which are of different batch sizes. *Revisit when* the next
tables are late because the draft runs such a proposal in a pass of its own.

*Decision*: where a text repeats itself, the backup replaces a branch if it is expected to keep 5 %
more tokens. *Because*: the 208M pair (T = 0, batch 1) has 145 instead of 124 tokens per second.
*Not chosen*: the longer one of both proposals, since their acceptances differ. *Revisit when* the
draft could prepare for the tokens of the backup, too.
"""

import threading
from collections.abc import Callable, Container
from collections.abc import Sequence as Rows
from dataclasses import replace
from math import ceil, inf

from ssd.pool.link import DraftedSequence, Session
from ssd.pool.rounds import NO_DRAFT, NO_TABLE_NEEDED, Lookup
from ssd.pool.settings import DraftsSettings
from ssd.pool.table_deadline import (
    Prospect,
    RoundPace,
    trial_until,
    wait_until,
    waits_for_first,
)
from ssd.ports import Clock
from ssd.speculation.backup import BACKUPS, WINDOW_TOKENS, Backup, BackupProposal
from ssd.speculation.sources import Candidates, Sources
from ssd.speculation.table import OutcomeTable
from ssd.types import LookupResult

MIN_ACCEPTANCE = 0.3
"""With less, the rows of a verify are expected to take more time than their tokens save. Estimated
from the times of the embedded target, not tuned."""
MOST_SEARCHES = 8
"""About so many texts with hits are searched in a round, and those that repeat themselves. A search
takes 6 to 20 microseconds, which the sequences of large batches would pay for nothing."""
MIN_GAIN = 1.05
"""Gain in tokens for which the backup replaces a hit: the draft has not run its tokens, so the next
table is ready later."""


class TableCollector:
    """Collects the tables of one round. Step thread only.

    ``changed`` is the lock of ``DraftPool``; it is notified when tables arrive or sessions end.
    """

    def __init__(
        self, settings: DraftsSettings, pace: RoundPace, changed: threading.Condition, clock: Clock
    ) -> None:
        self._settings = settings
        self._pace = pace
        self._changed = changed
        self._clock = clock
        self._lookups: dict[DraftedSequence, tuple[OutcomeTable | None, Lookup]] = {}
        """The newest lookup of each sequence, with its table."""
        self._from_backup: dict[DraftedSequence, BackupProposal] = {}
        self._trial_until = 0.0
        self._in_turn: Container[DraftedSequence] = ()
        """Sequences whose text is searched although they have a hit."""

    def collect(
        self, continuing: Rows[DraftedSequence], num_others: int, before_wait: Callable[[], None]
    ) -> tuple[dict[DraftedSequence, tuple[Session, OutcomeTable | None]], float]:
        """Wait for tables while it pays.

        A table that arrives later is late. The lock is held by the caller, and released in waits.

        Args:
            continuing: sequences that continue.
            num_others: continuing sequences that are not in the pool; the wait delays them too.
            before_wait: called once if the round waits.

        Returns:
            The open sessions with their tables, by sequence, and the seconds of the wait. A wait
            counts up to the deadline; the rest is a pause of the machine.
        """
        period = max(1, ceil(len(continuing) / MOST_SEARCHES))
        self._in_turn = set(continuing[self._pace.sources.num_rounds % period :: period])
        begun_at = now = self._clock.now()
        deadline = begun_at + self._settings.deadline_seconds
        while (until := min(deadline, self._until(continuing, num_others, begun_at, now))) > now:
            if now == begun_at:
                before_wait()
            is_notified = self._changed.wait(until - now)
            now = self._clock.now()
            if not is_notified:
                break
        if now > begun_at:
            self._pace.add_wait()
        sessions = (sequence.session for sequence in continuing)
        answering = {
            session.sequence: (session, session.table)
            for session in sessions
            if session and session.is_open
        }
        return answering, min(now - begun_at, self._settings.deadline_seconds)

    def look_up(self, sequence: DraftedSequence, table: OutcomeTable | None) -> Lookup:
        """Return the lookup of a sequence; it is made once for each column."""
        newest = self._lookups.get(sequence)
        if newest is None or newest[0] is not table:
            backup = BACKUPS[self._settings.backup]
            branch = None if table is None else table.look_up(sequence.outcome)
            # The text of a hit is searched if it repeats itself, or if it is its turn.
            is_searched = sequence.candidates.repeats or sequence in self._in_turn
            if sequence not in self._from_backup and (branch is None or is_searched):
                text = sequence.newest_tokens[-WINDOW_TOKENS:]
                self._from_backup[sequence] = backup(text, sequence.max_proposed)
            from_backup = self._from_backup.get(sequence, BackupProposal())
            found = look_up(sequence, table, branch, backup, from_backup, self._pace.sources)
            newest = self._lookups[sequence] = table, found
        return newest[1]

    def _until(
        self, continuing: Rows[DraftedSequence], num_others: int, begun_at: float, now: float
    ) -> float:
        """Return the time until which the round waits for a column."""
        prospects = [
            session.prospect(self.look_up(sequence, session.table), sequence.max_proposed)
            for sequence in continuing
            if (session := sequence.session) is not None and session.is_open
        ]
        if not any(prospect.num_columns for prospect in prospects):
            return now
        prospects += [Prospect(0)] * (len(continuing) + num_others - len(prospects))
        if not self._settings.adaptive_deadline:
            return inf
        deadline = begun_at + self._settings.deadline_seconds
        in_time = [
            prospect if prospect.next_at <= deadline else replace(prospect, num_columns=0.0)
            for prospect in prospects
        ]
        if now == begun_at:
            self._trial_until = trial_until(in_time, self._pace, begun_at)
        until = wait_until(in_time, self._pace, begun_at, now)
        return max(until, self._trial_until) if any(map(waits_for_first, in_time)) else until


def without_session(sequence: DraftedSequence) -> Lookup:
    """Return the lookup of a sequence that continues and has no open session."""
    return NO_DRAFT if sequence.max_proposed > 0 else NO_TABLE_NEEDED


def look_up(
    sequence: DraftedSequence,
    table: OutcomeTable | None,
    branch: int | None,
    backup: Backup,
    from_backup: BackupProposal,
    sources: Sources,
) -> Lookup:
    """Return the lookup of a sequence that continues and has an open session.

    The result is ``BACKUP`` where the backup replaces complete branches, also if this one is
    missing, or has the same tokens: it does not depend on the outcome.

    Args:
        sequence: after a round that did not end it.
        table: the columns that have arrived; None if none have.
        branch: the branch of the outcome in the table; None if there is none.
        backup: continues a proposal with fewer tokens than the table will have.
        from_backup: its proposal for the next round, for a miss, a late table or a text that
            repeats itself.
        sources: their acceptances.
    """
    if table is None and sequence.num_remaining == 1:
        # The next round selects the last token: no round waits for a table.
        return NO_TABLE_NEEDED
    max_tokens = sequence.max_proposed
    _, acceptance = sources.acceptances(repeats=from_backup.repeats)
    from_table = () if table is None or branch is None else table.proposal(branch, max_tokens)
    if not (from_table or acceptance >= MIN_ACCEPTANCE or sources.is_trial):
        # Without a proposal, the round would test only the first token, which is accepted less
        # often than those after it.
        from_backup = from_backup._replace(tokens=())
    candidates = Candidates(from_table, *from_backup)
    replaces_branch = _replaces_branch(from_backup, max_tokens, 0, sources)
    if branch is None:
        result = LookupResult.LATE if table is None else LookupResult.MISS
        result = LookupResult.BACKUP if replaces_branch else result
        return Lookup(result, from_backup.tokens, candidates=candidates)
    result = LookupResult.BACKUP if replaces_branch else LookupResult.HIT
    has_more = table is not None and len(from_table) < min(table.length, max_tokens)
    num_continued = max_tokens - len(from_table) if has_more and acceptance >= MIN_ACCEPTANCE else 0
    is_equal = from_backup.tokens == from_table
    if not is_equal and _replaces_branch(from_backup, len(from_table), num_continued, sources):
        return Lookup(result, from_backup.tokens, candidates=candidates)
    tokens = from_table or from_backup.tokens
    if from_table and num_continued:
        text = sequence.newest_tokens[-WINDOW_TOKENS:]
        text.extend(from_table)
        tokens += backup(text, num_continued).tokens
    return Lookup(
        result,
        tokens,
        num_from_table=len(from_table),
        is_branch=len(tokens) == len(from_table),
        candidates=candidates,
    )


def _replaces_branch(
    from_backup: BackupProposal, num_branch: int, num_continued: int, sources: Sources
) -> bool:
    """Return whether the backup proposes instead of a branch.

    Args:
        from_backup: its proposal.
        num_branch: tokens of the branch.
        num_continued: tokens of the backup that would continue it.
        sources: their acceptances.
    """
    if not from_backup.repeats:
        return False
    of_branch = sources.expected_tokens(num_branch, num_continued, repeats=True)
    of_backup = sources.expected_tokens(0, len(from_backup.tokens), repeats=True)
    return of_backup > MIN_GAIN * of_branch
