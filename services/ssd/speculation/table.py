"""Outcome tables and commits, and the bytes that carry them on a link.

A frame is little-endian int32: rows of ``row_width(K)`` = K + 6 columns. Unused columns are -1.

    commit                         [session, base_len, k, t*, waited, length, d_1..d_m]
    table, head row                [session, base_len, num_branches, depth, length]
    table, one row for each branch [k, t*, d_1..d_depth]

The m tokens of a commit, 0..K, are the next proposal. ``waited`` is the time in microseconds for
which the round waited for tables. ``length`` is the number of tokens that each branch of the next
table needs; 0 is K. A draft may send fewer or more.

A table may be sent before it is complete: its depth, 1..K, is the number of tokens that each branch
has, of ``length`` that it will have. A later table with the same session and base length repeats
the outcomes and tokens and adds columns, so the newest one is always sufficient.

This is the only place where received frames are checked, completely and before anything is built
from them. ``FrameError`` names the first bad row and column. Letters: R rows, W columns.
"""

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ssd.errors import FrameError
from ssd.types import Commit, Outcome, TokenId

Int32s = NDArray[np.int32]

_PAD = -1
_HEAD_COLUMNS = 5
_BRANCH_COLUMNS = 2
_COMMIT_COLUMNS = 6
_LARGEST = np.iinfo(np.int32).max
_WORD = np.dtype("<i4")


def row_width(lookahead: int) -> int:
    """Columns of a row, the same for commits and tables."""
    return lookahead + _COMMIT_COLUMNS


def frame_bytes(num_rows: int, lookahead: int) -> int:
    """Size of a frame."""
    return num_rows * row_width(lookahead) * _WORD.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeTable:
    """All branches of one session for one round: outcome -> next proposal."""

    session: int
    base_len: int
    """Committed tokens before the round."""
    accepted_N: Int32s
    bonus_N: Int32s
    tokens_NK: Int32s
    """The tokens after each outcome, the same number for each, then -1."""
    length: int
    """The number of tokens that it will have after each outcome."""

    @property
    def depth(self) -> int:
        """Number of tokens after each outcome; 0 without branches."""
        if not len(self.tokens_NK):
            return 0
        # A list of so few tokens takes a fraction of the time of an array operation.
        tokens: list[int] = self.tokens_NK[0].tolist()
        return len(tokens) - tokens.count(_PAD)

    def extends(self, earlier: "OutcomeTable") -> bool:
        """Return whether this table repeats an earlier one of its round, with more columns."""
        depth = earlier.depth
        return (
            depth < self.depth
            and self.length == earlier.length
            and np.array_equal(self.accepted_N, earlier.accepted_N)
            and np.array_equal(self.bonus_N, earlier.bonus_N)
            and np.array_equal(self.tokens_NK[:, :depth], earlier.tokens_NK[:, :depth])
        )

    def look_up(self, outcome: Outcome) -> int | None:
        """Return the branch of an outcome; None is a miss."""
        # For so few branches, a list takes a fraction of the time of array operations.
        bonus: list[int] = self.bonus_N.tolist()
        index = -1
        for _ in range(bonus.count(outcome.bonus)):
            index = bonus.index(outcome.bonus, index + 1)
            if self.accepted_N[index] == outcome.accepted:
                return index
        return None

    def proposal(self, index: int, num_tokens: int) -> tuple[TokenId, ...]:
        """Return the first tokens of a branch, at most ``num_tokens``."""
        tokens: list[int] = self.tokens_NK[index, :num_tokens].tolist()
        return tuple(tokens[: tokens.index(_PAD)] if _PAD in tokens else tokens)


def pack_tables(tables: Collection[OutcomeTable], lookahead: int) -> bytes:
    """Return the frame of some tables."""
    num_rows = len(tables) + sum(len(table.bonus_N) for table in tables)
    rows_RW = np.full((num_rows, row_width(lookahead)), _PAD, dtype=_WORD)
    first = 0
    for table in tables:
        num_branches = len(table.bonus_N)
        last = first + 1 + num_branches
        size = num_branches, table.depth, table.length
        rows_RW[first, :_HEAD_COLUMNS] = (table.session, table.base_len, *size)
        rows_RW[first + 1 : last, 0] = table.accepted_N
        rows_RW[first + 1 : last, 1] = table.bonus_N
        end = _BRANCH_COLUMNS + table.tokens_NK.shape[1]
        rows_RW[first + 1 : last, _BRANCH_COLUMNS:end] = table.tokens_NK
        first = last
    return rows_RW.tobytes()


