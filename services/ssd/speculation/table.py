"""Outcome tables and commits, and the bytes that carry them on a link.

A frame is little-endian int32: rows of ``row_width(K)`` = K + 7 columns. Unused columns are -1.

    commit                         [session, base_len, k, t*, branch, m, waited, d_1..d_K]
    table, head row                [session, base_len, num_branches, depth]
    table, one row for each branch [k, t*, d_1..d_depth]

A commit that names a branch has no tokens. The ``branch`` of a commit with explicit tokens is -1.
``waited`` is the time in microseconds for which the round waited for tables.

A table may be sent before it is complete: its depth, 1..K, is the number of tokens that each branch
has. A later table with the same session and base length repeats the outcomes and tokens and adds
columns, so the newest one is always sufficient.

This is the only place where received frames are checked, completely and before anything is built
from them. ``FrameError`` names the first bad row and column. Letters: R rows, W columns.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd.errors import FrameError
from ssd.types import Branch, Commit, Explicit, Outcome, TokenId

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

_PAD = -1
_HEAD_COLUMNS = 4
_BRANCH_COLUMNS = 2
_COMMIT_COLUMNS = 7
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

    @property
    def depth(self) -> int:
        """Number of tokens after each outcome; 0 without branches."""
        return int((self.tokens_NK[:1] != _PAD).sum())

    def extends(self, earlier: "OutcomeTable") -> bool:
        """Return whether this table repeats an earlier one of its round, with more columns."""
        depth = earlier.depth
        return (
            depth < self.depth
            and np.array_equal(self.accepted_N, earlier.accepted_N)
            and np.array_equal(self.bonus_N, earlier.bonus_N)
            and np.array_equal(self.tokens_NK[:, :depth], earlier.tokens_NK[:, :depth])
        )

    def look_up(self, outcome: Outcome) -> int | None:
        """Return the branch of an outcome; None is a miss."""
        # For so few branches, lists take half the time of array operations.
        found = zip(self.accepted_N.tolist(), self.bonus_N.tolist(), strict=True)
        wanted = outcome.accepted, outcome.bonus
        return next((index for index, each in enumerate(found) if each == wanted), None)

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
        rows_RW[first, :_HEAD_COLUMNS] = (table.session, table.base_len, num_branches, table.depth)
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
        max_tables: that the frame may have.
        branches: that a table may have.
        num_token_ids: token ids are below.

    Raises:
        FrameError: the frame has a wrong size or too many rows, a row is malformed, a session or an
            outcome of a table occurs twice, or a token is outside the vocabulary.
    """
    rows_RW = _rows(frame, lookahead, max_tables * (branches + 1), f"{max_tables} tables")
    heads = _find_heads(rows_RW, lookahead)
    is_head_R = np.zeros(len(rows_RW), dtype=np.bool_)
    is_head_R[heads] = True
    highest_W = np.full(rows_RW.shape[1], _PAD, dtype=np.int64)
    highest_W[0] = lookahead
    highest_W[1 : _BRANCH_COLUMNS + lookahead] = _LARGEST
    lowest_W = np.full_like(highest_W, _PAD)
    lowest_W[:_BRANCH_COLUMNS] = 0
    is_bad_RW = (rows_RW < lowest_W) | (rows_RW > highest_W)
    table_R = np.cumsum(is_head_R, dtype=np.int32)
    depth_R = rows_RW[heads, _HEAD_COLUMNS - 1][table_R - 1] if len(heads) else table_R
    is_bad_RW |= _not_tokens(rows_RW, _BRANCH_COLUMNS, lookahead, depth_R)
    is_bad_RW[is_head_R] = False
    _reject(rows_RW, is_bad_RW, "branch")
    keys_R3 = np.hstack((table_R[:, None], rows_RW[:, :_BRANCH_COLUMNS]))
    _reject_repeats(keys_R3[~is_head_R], "outcome")
    # A draft sends a frame for each batch of tables, and a batch has one table of a session.
    _reject_repeats(rows_RW[heads, :1], "table")
    _check_tokens(rows_RW[~is_head_R, 1 : _BRANCH_COLUMNS + lookahead], num_token_ids, "table")
    widest = int(rows_RW[heads, 2].max(initial=0))
    if widest > branches:
        raise FrameError(f"a table has {widest} branches, agreed are {branches}")
    tables = []
    for first, head in zip(heads.tolist(), rows_RW[heads, :_HEAD_COLUMNS].tolist(), strict=True):
        session, base_len, num_branches, _ = head
        branches_NW = rows_RW[first + 1 : first + 1 + num_branches]
        tokens_NK = branches_NW[:, _BRANCH_COLUMNS : _BRANCH_COLUMNS + lookahead]
        tables.append(
            OutcomeTable(session, base_len, branches_NW[:, 0], branches_NW[:, 1], tokens_NK)
        )
    return tables


