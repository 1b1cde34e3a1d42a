"""The next proposal of one sequence: branch, backup or none."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.unit.ssd.pool.links import link, sequence
from tests.unit.ssd.speculation.measured import measure

from ssd.pool import tables
from ssd.pool.link import DraftedSequence, Session
from ssd.pool.rounds import (
    NO_DRAFT,
    NO_TABLE_NEEDED,
    Lookup,
    RoundResult,
)
from ssd.pool.settings import DraftsSettings
from ssd.pool.table_deadline import Prospect, RoundPace
from ssd.pool.tables import MOST_SEARCHES, TableCollector, without_session
from ssd.speculation.backup import BACKUPS, BackupProposal
from ssd.speculation.sources import NO_CANDIDATES, TRIAL_ROUNDS, Candidates, Sources
from ssd.speculation.table import OutcomeTable
from ssd.testing.clock import FakeClock
from ssd.types import LookupResult, Outcome

LOOKAHEAD = 3
TABLE = OutcomeTable(
    session=1,
    base_len=2,
    accepted_N=np.array([0, 1], dtype=np.int32),
    bonus_N=np.array([7, 7], dtype=np.int32),
    tokens_NK=np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32),
    length=3,
)
PART = replace(TABLE, tokens_NK=np.array([[1, -1, -1], [4, -1, -1]], dtype=np.int32))
EQUAL = replace(TABLE, tokens_NK=np.array([[1, 2], [8, 9]], dtype=np.int32), length=2)
"""A branch has the tokens of the backup."""


def look_up(
    table: OutcomeTable | None,
    outcome: Outcome,
    *,
    remaining: int = 10,
    of_backup: float = 0.5,
    of_tables: float = 0.8,
    repeats: bool = False,
) -> Lookup:
    """Look up with a backup that repeats the text from its first token."""

    def backup(text: Rows[int], num: int) -> BackupProposal:
        return BackupProposal(tuple(text[:num]), repeats)

    after, sources = continued(outcome, remaining), Sources()
    measure(sources, of_tables, of_backup, repeats=repeats)
    found = backup(after.newest_tokens, after.max_proposed)
    branch = None if table is None else table.look_up(outcome)
    lookup = tables.look_up(after, table, branch, backup, found, sources)
    return replace(lookup, candidates=NO_CANDIDATES)


def continued(outcome: Outcome, remaining: int = 10) -> DraftedSequence:
    after = sequence(2, remaining)
    # What the round appended is in the text already.
    after.add_round(
        RoundResult(1, (), 0, outcome, is_finished=False, max_proposed=LOOKAHEAD), LOOKAHEAD
    )
    return after


def hit(tokens: tuple[int, ...], num_from_table: int) -> Lookup:
    is_branch = num_from_table == len(tokens)
    return Lookup(LookupResult.HIT, tokens, num_from_table=num_from_table, is_branch=is_branch)


def test_a_hit_proposes_the_tokens_of_the_branch() -> None:
    assert look_up(TABLE, Outcome(1, 7)) == hit((4, 5, 6), 3)


@pytest.mark.parametrize(("remaining", "tokens"), [(3, (4, 5)), (2, (4,)), (1, ())])
def test_a_proposal_leaves_room_for_the_bonus_token(
    remaining: int, tokens: tuple[int, ...]
) -> None:
    lookup = look_up(TABLE, Outcome(1, 7), remaining=remaining)
    assert lookup == hit(tokens, len(tokens))


def test_the_backup_continues_a_table_with_few_columns() -> None:
    tokens = (4, 8, 9)
    assert look_up(PART, Outcome(1, 7)) == hit(tokens, 1)
    # Without use if its tokens are rejected.
    assert look_up(PART, Outcome(1, 7), of_backup=0.1) == hit((4,), 1)


def test_the_backup_does_not_continue_a_complete_table() -> None:
    """The draft has run its branch as it is."""
    tokens_NK = np.array([[1, -1, -1], [4, -1, -1]], dtype=np.int32)
    complete = replace(TABLE, tokens_NK=tokens_NK, length=1)
    assert look_up(complete, Outcome(1, 7)) == hit((4,), 1)


def test_a_miss_and_a_late_table_propose_the_backup() -> None:
    assert look_up(TABLE, Outcome(2, 7)) == Lookup(LookupResult.MISS, (8, 9))
    assert look_up(None, Outcome(1, 7)) == Lookup(LookupResult.LATE, (8, 9))


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("is_trial", [False, True])
def test_a_backup_that_is_rarely_accepted_proposes_in_trials_and_is_measured_there(
    *, repeats: bool, is_trial: bool
) -> None:
    """In other rounds, only its first token would be tested. After a hit, more tokens are."""
    sources, after = Sources(), continued(Outcome(1, 7))
    measure(sources, 0.8, 0.2, repeats=repeats)
    sources.num_rounds = TRIAL_ROUNDS if is_trial else 1
    found = BackupProposal((8, 9), repeats)
    for table, branch, tokens, candidates in (
        (TABLE, None, (8, 9) * is_trial, ((), (8, 9) * is_trial, repeats)),
        (None, None, (8, 9) * is_trial, ((), (8, 9) * is_trial, repeats)),
        (TABLE, 1, (4, 5, 6), ((4, 5, 6), (8, 9), repeats)),
    ):
        lookup = tables.look_up(after, table, branch, BACKUPS["ngram"], found, sources)
        assert (lookup.tokens, lookup.candidates) == (tokens, Candidates(*candidates))


def test_the_backup_replaces_a_hit_where_the_text_repeats_itself_and_it_is_accepted_more() -> None:
    backup, branch = Lookup(LookupResult.BACKUP, (8, 9)), hit((4, 5, 6), 3)
    replaced = partial(look_up, TABLE, Outcome(1, 7), of_tables=0.5)
    assert replaced(of_backup=0.9, repeats=True) == backup
    assert replaced(of_backup=0.9) == branch
    assert replaced(of_backup=0.65, repeats=True) == backup
    # The gain of two tokens must also pay for a later table.
    assert replaced(of_backup=0.6, repeats=True) == branch
    # It can also continue a branch of which one column has arrived.
    assert look_up(PART, Outcome(1, 7), of_tables=0.9, repeats=True) == hit((4, 8, 9), 1)


@pytest.mark.parametrize(
    ("table", "outcome", "result"),
    [
        (TABLE, Outcome(2, 7), LookupResult.MISS),
        (None, Outcome(1, 7), LookupResult.LATE),
        (TABLE, Outcome(1, 7), LookupResult.HIT),
        (PART, Outcome(1, 7), LookupResult.HIT),
        (EQUAL, Outcome(1, 7), LookupResult.HIT),
    ],
    ids=["miss", "late", "hit", "part", "equal"],
)
@pytest.mark.parametrize(("of_tables", "of_backup"), [(0.5, 0.65), (0.6, 0.9)])
def test_whether_the_draft_was_needed_does_not_depend_on_the_outcome(
    table: OutcomeTable | None,
    outcome: Outcome,
    result: LookupResult,
    of_tables: float,
    of_backup: float,
) -> None:
    found = partial(look_up, table, outcome, of_tables=of_tables, repeats=True)
    assert found(of_backup=of_backup).result is LookupResult.BACKUP
    assert found(of_backup=of_tables).result is result


def test_a_backup_with_the_tokens_of_a_branch_leaves_the_branch_to_the_draft() -> None:
    found = look_up(EQUAL, Outcome(1, 7), of_backup=0.9, of_tables=0.1, repeats=True)
    assert found == replace(hit((8, 9), 2), result=LookupResult.BACKUP)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The texts that the backup has searched; those that begin with 5 repeat themselves."""
    texts = list[tuple[int, ...]]()

    def backup(text: Rows[int], num: int) -> BackupProposal:
        texts.append(tuple(text))
        return BackupProposal((7, 8, 7)[:num], repeats=text[0] == 5)

    monkeypatch.setitem(BACKUPS, "ngram", backup)
    return texts


