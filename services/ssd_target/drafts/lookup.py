"""The next proposal of a sequence: from its table, or from the backup. Pure."""

from ssd.speculation.backup import Backup
from ssd.types import Branch, Explicit, LookupResult
from ssd_target.decoding.round_result import NO_DRAFT, NO_TABLE_NEEDED, Lookup, RoundResult
from ssd_target.drafts.tables import Answer


def look_up_outcome(
    result: RoundResult, answer: Answer | None, lookahead: int, backup: Backup
) -> Lookup:
    """Return the lookup of one outcome.

    Args:
        result: of a sequence that continues.
        answer: None if the sequence has no open session.
        lookahead: tokens of a full proposal (K).
        backup: proposes after a miss or a late table.
    """
    max_tokens = result.max_tokens(lookahead)
    if answer is None:
        needs_table = result.sequence.may_speculate and max_tokens > 0
        return NO_DRAFT if needs_table else NO_TABLE_NEEDED
    _, table = answer
    if table is None and result.sequence.num_remaining == 1:
        # The next round selects the last token: no round waits for a table.
        return NO_TABLE_NEEDED
    index = table.look_up(result.outcome) if table is not None else None
    if table is not None and index is not None:
        tokens = table.proposal(index, max_tokens)
        return Lookup(LookupResult.HIT, Branch(index, len(tokens)), tokens)
    tokens = backup(result.sequence.tokens, max_tokens)
    missed = LookupResult.LATE if table is None else LookupResult.MISS
    return Lookup(missed, Explicit(tokens), tokens)