def unpack_tables(
    frame: bytes, lookahead: int, *, max_tables: int, branches: int, num_token_ids: int
) -> list[OutcomeTable]:
    """Return the tables of a frame, as views of it.

    Args:
        frame: as received.
        lookahead: K.
        max_tables: largest number of tables of the frame.
        branches: largest number of branches of a table.
        num_token_ids: token ids are below.

    Raises:
        FrameError: the frame has a wrong size or too many rows, a row is malformed, a session or an
            outcome of a table occurs twice, or a token is outside the vocabulary.
    """
    rows_RW = _rows(frame, lookahead, max_tables * (branches + 1), f"{max_tables} tables")
    heads_H3 = _find_heads(rows_RW, lookahead, branches)
    first_H, size_H, depth_H = heads_H3.T
    kind_R = np.repeat(depth_H, size_H + 1)
    kind_R[first_H] = 0
    bounds_2KW = _table_bounds(lookahead, num_token_ids)
    _reject(rows_RW, bounds_2KW, kind_R, ("head", *["branch"] * lookahead), num_token_ids)
    outcomes_X2 = rows_RW[kind_R > 0, :_BRANCH_COLUMNS]
    table_X = np.repeat(np.arange(len(heads_H3)), size_H)
    outcome_X = (table_X * (lookahead + 1) + outcomes_X2[:, 0]) * num_token_ids + outcomes_X2[:, 1]
    _reject_repeats("outcome", outcome_X.tolist(), lambda row: outcomes_X2[row].tolist())
    accepted_R, bonus_R = rows_RW[:, 0], rows_RW[:, 1]
    tokens_RK = rows_RW[:, _BRANCH_COLUMNS : _BRANCH_COLUMNS + lookahead]
    tables = []
    heads = rows_RW[first_H, :_HEAD_COLUMNS].tolist()
    for first, (session, base_len, size, _, length) in zip(first_H.tolist(), heads, strict=True):
        rows = slice(first + 1, first + 1 + size)
        outcomes = accepted_R[rows], bonus_R[rows]
        tables.append(OutcomeTable(session, base_len, *outcomes, tokens_RK[rows], length))
    # A draft sends a frame for each batch of tables, and a batch has one table of a session.
    sessions = [table.session for table in tables]
    _reject_repeats("table", sessions, sessions.__getitem__)
    return tables


def _find_heads(rows_RW: Int32s, lookahead: int, branches: int) -> NDArray[np.int64]:
    """Return row, number of branches and depth of each table, [H, 3]."""
    heads, first = [], 0
    # A list of a part of the columns would make an array of each row.
    sizes, depths, lengths = (rows_RW[:, column].tolist() for column in (2, 3, 4))
    while first < len(sizes):
        size, depth, length = sizes[first], depths[first], lengths[first]
        if not 1 <= size < len(sizes) - first:
            raise FrameError(_complaint("head", first, 2, size))
        if size > branches:
            raise FrameError(f"a table has {size} branches, agreed are {branches}")
        if not 1 <= depth <= lookahead:
            raise FrameError(_complaint("head", first, 3, depth))
        if not depth <= length <= lookahead:
            raise FrameError(_complaint("head", first, 4, length))
        heads.append((first, size, depth))
        first += 1 + size
    return np.array(heads, dtype=np.int64).reshape(-1, 3)


@lru_cache(maxsize=64)
def _table_bounds(lookahead: int, num_token_ids: int) -> Int32s:
    """Return the smallest and largest values of a head (0), and of a branch by its depth, 1..K.

    One comparison with them checks a whole frame, because calls of numpy take longer than their
    work: the target receives tables beside a forward pass.
    """
    bounds_2KW = np.full((2, lookahead + 1, row_width(lookahead)), _PAD, dtype=np.int32)
    lowest_KW, highest_KW = bounds_2KW
    lowest_KW[0, :_HEAD_COLUMNS] = (0, 0, 1, 1, 1)
    highest_KW[0, :_HEAD_COLUMNS] = (_LARGEST, _LARGEST, _LARGEST, lookahead, lookahead)
    for depth in range(1, lookahead + 1):
        lowest_KW[depth, : _BRANCH_COLUMNS + depth] = 0
        highest_KW[depth, : _BRANCH_COLUMNS + depth] = num_token_ids - 1
    highest_KW[1:, 0] = lookahead
    bounds_2KW.setflags(write=False)
    return bounds_2KW


def pack_commits(commits: Collection[Commit], lookahead: int) -> bytes:
    """Return the frame of some commits, one row for each."""
    words: list[int] = []
    for commit in commits:
        outcome = commit.outcome
        words += (commit.session, commit.base_len, outcome.accepted, outcome.bonus)
        words += (commit.waited_us, commit.length, *commit.tokens)
        words += (_PAD,) * (lookahead - len(commit.tokens))
    return struct.pack(f"<{len(words)}i", *words)