def collector(pace: RoundPace) -> TableCollector:
    return TableCollector(DraftsSettings(), pace, threading.Condition(), FakeClock(5.0))


def test_a_text_is_searched_once_in_a_round_also_if_it_has_no_hit(
    searched: list[tuple[int, ...]],
) -> None:
    made = collector(RoundPace())
    for outcome, hit_tokens in ((Outcome(1, 7), (4, 5, 6)), (Outcome(2, 9), ())):
        after = continued(outcome)
        made.collect([after], 0, lambda: None)
        found = [made.look_up(after, table).candidates for table in (None, TABLE, TABLE)]
        both = Candidates(hit_tokens, (7, 8, 7))
        assert found == [Candidates((), (7, 8, 7)), both, both]
    assert len(searched) == 2


def test_texts_with_hits_take_turns_and_those_that_repeat_themselves_are_always_searched(
    searched: list[tuple[int, ...]],
) -> None:
    pace, batch = RoundPace(), [continued(Outcome(1, 7)) for _ in range(3 * MOST_SEARCHES)]
    for number, each in enumerate(batch):
        each.newest_tokens[0] = 5 if number == 10 else 100 + number
    found = list[set[int]]()
    for _ in range(6):
        made = collector(pace)
        searched.clear()
        made.collect(batch, 0, lambda: None)
        for each in batch:
            each.candidates = made.look_up(each, TABLE).candidates
        pace.sources.add_round([])
        found.append({text[0] for text in searched})
    assert set.union(*found[:3]) == {each.newest_tokens[0] for each in batch}
    assert all(MOST_SEARCHES <= len(each) <= MOST_SEARCHES + 1 for each in found)
    assert [5 in each for each in found] == [False, True, True, True, True, True]


