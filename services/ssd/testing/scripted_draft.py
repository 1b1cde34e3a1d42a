"""A draft without a model that follows a script: hits, misses, late, wrong and missing tables.

Its tables are computed from the tokens that the target will emit. It sends each table inside the
call that delivers the commit, so a test needs neither threads nor sleeps.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, repeat

import numpy as np

from ssd.errors import LinkError
from ssd.speculation.table import OutcomeTable, frame_bytes, pack_tables, unpack_commits
from ssd.types import (
    CloseSession,
    Commit,
    OpenSession,
    Outcome,
    TargetMessage,
    TokenId,
)


class Behaviour(StrEnum):
    """What the draft does when a table is due."""

    HIT = "hit"
    """The table contains the outcome, followed by the right tokens."""
    HALF = "half"
    """The table contains the outcome, followed by one right token and wrong ones."""
    WRONG = "wrong"
    """The table contains the outcome, followed by wrong tokens only."""
    MISS = "miss"
    """The table contains another outcome."""
    SILENT = "silent"
    """The draft sends no table."""
    LATE = "late"
    """The table is sent before the next one, and is stale by then."""
    SHALLOW = "shallow"
    """The table contains the outcome, followed by the first right token only."""
    COLUMNS = "columns"
    """As ``HIT``, in frames with one more column each."""
    CONTRARY = "contrary"
    """As ``COLUMNS``, but later frames change the first column."""
    FOREIGN = "foreign"
    """The table names a session that does not exist."""
    AHEAD = "ahead"
    """The table has the base length of a commit that was never sent."""
    BAD_ID = "bad id"
    """The table contains an id outside the vocabulary."""
    GARBAGE = "garbage"
    """The frame is malformed."""
    DIE = "die"
    """The draft ends the link."""


@dataclass(slots=True)
class _Session:
    tokens: list[TokenId]
    future: tuple[TokenId, ...]
    proposal: tuple[TokenId, ...] = ()


@dataclass(slots=True)
class ScriptedDraft:
    """The draft's end of a link.

    Runs on the caller's thread. ``send`` delivers tables to the target. ``continuations`` maps
    committed tokens to all tokens of the sequence, prompt included. ``script`` has one behaviour
    for each table; the last one repeats.
    """

    send: Callable[[bytes], None]
    end: Callable[[], None]
    """Ends the link."""
    continuations: Callable[[tuple[TokenId, ...]], tuple[TokenId, ...]]
    lookahead: int
    vocab_size: int
    script: Iterable[Behaviour] = (Behaviour.HIT,)
    received: list[TargetMessage] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    _sessions: dict[int, _Session] = field(default_factory=dict)
    _late: list[OutcomeTable] = field(default_factory=list)
    _behaviours: Iterator[Behaviour] = field(default_factory=lambda: iter(()))
    _has_failed: bool = False

    def __post_init__(self) -> None:
        script = tuple(self.script)
        self._behaviours = chain(script, repeat(script[-1]))

    @property
    def num_sessions(self) -> int:
        """Sessions that the target has opened and not closed."""
        return len(self._sessions)

    @property
    def openings(self) -> list[int]:
        """Sessions that the target has opened, in order."""
        return [message.session for message in self.received if isinstance(message, OpenSession)]

    @property
    def closings(self) -> list[int]:
        """Sessions that the target has closed, in order."""
        return [message.session for message in self.received if isinstance(message, CloseSession)]

    def receive(self, message: TargetMessage | bytes) -> None:
        """Receive a message, as the ``send`` of a link.

        Raises:
            LinkError: the draft has failed.
        """
        if self._has_failed:
            raise LinkError("the scripted draft has failed")
        if isinstance(message, bytes):
            self._receive_commits(message)
            return
        self.received.append(message)
        if isinstance(message, OpenSession):
            future = self.continuations(message.token_ids)
            self._sessions[message.session] = _Session(list(message.token_ids), future)
            self._send_tables([message.session])
        elif isinstance(message, CloseSession):
            self._sessions.pop(message.session, None)

    def _receive_commits(self, frame: bytes) -> None:
        commits = unpack_commits(
            frame,
            self.lookahead,
            max_commits=len(self._sessions),
            num_token_ids=self.vocab_size,
        )
        self.commits += commits
        for commit in commits:
            self._apply(commit)
        self._send_tables([commit.session for commit in commits])

    def _apply(self, commit: Commit) -> None:
        session = self._sessions[commit.session]
        assert commit.base_len == len(session.tokens), "a commit is missing or repeated"
        session.tokens += [*session.proposal[: commit.outcome.accepted], commit.outcome.bonus]
        session.proposal = commit.tokens

    def _send_tables(self, sessions: list[int]) -> None:
        for number in sessions:
            if not self._has_failed and number in self._sessions:
                self._send_table(next(self._behaviours), number)

    def _send_table(self, behaviour: Behaviour, number: int) -> None:
        session = self._sessions[number]
        table = self._table(number, session, behaviour)
        match behaviour:
            case Behaviour.SILENT:
                return
            case Behaviour.LATE:
                self._late.append(table)
                return
            case Behaviour.DIE:
                self._has_failed = True
                self.end()
                return
            case Behaviour.GARBAGE:
                self.send(b"\xf0" * frame_bytes(3, self.lookahead))
                return
        tables = [*self._late, *_frames_of(table, behaviour)]
        self._late.clear()
        for due in tables:
            self.send(pack_tables([due], self.lookahead))

    def _table(self, number: int, session: _Session, behaviour: Behaviour) -> OutcomeTable:
        """Return a table of two branches: a wrong outcome and the right one.

        The table of ``MISS`` has only the wrong one.
        """
        base_len = len(session.tokens)
        outcome = self._outcome(session)
        after = session.future[base_len + outcome.accepted + 1 :][: self.lookahead]
        right = np.zeros(self.lookahead, dtype=np.int32)
        right[: len(after)] = after
        keep = {Behaviour.HALF: 1, Behaviour.WRONG: 0}.get(behaviour, self.lookahead)
        right[keep:] = (right[keep:] + 1) % self.vocab_size
        if behaviour is Behaviour.BAD_ID:
            right[:] = self.vocab_size
        wrong = ((right + 1) % self.vocab_size).astype(np.int32)
        wrong_bonus = (outcome.bonus + 1) % self.vocab_size
        bonus_N = np.array([wrong_bonus, outcome.bonus], dtype=np.int32)
        count = 1 if behaviour is Behaviour.MISS else 2
        return OutcomeTable(
            session=number + 1000 * (behaviour is Behaviour.FOREIGN),
            base_len=base_len + 100 * (behaviour is Behaviour.AHEAD),
            accepted_N=np.full(2, outcome.accepted, dtype=np.int32)[:count],
            bonus_N=bonus_N[:count],
            tokens_NK=np.stack([wrong, right])[:count],
            length=self.lookahead,
        )

    def _outcome(self, session: _Session) -> Outcome:
        """Return the outcome of the next verification."""
        base_len = len(session.tokens)
        truth = session.future[base_len:]
        accepted = 0
        for proposed, true in zip(session.proposal, truth, strict=False):
            if proposed != true:
                break
            accepted += 1
        bonus = truth[accepted] if accepted < len(truth) else 0
        return Outcome(accepted, bonus)


def _frames_of(table: OutcomeTable, behaviour: Behaviour) -> list[OutcomeTable]:
    """Return the tables that are sent, one in each frame."""
    depths = {
        Behaviour.SHALLOW: [1],
        Behaviour.COLUMNS: range(1, table.depth + 1),
        Behaviour.CONTRARY: range(1, table.depth + 1),
    }.get(behaviour, [table.depth])
    sent = []
    for depth in depths:
        tokens_NK = table.tokens_NK.copy()
        tokens_NK[:, depth:] = -1
        if behaviour is Behaviour.CONTRARY and depth > 1:
            tokens_NK[:, 0] = table.bonus_N
        sent.append(replace(table, tokens_NK=tokens_NK))
    return sent