def unpack_commits(
    frame: bytes, lookahead: int, *, max_commits: int, num_token_ids: int
) -> list[Commit]:
    """Return the commits of a frame.

    Args:
        frame: as received.
        lookahead: K.
        max_commits: largest number of commits of the frame.
        num_token_ids: token ids are below.

    Raises:
        FrameError: the frame has a wrong size or too many rows, a row is malformed, a session
            occurs twice, or a token is outside the vocabulary.
    """
    rows_RW = _rows(frame, lookahead, max_commits, f"{max_commits} commits")
    num_tokens_R = np.count_nonzero(rows_RW[:, _COMMIT_COLUMNS:] != _PAD, axis=1)
    names, bounds_2XW = ["commit"] * (lookahead + 1), _commit_bounds(lookahead, num_token_ids)
    _reject(rows_RW, bounds_2XW, num_tokens_R, names, num_token_ids)
    rows = rows_RW.tolist()
    # A target commits one round of a session at a time. More would take time from other sessions.
    sessions = [session for session, *_ in rows]
    _reject_repeats("commit", sessions, sessions.__getitem__)
    return list(map(_commit_from, rows, num_tokens_R.tolist()))


@lru_cache(maxsize=64)
def _commit_bounds(lookahead: int, num_token_ids: int) -> Int32s:
    """Return the smallest and largest values of a commit, by the number of its tokens, 0..K."""
    bounds_2XW = np.full((2, lookahead + 1, row_width(lookahead)), _PAD, dtype=np.int32)
    lowest_XW, highest_XW = bounds_2XW
    lowest_XW[:, :_COMMIT_COLUMNS] = 0
    highest_XW[:, :_COMMIT_COLUMNS] = (
        *(_LARGEST, _LARGEST, lookahead, num_token_ids - 1),
        *(_LARGEST, lookahead),
    )
    for count in range(1, lookahead + 1):
        lowest_XW[count, _COMMIT_COLUMNS : _COMMIT_COLUMNS + count] = 0
        highest_XW[count, _COMMIT_COLUMNS : _COMMIT_COLUMNS + count] = num_token_ids - 1
    bounds_2XW.setflags(write=False)
    return bounds_2XW


def _commit_from(row: list[int], num_tokens: int) -> Commit:
    session, base_len, accepted, bonus, waited_us, length, *tokens = row
    return Commit(
        session,
        base_len,
        Outcome(accepted, bonus),
        tokens=tuple(tokens[:num_tokens]),
        waited_us=waited_us,
        length=length,
    )


def _rows(frame: bytes, lookahead: int, max_rows: int, allowed: str) -> Int32s:
    """Return the rows of a frame as a read-only view, int32 [R, W].

    Raises:
        FrameError: the frame has too many rows, or bytes that are no row.
    """
    row_bytes = frame_bytes(1, lookahead)
    num_rows, num_rest = divmod(len(frame), row_bytes)
    if num_rest or num_rows > max_rows:
        raise FrameError(
            f"a frame has {len(frame)} bytes, allowed are {allowed}: up to {max_rows} rows of "
            f"{row_bytes} bytes"
        )
    rows_RW = np.frombuffer(frame, dtype=_WORD).reshape(num_rows, row_width(lookahead))
    return rows_RW.astype(np.int32, copy=False)


def _reject(
    rows_RW: Int32s,
    bounds_2XW: Int32s,
    kind_R: NDArray[np.int64],
    names: Sequence[str],
    num_ids: int,
) -> None:
    """Reject a frame with a value outside of the bounds of its row's kind."""
    lowest_RW, highest_RW = bounds_2XW[:, kind_R]
    is_bad_RW = (rows_RW < lowest_RW) | (rows_RW > highest_RW)
    if not is_bad_RW.any():
        return
    row, column = np.argwhere(is_bad_RW)[0].tolist()
    name, value = names[kind_R[row]], int(rows_RW[row, column])
    if value >= num_ids and highest_RW[row, column] == num_ids - 1:
        owner = "commit" if name == "commit" else "table"
        raise FrameError(f"a {owner} has token id {value}, the vocabulary has {num_ids}")
    raise FrameError(_complaint(name, row, column, value))


def _complaint(kind: str, row: int, column: int, value: int) -> str:
    return f"{kind} row {row}, column {column}: {value} is out of range"


def _reject_repeats(kind: str, keys: list[int], shown: Callable[[int], object]) -> None:
    """Reject a frame in which a key occurs twice; ``shown`` returns it by its index."""
    if len(set(keys)) == len(keys):
        return
    seen = set()
    for index, key in enumerate(keys):
        if key in seen:
            raise FrameError(f"{kind} {shown(index)} occurs twice")
        seen.add(key)
