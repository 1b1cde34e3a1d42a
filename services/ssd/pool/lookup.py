"""The next proposal of a sequence: from its table, and from the backup where that ends. Pure.

*Decision*: the backup continues a proposal with fewer than K tokens of a table, while at least
``MIN_ACCEPTANCE`` of its tokens are accepted. *Because*: a slow draft has few columns in time, and
more rows of a verify take little time: 200 tokens of the embedded pair on two cores took 59 rounds
instead of 69 (medians of 5, on a machine in use). *Not chosen*: the longer one of both proposals,
which drops tokens of the table; to continue a complete table, whose branch the draft has run as it
is. *Revisit when* the next tables are late because the draft runs such
a proposal in a pass of its own, while it has run a branch already.
"""

from ssd.pool.link import DraftedSequence
from ssd.pool.rounds import NO_DRAFT, NO_TABLE_NEEDED, Lookup
from ssd.speculation.backup import WINDOW_TOKENS, Backup
from ssd.speculation.table import OutcomeTable
from ssd.types import LookupResult

MIN_ACCEPTANCE = 0.3
"""With less, the rows of a verify are expected to take more time than their tokens save. Estimated
from the times of the embedded target, not tuned."""


def without_session(sequence: DraftedSequence) -> Lookup:
    """Return the lookup of a sequence that continues and has no open session."""
    return NO_DRAFT if sequence.max_tokens > 0 else NO_TABLE_NEEDED


def look_up(
    sequence: DraftedSequence, table: OutcomeTable | None, backup: Backup, acceptance: float
) -> Lookup:
    """Return the lookup of a sequence that continues and has an open session.

    Args:
        sequence: after a round that did not end it.
        table: the columns that have arrived; None if none have.
        backup: proposes after a miss, a late table, or the last column of a table.
        acceptance: of tokens of the backup.
    """
    if table is None and sequence.num_remaining == 1:
        # The next round selects the last token: no round waits for a table.
        return NO_TABLE_NEEDED
    max_tokens = sequence.max_tokens
    branch = table.look_up(sequence.outcome) if table is not None else None
    found = () if table is None or branch is None else table.proposal(branch, max_tokens)
    tokens = found
    has_more = table is not None and len(found) < table.length
    if len(found) < max_tokens and (not found or (has_more and acceptance >= MIN_ACCEPTANCE)):
        text = sequence.tokens[-WINDOW_TOKENS:]
        text.extend(found)
        tokens += backup(text, max_tokens - len(found))
    if branch is None:
        result = LookupResult.LATE if table is None else LookupResult.MISS
        return Lookup(result, tokens)
    is_branch = len(tokens) == len(found)
    return Lookup(LookupResult.HIT, tokens, len(found), branch if is_branch else None)
