"""The next proposal of a sequence: from its table, and from the backup where that ends. Pure.

*Decision*: the backup continues a proposal with fewer than K tokens of a table, while at least
``MIN_ACCEPTANCE`` of its tokens are accepted. *Because*: a slow draft has few columns in time, and
more rows of a verify take little time: 200 tokens of the embedded pair on two cores took 59 rounds
instead of 69 (medians of 5, on a machine in use). *Not chosen*: the longer one of both proposals,
which drops tokens of the table. *Revisit when* the next tables are late because the draft runs such
a proposal in a pass of its own, while it has run a branch already.
"""

from dataclasses import dataclass

from ssd.pool.rounds import NO_DRAFT, NO_TABLE_NEEDED, Lookup
from ssd.pool.sequence import Continuation
from ssd.speculation.backup import WINDOW_TOKENS, Backup
from ssd.speculation.table import OutcomeTable
from ssd.types import Branch, Explicit, LookupResult, TokenId

MIN_ACCEPTANCE = 0.3
"""With less, the rows of a verify are expected to take more time than their tokens save. Estimated
from the times of the embedded target, not tuned."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next proposal of a sequence."""

    branch: int | None
    """The branch of its first tokens; None if the table does not contain the outcome."""
    num_from_table: int
    tokens: tuple[TokenId, ...]

    @property
    def num_from_backup(self) -> int:
        """Tokens after those of the table."""
        return len(self.tokens) - self.num_from_table


def propose(
    after: Continuation, table: OutcomeTable | None, backup: Backup, acceptance: float
) -> Proposal:
    """Return the proposal after an outcome.

    Args:
        after: the sequence and its outcome.
        table: the columns that have arrived; None if none have.
        backup: proposes after a miss, a late table, or the last column of a table.
        acceptance: of tokens of the backup.
    """
    max_tokens = after.max_tokens
    branch = table.look_up(after.outcome) if table is not None else None
    found = () if table is None or branch is None else table.proposal(branch, max_tokens)
    if len(found) == max_tokens or (found and acceptance < MIN_ACCEPTANCE):
        return Proposal(branch, len(found), found)
    text = after.sequence.tokens[-WINDOW_TOKENS:]
    text.extend(found)
    return Proposal(branch, len(found), found + backup(text, max_tokens - len(found)))


def without_session(after: Continuation) -> Lookup:
    """Return the lookup of a sequence that continues and has no open session."""
    return NO_DRAFT if after.max_tokens > 0 else NO_TABLE_NEEDED


def look_up_outcome(after: Continuation, table: OutcomeTable | None, found: Proposal) -> Lookup:
    """Return the lookup of a sequence that continues and has an open session.

    Args:
        after: the sequence and its outcome.
        table: the columns that have arrived; None if none have.
        found: its proposal with these columns.
    """
    if table is None and after.sequence.num_remaining == 1:
        # The next round selects the last token: no round waits for a table.
        return NO_TABLE_NEEDED
    if found.branch is None:
        missed = LookupResult.LATE if table is None else LookupResult.MISS
        return Lookup(missed, Explicit(found.tokens), found.tokens)
    if found.num_from_backup:
        following: Branch | Explicit = Explicit(found.tokens)
    else:
        following = Branch(found.branch, len(found.tokens))
    return Lookup(LookupResult.HIT, following, found.tokens, found.num_from_table)