def _find_heads(rows_RW: Int32s, lookahead: int) -> NDArray[np.int64]:
    """Return the indices of head rows, all checked.

    A peer chooses their number, so no numpy call is made for each of them.
    """
    counts = rows_RW[:, 2].tolist()
    heads = []
    first = 0
    while first < len(counts):
        heads.append(first)
        # A count that is negative or too large ends the loop and is rejected below.
        first += 1 + counts[first] if counts[first] >= 0 else len(counts)
    heads_H = np.array(heads, dtype=np.int64)
    found_HW = rows_RW[heads_H]
    lowest_W = np.full(rows_RW.shape[1], _PAD, dtype=np.int64)
    lowest_W[:_HEAD_COLUMNS] = (0, 0, 1, 1)
    highest_HW = np.full(found_HW.shape, _PAD, dtype=np.int64)
    highest_HW[:, :2] = _LARGEST
    highest_HW[:, 2] = len(rows_RW) - 1 - heads_H
    highest_HW[:, 3] = lookahead
    is_bad_HW = (found_HW < lowest_W) | (found_HW > highest_HW)
    if is_bad_HW.any():
        head, column = np.argwhere(is_bad_HW)[0].tolist()
        raise FrameError(_complaint("head", heads[head], column, int(found_HW[head, column])))
    return heads_H


def pack_commits(commits: Collection[Commit], lookahead: int) -> bytes:
    """Return the frame of some commits, one row for each."""
    words: list[int] = []
    for commit in commits:
        if isinstance(commit.next, Branch):
            branch, num_proposed = commit.next.index, commit.next.num_proposed
            tokens: tuple[TokenId, ...] = ()
        else:
            tokens = commit.next.tokens
            branch, num_proposed = _PAD, len(tokens)
        outcome = commit.outcome
        words += (commit.session, commit.base_len, outcome.accepted, outcome.bonus)
        words += (branch, num_proposed, commit.waited_us, *tokens)
        words += (_PAD,) * (lookahead - len(tokens))
    return struct.pack(f"<{len(words)}i", *words)


def unpack_commits(
    frame: bytes, lookahead: int, *, max_commits: int, num_token_ids: int
) -> list[Commit]:
    """Return the commits of a frame.

    Args:
        frame: as received.
        lookahead: K.
        max_commits: that the frame may have.
        num_token_ids: token ids are below.

    Raises:
        FrameError: the frame has a wrong size or too many rows, a row is malformed, a session
            occurs twice, or a token is outside the vocabulary.
    """
    rows_RW = _rows(frame, lookahead, max_commits, f"{max_commits} commits")
    highest_W = np.full(rows_RW.shape[1], _LARGEST, dtype=np.int64)
    highest_W[[2, 5]] = lookahead
    lowest_W = np.full_like(highest_W, _PAD)
    lowest_W[[0, 1, 2, 3, 5, 6]] = 0
    is_bad_RW = (rows_RW < lowest_W) | (rows_RW > highest_W)
    num_explicit_R = np.where(rows_RW[:, 4] == _PAD, rows_RW[:, 5], 0)
    is_bad_RW |= _not_tokens(rows_RW, _COMMIT_COLUMNS, lookahead, num_explicit_R)
    _reject(rows_RW, is_bad_RW, "commit")
    _check_tokens(rows_RW[:, 3], num_token_ids, "commit")
    _check_tokens(rows_RW[:, _COMMIT_COLUMNS:], num_token_ids, "commit")
    # A target commits one round of a session at a time. More would take time from other sessions.
    _reject_repeats(rows_RW[:, :1], "commit")
    return [_commit_from(row) for row in rows_RW.tolist()]


def _commit_from(row: list[int]) -> Commit:
    session, base_len, accepted, bonus, branch, num_proposed, waited_us, *tokens = row
    explicit = Explicit(tuple(tokens[:num_proposed]))
    following = explicit if branch == _PAD else Branch(branch, num_proposed)
    return Commit(session, base_len, Outcome(accepted, bonus), following, waited_us)


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


def _check_tokens(tokens: Int32s, num_token_ids: int, kind: str) -> None:
    highest = int(tokens.max(initial=0))
    if highest >= num_token_ids:
        raise FrameError(f"a {kind} has token id {highest}, the vocabulary has {num_token_ids}")


def _not_tokens(rows_RW: Int32s, first: int, num: int, num_tokens_R: Int32s) -> Bools:
    """Mark missing tokens, and tokens beyond the number of their row."""
    is_bad_RW = np.zeros(rows_RW.shape, dtype=np.bool_)
    is_there_RK = rows_RW[:, first : first + num] != _PAD
    is_bad_RW[:, first : first + num] = is_there_RK != (np.arange(num) < num_tokens_R[:, None])
    return is_bad_RW


def _reject(rows_RW: Int32s, is_bad_RW: Bools, kind: str) -> None:
    if is_bad_RW.any():
        row, column = np.argwhere(is_bad_RW)[0].tolist()
        raise FrameError(_complaint(kind, row, column, int(rows_RW[row, column])))


def _complaint(kind: str, row: int, column: int, value: int) -> str:
    return f"{kind} row {row}, column {column}: {value} is out of range"


def _reject_repeats(keys_RC: Int32s, kind: str) -> None:
    """Reject a frame in which a key occurs twice."""
    order_R = np.lexsort(keys_RC.T)
    sorted_RC = keys_RC[order_R]
    is_same_R = (sorted_RC[1:] == sorted_RC[:-1]).all(axis=1)
    if is_same_R.any():
        key = sorted_RC[int(is_same_R.argmax())].tolist()
        raise FrameError(f"{kind} {key} occurs twice")