def test_no_table_is_late_before_the_last_token() -> None:
    assert look_up(None, Outcome(1, 7), remaining=1) == NO_TABLE_NEEDED


def test_without_an_open_session_there_is_no_proposal() -> None:
    assert without_session(continued(Outcome(1, 7))) == NO_DRAFT
    assert without_session(continued(Outcome(1, 7), remaining=1)) == NO_TABLE_NEEDED


class Waits(threading.Condition):
    """A lock whose waits end at once; it records their seconds."""

    def __init__(self, clock: FakeClock, notified_after: float) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._clock = clock
        self.notified_after = notified_after

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        is_notified = not self.seconds and self.notified_after > 0.0
        self.seconds.append(timeout)
        self._clock.advance(self.notified_after if is_notified else timeout)
        return is_notified


class ExpectedAt(Session):
    """A session whose first three columns are expected after a fixed time."""

    seconds: float
    is_notified: Callable[[], bool]

    def prospect(self, lookup: Lookup, max_tokens: int) -> Prospect:
        depth, num_tokens = lookup.num_from_table, len(lookup.tokens)
        next_at = self.requested_at + self.seconds / (1 + self.is_notified())
        return Prospect(depth, num_tokens - depth, max_tokens, next_at)


def rounds(pace: RoundPace, notified_after: float = 0.0) -> tuple[Waits, Callable[[float], None]]:
    """Return waits, and a function that runs a round whose columns are expected after seconds.

    With ``notified_after``, another frame arrives after this time, and the columns are expected in
    half of the seconds from then on.
    """
    clock = FakeClock(5.0)
    waits = Waits(clock, notified_after)
    made = TableCollector(DraftsSettings(), pace, waits, clock)

    def run(seconds: float) -> None:
        waiting = continued(Outcome(0, 7))
        session = ExpectedAt(
            number=1,
            sequence=waiting,
            link=link(),
            base_len=2,
            requested_at=clock.now(),
            open_by=clock.now() + 1.0,
            max_len=1024,
            is_open=True,
        )
        session.seconds = seconds
        session.is_notified = lambda: bool(notified_after and waits.seconds)
        waiting.session = session
        made.collect([waiting], 0, lambda: None)

    return waits, run


def test_a_round_does_not_wait_for_a_column_that_is_expected_after_the_deadline() -> None:
    pace = RoundPace()
    pace.add_round(0.1, is_plain=False)
    waits, run = rounds(pace)
    run(0.021)
    assert waits.seconds == []
    run(0.019)
    assert waits.seconds == [pytest.approx(0.02)]


def test_only_the_first_rounds_wait_while_none_can_be_measured() -> None:
    waits, run = rounds(RoundPace())
    for _ in range(20):
        run(0.01)
    assert waits.seconds == [pytest.approx(0.02)] * 8


def test_a_trial_waits_on_when_its_table_is_expected_earlier() -> None:
    pace = RoundPace()
    measure(pace.sources, 0.1, 0.1, repeats=False)
    for _ in range(400):
        pace.hits.add(100, 30)
    pace.add_round(0.005, is_plain=False)
    waits, run = rounds(pace, notified_after=0.001)
    pace.sources.num_rounds = 2 * TRIAL_ROUNDS
    run(0.012)
    assert waits.seconds == [], "three rounds: not every second trial"
    pace.sources.num_rounds = 3 * TRIAL_ROUNDS
    run(0.012)
    assert sum(waits.seconds[1:], waits.notified_after) > 0.012
