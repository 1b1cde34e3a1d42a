"""Outcome tables and commits: look-up, and their rows in a frame."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.errors import FrameError
from ssd.speculation import table as table_module
from ssd.speculation.table import (
    Int32s,
    OutcomeTable,
    frame_bytes,
    pack_commits,
    pack_tables,
    row_width,
)
from ssd.types import Commit, Outcome

LOOKAHEAD = 3
VOCAB = 2**31
WIDTH = row_width(LOOKAHEAD)
BRANCHES = 6
Plain = tuple[int, int, int, tuple[tuple[int, int, tuple[int, ...]], ...]]


def unpack_tables(
    frame: bytes | Int32s, num_token_ids: int = VOCAB, max_tables: int = 6
) -> list[OutcomeTable]:
    return table_module.unpack_tables(
        bytes(frame),
        LOOKAHEAD,
        max_tables=max_tables,
        branches=BRANCHES,
        num_token_ids=num_token_ids,
    )


def unpack_commits(
    frame: bytes | Int32s, num_token_ids: int = VOCAB, max_commits: int = 6
) -> list[Commit]:
    return table_module.unpack_commits(
        bytes(frame), LOOKAHEAD, max_commits=max_commits, num_token_ids=num_token_ids
    )


def rows_of(frame: bytes) -> Int32s:
    return np.frombuffer(frame, dtype="<i4").reshape(-1, WIDTH)


def make_table(
    outcomes: list[tuple[int, int]],
    tokens: list[list[int]],
    session: int = 4,
    base_len: int = 9,
    length: int = LOOKAHEAD,
) -> OutcomeTable:
    """Return a table made from lists."""
    outcomes_N2 = np.array(outcomes, dtype=np.int32).reshape(-1, 2)
    tokens_NK = np.array(tokens, dtype=np.int32).reshape(-1, LOOKAHEAD)
    return OutcomeTable(session, base_len, outcomes_N2[:, 0], outcomes_N2[:, 1], tokens_NK, length)


def plain(table: OutcomeTable) -> Plain:
    """Return the contents of a table as values that can be compared."""
    branches = tuple(
        (int(k), int(bonus), tuple(tokens.tolist()))
        for k, bonus, tokens in zip(table.accepted_N, table.bonus_N, table.tokens_NK, strict=True)
    )
    return table.session, table.base_len, table.length, branches


class TestLookUp:
    table = make_table([(0, 7), (1, 7), (0, 8)], [[1, 2, -1], [4, 5, -1], [6, 7, -1]])

    def test_an_outcome_of_a_branch_is_a_hit(self) -> None:
        assert self.table.look_up(Outcome(1, 7)) == 1
        assert self.table.look_up(Outcome(0, 8)) == 2

    def test_a_bonus_token_after_another_accepted_length_is_a_miss(self) -> None:
        assert self.table.look_up(Outcome(1, 8)) is None
        assert self.table.look_up(Outcome(2, 7)) is None

    def test_an_empty_table_misses(self) -> None:
        assert make_table([], []).look_up(Outcome(0, 7)) is None

    def test_a_proposal_has_at_most_the_requested_and_the_available_tokens(self) -> None:
        assert self.table.proposal(0, 1) == (1,)
        assert self.table.proposal(0, 2) == (1, 2)
        assert self.table.proposal(0, 0) == ()
        assert self.table.proposal(1, 3) == (4, 5)

    def test_the_depth_is_the_number_of_tokens_of_each_branch(self) -> None:
        assert self.table.depth == 2
        assert make_table([(0, 7)], [[1, 2, 3]]).depth == 3
        assert make_table([], []).depth == 0


class TestExtends:
    earlier = make_table([(0, 7), (1, 8)], [[1, -1, -1], [4, -1, -1]])

    def test_a_table_with_more_columns_extends_an_earlier_one(self) -> None:
        assert make_table([(0, 7), (1, 8)], [[1, 2, -1], [4, 5, -1]]).extends(self.earlier)
        assert not self.earlier.extends(self.earlier)

    @pytest.mark.parametrize(
        ("outcomes", "tokens"),
        [
            ([(0, 7), (1, 9)], [[1, 2, 3], [4, 5, 6]]),
            ([(0, 7), (0, 8)], [[1, 2, 3], [4, 5, 6]]),
            ([(0, 7), (1, 8)], [[1, 2, 3], [5, 5, 6]]),
            ([(0, 7)], [[1, 2, 3]]),
        ],
    )
    def test_a_table_with_other_outcomes_or_tokens_contradicts_it(
        self, outcomes: list[tuple[int, int]], tokens: list[list[int]]
    ) -> None:
        assert not make_table(outcomes, tokens).extends(self.earlier)

    def test_a_table_of_another_length_contradicts_it(self) -> None:
        longer = make_table([(0, 7), (1, 8)], [[1, 2, -1], [4, 5, -1]], length=2)
        assert not longer.extends(self.earlier)


def test_a_table_is_a_head_row_and_one_row_for_each_branch() -> None:
    table = make_table([(0, 7), (2, 8)], [[1, 2, -1], [4, 5, -1]])
    assert rows_of(pack_tables([table], LOOKAHEAD)).tolist() == [
        [4, 9, 2, 2, 3, -1, -1, -1, -1],
        [0, 7, 1, 2, -1, -1, -1, -1, -1],
        [2, 8, 4, 5, -1, -1, -1, -1, -1],
    ]


def test_a_commit_is_one_row() -> None:
    commits = [
        Commit(4, 9, Outcome(2, 8), tokens=(5, 0, 3)),
        Commit(6, 1, Outcome(0, 7), tokens=(1, 2), waited_us=2500),
        Commit(7, 1, Outcome(0, 7), length=2),
    ]
    assert rows_of(pack_commits(commits, LOOKAHEAD)).tolist() == [
        [4, 9, 2, 8, 0, 0, 5, 0, 3],
        [6, 1, 0, 7, 2500, 0, 1, 2, -1],
        [7, 1, 0, 7, 0, 2, -1, -1, -1],
    ]


def test_a_frame_without_rows_has_no_tables_and_commits() -> None:
    assert pack_tables([], LOOKAHEAD) == pack_commits([], LOOKAHEAD) == b""
    assert unpack_tables(b"") == []
    assert unpack_commits(b"") == []


numbers = st.integers(0, 2**31 - 1)


@st.composite
def tables(draw: st.DrawFn) -> OutcomeTable:
    """Return any well-formed table."""
    outcome = st.tuples(st.integers(0, LOOKAHEAD), numbers)
    outcomes = draw(st.lists(outcome, unique=True, min_size=1, max_size=6))
    depth = draw(st.integers(1, LOOKAHEAD))
    branches = st.lists(numbers, min_size=depth, max_size=depth)
    tokens = [draw(branches) + [-1] * (LOOKAHEAD - depth) for _ in outcomes]
    length = draw(st.integers(depth, LOOKAHEAD))
    return make_table(outcomes, tokens, draw(numbers), draw(numbers), length)


@given(st.lists(tables(), max_size=5, unique_by=lambda table: table.session))
@settings(max_examples=60, deadline=None)
def test_unpacked_tables_equal_the_packed_ones(sent: list[OutcomeTable]) -> None:
    received = unpack_tables(pack_tables(sent, LOOKAHEAD))
    assert [plain(table) for table in received] == [plain(table) for table in sent]


outcomes_of_any_kind = st.builds(Outcome, st.integers(0, LOOKAHEAD), numbers)
commits_of_any_kind = st.builds(
    Commit,
    numbers,
    numbers,
    outcomes_of_any_kind,
    tokens=st.lists(numbers, max_size=LOOKAHEAD).map(tuple),
    waited_us=numbers,
    length=st.integers(0, LOOKAHEAD),
)


@given(st.lists(commits_of_any_kind, max_size=5, unique_by=lambda commit: commit.session))
@settings(max_examples=60, deadline=None)
def test_unpacked_commits_equal_the_packed_ones(sent: list[Commit]) -> None:
    assert unpack_commits(pack_commits(sent, LOOKAHEAD)) == sent


TABLES = [
    make_table([(0, 7), (2, 8)], [[1, 2, -1], [4, 5, -1]]),
    make_table([(1, 7)], [[1, 2, 3]], session=5),
]
TABLES_RW = rows_of(pack_tables(TABLES, LOOKAHEAD))
COMMITS = [
    Commit(4, 9, Outcome(2, 8)),
    Commit(6, 1, Outcome(0, 7), tokens=(1, 2)),
]
COMMITS_RW = rows_of(pack_commits(COMMITS, LOOKAHEAD))


def altered(rows_RW: Int32s, row: int, column: int, value: int) -> Int32s:
    """Return the rows with one number changed."""
    rows_RW = rows_RW.copy()
    rows_RW[row, column] = value
    return rows_RW


BAD_TABLES = {
    0: {0: [-1], 1: [-5], 2: [-1, 0, 5], 3: [0, 4], 4: [1, 4], 8: [0]},
    1: {0: [-1, 4], 1: [-1], 2: [-2, -1], 3: [-1], 5: [3]},
    2: {4: [6]},
}
BAD_COMMITS = {
    0: {0: [-1], 1: [-1], 2: [-1, 4], 3: [-1], 4: [-1], 5: [-1, 4], 6: [-2]},
    1: {6: [-2], 7: [-2], 8: [-2]},
}
"""Numbers by row and column; 4 is more than ``LOOKAHEAD``."""


@pytest.mark.parametrize(
    ("unpack", "rows_RW", "row", "column", "value"),
    [
        (unpack, rows_RW, row, column, value)
        for unpack, rows_RW, bad in (
            (unpack_tables, TABLES_RW, BAD_TABLES),
            (unpack_commits, COMMITS_RW, BAD_COMMITS),
        )
        for row, columns in bad.items()
        for column, values in columns.items()
        for value in values
    ],
)
def test_a_bad_number_is_rejected_with_row_and_column(
    unpack: Callable[[Int32s], object], rows_RW: Int32s, row: int, column: int, value: int
) -> None:
    with pytest.raises(FrameError, match=f"row {row}, column {column}: {value} "):
        unpack(altered(rows_RW, row, column, value))


def test_tokens_of_a_commit_after_padding_are_rejected() -> None:
    with pytest.raises(FrameError, match="commit row 1, column 6: -1 "):
        unpack_commits(altered(COMMITS_RW, 1, 6, -1))
    with pytest.raises(FrameError, match="commit row 0, column 6: -1 "):
        unpack_commits(altered(COMMITS_RW, 0, 8, 3))


def test_a_depth_that_is_not_that_of_the_branches_is_rejected() -> None:
    with pytest.raises(FrameError, match="branch row 1, column 3: 2 "):
        unpack_tables(altered(TABLES_RW, 0, 3, 1))
    with pytest.raises(FrameError, match="branch row 1, column 4: -1 "):
        unpack_tables(altered(TABLES_RW, 0, 3, 3))


def test_repeated_outcomes_sessions_and_commits_are_rejected() -> None:
    outcome_twice_RW = altered(altered(TABLES_RW, 2, 0, 0), 2, 1, 7)
    with pytest.raises(FrameError, match=r"outcome .* twice"):
        unpack_tables(outcome_twice_RW)
    with pytest.raises(FrameError, match=r"table .* twice"):
        unpack_tables(altered(TABLES_RW, 3, 0, 4))
    with pytest.raises(FrameError, match=r"commit .* twice"):
        unpack_commits(COMMITS_RW[[0, 1, 0]])


def test_a_token_outside_the_vocabulary_is_rejected_in_every_column() -> None:
    assert len(unpack_tables(TABLES_RW, 9)) == 2
    for row, column in ((1, 1), (2, 1), (4, 4)):
        with pytest.raises(FrameError, match="a table has token id 9, the vocabulary has 9"):
            unpack_tables(altered(TABLES_RW, row, column, 9), 9)


def test_session_and_base_length_may_be_larger_than_the_vocabulary() -> None:
    sent = [make_table([(0, 7)], [[1, 2, 3]], session=70, base_len=90)]
    assert len(unpack_tables(pack_tables(sent, LOOKAHEAD), 9)) == 1


def test_two_tables_may_contain_the_same_outcome() -> None:
    sent = [make_table([(0, 7)], [[1, 2, 3]], session) for session in (1, 2)]
    assert len(unpack_tables(pack_tables(sent, LOOKAHEAD))) == 2


def test_a_token_of_a_commit_outside_the_vocabulary_is_rejected() -> None:
    assert unpack_commits(COMMITS_RW, 9) == COMMITS
    for row, column in ((0, 3), (1, 6), (1, 7)):
        with pytest.raises(FrameError, match="a commit has token id 9, the vocabulary has 9"):
            unpack_commits(altered(COMMITS_RW, row, column, 9), 9)


def test_a_frame_with_too_many_rows_or_branches_or_a_part_of_a_row_is_rejected() -> None:
    frame = pack_tables(TABLES, LOOKAHEAD)
    assert len(unpack_tables(frame, max_tables=2)) == 2
    with pytest.raises(FrameError, match="allowed are 0 tables: up to 0 rows of 36 bytes"):
        unpack_tables(frame, max_tables=0)
    with pytest.raises(FrameError, match="allowed are 1 commits: up to 1 rows"):
        unpack_commits(COMMITS_RW, max_commits=1)
    wide = make_table([(0, each) for each in range(BRANCHES + 1)], [[1, 2, 3]] * (BRANCHES + 1))
    with pytest.raises(FrameError, match="a table has 7 branches, agreed are 6"):
        unpack_tables(pack_tables([wide], LOOKAHEAD))
    for unpack in (unpack_tables, unpack_commits):
        with pytest.raises(FrameError, match=r"a frame has 37 bytes"):
            unpack(frame[: frame_bytes(1, LOOKAHEAD) + 1])


elements = st.one_of(st.integers(-2, 4), st.integers(-(2**31), 2**31 - 1))


@given(st.integers(0, 4), st.integers(0, WIDTH - 1), elements)
@settings(max_examples=150, deadline=None)
def test_accepted_rows_with_one_change_are_packed_to_the_same_rows(
    row: int, column: int, value: int
) -> None:
    tables_RW = altered(TABLES_RW, row, column, value)
    try:
        received = unpack_tables(tables_RW)
    except FrameError:
        return
    np.testing.assert_array_equal(rows_of(pack_tables(received, LOOKAHEAD)), tables_RW)
