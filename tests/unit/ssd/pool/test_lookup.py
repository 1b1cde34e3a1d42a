"""The next proposal of one sequence: branch, backup or none."""

from dataclasses import replace

import numpy as np
import pytest

from ssd.link_channel import LinkChannel
from ssd.pool.link import Answer, DraftLink
from ssd.pool.lookup import look_up_outcome, propose, without_session
from ssd.pool.rounds import NO_DRAFT, NO_TABLE_NEEDED, Lookup, NewSequence, RoundResult
from ssd.pool.sequence import DraftedSequence, continuation
from ssd.pool.session_registry import SessionRegistry
from ssd.speculation.table import OutcomeTable
from ssd.transport.inprocess import pair
from ssd.types import (
    Branch,
    Explicit,
    LookupResult,
    Outcome,
    Welcome,
)

LOOKAHEAD = 3
TABLE = OutcomeTable(
    session=1,
    base_len=2,
    accepted_N=np.array([0, 1], dtype=np.int32),
    bonus_N=np.array([7, 7], dtype=np.int32),
    tokens_NK=np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32),
)


def answer(table: OutcomeTable | None) -> Answer:
    welcome = Welcome(epoch=1, max_sessions=1, lookahead=LOOKAHEAD, branches=2)
    link = DraftLink("draft", welcome, LinkChannel(pair()[0]), lambda _message: None)
    return SessionRegistry().add(link, 1, 2, 0.0, 9), table


def look_up(
    found: Answer | None,
    outcome: Outcome,
    *,
    remaining: int = 10,
    acceptance: float = 0.5,
) -> Lookup:
    new = NewSequence(sequence_id=1, token_ids=(8, 9), max_len=2 + remaining, seed=0)
    # What the round appended is in the text already.
    verified = RoundResult(1, (), 0, outcome, is_finished=False, max_proposed=LOOKAHEAD)
    after = continuation(DraftedSequence(new), verified, LOOKAHEAD)
    assert after is not None
    if found is None:
        return without_session(after)
    _, table = found
    proposal = propose(after, table, lambda text, num: tuple(text[:num]), acceptance)
    return look_up_outcome(after, table, proposal)


def test_a_hit_proposes_the_tokens_of_the_branch() -> None:
    assert look_up(answer(TABLE), Outcome(1, 7)) == Lookup(
        LookupResult.HIT, Branch(1, 3), (4, 5, 6), 3
    )


@pytest.mark.parametrize(("remaining", "tokens"), [(3, (4, 5)), (2, (4,)), (1, ())])
def test_a_proposal_leaves_room_for_the_bonus_token(
    remaining: int, tokens: tuple[int, ...]
) -> None:
    lookup = look_up(answer(TABLE), Outcome(1, 7), remaining=remaining)
    assert lookup == Lookup(LookupResult.HIT, Branch(1, len(tokens)), tokens, len(tokens))


def test_the_backup_continues_a_table_with_few_columns() -> None:
    first_column = replace(TABLE, tokens_NK=np.array([[1, -1, -1], [4, -1, -1]], dtype=np.int32))
    tokens = (4, 8, 9)
    assert look_up(answer(first_column), Outcome(1, 7)) == Lookup(
        LookupResult.HIT, Explicit(tokens), tokens, 1
    )
    # Without use if its tokens are rejected.
    assert look_up(answer(first_column), Outcome(1, 7), acceptance=0.1) == Lookup(
        LookupResult.HIT, Branch(1, 1), (4,), 1
    )


def test_a_miss_and_a_late_table_propose_the_backup() -> None:
    backup = Explicit((8, 9))
    assert look_up(answer(TABLE), Outcome(2, 7)) == Lookup(LookupResult.MISS, backup, (8, 9))
    assert look_up(answer(None), Outcome(1, 7)) == Lookup(LookupResult.LATE, backup, (8, 9))


def test_no_table_is_late_before_the_last_token() -> None:
    assert look_up(answer(None), Outcome(1, 7), remaining=1) == NO_TABLE_NEEDED


def test_without_an_open_session_there_is_no_proposal() -> None:
    assert look_up(None, Outcome(1, 7)) == NO_DRAFT
    assert look_up(None, Outcome(1, 7), remaining=1) == NO_TABLE_NEEDED
