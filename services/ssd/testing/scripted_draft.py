"""A draft that knows the future and does with it what a script says: hits, misses, lies, dies.

It stands at the far end of an in-process channel, holds no model, and answers inside the call that
brings a commit, so that a test needs neither threads nor sleeps.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, repeat

import numpy as np

from ssd.errors import LinkError
from ssd.speculation.table import OutcomeTable, pack_tables, row_width, unpack_commits
from ssd.transport.frame import Frame, FrameKind, TensorChannel
from ssd.types import (
    Branch,
    Commit,
    Outcome,
    SessionClosing,
    SessionOpening,
    TargetMessage,
    TokenId,
)


class Behaviour(StrEnum):
    """What the draft does where a table is due."""

    HIT = "hit"
    """The table holds the outcome, followed by the right tokens."""
    HALF = "half"
    """The table holds the outcome, followed by one right token and wrong ones."""
    WRONG = "wrong"
    """The table holds the outcome, followed by wrong tokens only."""
    MISS = "miss"
    """The table holds other outcomes."""
    SILENT = "silent"
    """No table."""
    LATE = "late"
    """The table leaves with the one that is due next, and is stale by then."""
    FOREIGN = "foreign"
    """The table names a session that does not exist."""
    OLD_EPOCH = "old epoch"
    """The frame belongs to an earlier life of the link."""
    AHEAD = "ahead"
    """The table answers a commit that was never made."""
    BAD_ID = "bad id"
    """The table proposes an id outside the vocabulary."""
    GARBAGE = "garbage"
    """The rows are noise."""
    DIE = "die"
    """The channel closes."""


@dataclass(slots=True)
class _Session:
    tokens: list[TokenId]
    future: tuple[TokenId, ...]
    proposal: tuple[TokenId, ...] = ()
    table: OutcomeTable | None = None


@dataclass(slots=True)
class ScriptedDraft:
    """The far end of a link. Runs in the caller's thread.

    ``continuations`` maps committed tokens to the whole text as the target will write it, prompt
    included; ``script`` gives one behaviour a table, and its last word holds for ever.
    """

    channel: TensorChannel
    continuations: Callable[[tuple[TokenId, ...]], tuple[TokenId, ...]]
    lookahead: int
    vocab_size: int
    script: Iterable[Behaviour] = (Behaviour.HIT,)
    epoch: int = 1
    heard: list[TargetMessage] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    _sessions: dict[int, _Session] = field(default_factory=dict)
    _held_back: list[OutcomeTable] = field(default_factory=list)
    _behaviours: Iterator[Behaviour] = field(default_factory=lambda: iter(()))
    _is_dead: bool = False

    def __post_init__(self) -> None:
        script = tuple(self.script)
        self._behaviours = chain(script, repeat(script[-1]))

    @property
    def num_sessions(self) -> int:
        """Sessions that the target has opened and not closed."""
        return len(self._sessions)

    def start(self) -> None:
        """Listen for commits."""
        self.channel.start(self._on_frame, lambda _error: None)

    def hear(self, message: TargetMessage) -> None:
        """Take a control message, as a link's ``say``.

        Raises:
            LinkError: the draft is dead.
        """
        if self._is_dead:
            raise LinkError("the scripted draft is dead")
        self.heard.append(message)
        if isinstance(message, SessionOpening):
            future = self.continuations(message.token_ids)
            self._sessions[message.session] = _Session(list(message.token_ids), future)
            self._answer([message.session])
        elif isinstance(message, SessionClosing):
            self._sessions.pop(message.session, None)

    def _on_frame(self, frame: Frame) -> None:
        commits = unpack_commits(frame.rows_RW, self.lookahead)
        self.commits += commits
        for commit in commits:
            self._adopt(commit)
        self._answer([commit.session for commit in commits])

    def _adopt(self, commit: Commit) -> None:
        session = self._sessions[commit.session]
        assert commit.base_len == len(session.tokens), "a commit is missing or came twice"
        session.tokens += [*session.proposal[: commit.outcome.accepted], commit.outcome.bonus]
        if isinstance(commit.next, Branch):
            assert session.table is not None
            index, count = commit.next.index, commit.next.num_proposed
            session.proposal = session.table.proposal(index, count)
        else:
            session.proposal = commit.next.tokens

    def _answer(self, sessions: list[int]) -> None:
        for number in sessions:
            if not self._is_dead and number in self._sessions:
                self._act(next(self._behaviours), number)

    def _act(self, behaviour: Behaviour, number: int) -> None:
        session = self._sessions[number]
        table = self._table(number, session, behaviour)
        session.table = table
        match behaviour:
            case Behaviour.SILENT:
                return
            case Behaviour.LATE:
                self._held_back.append(table)
                return
            case Behaviour.DIE:
                self._is_dead = True
                self.channel.close()
                return
            case Behaviour.GARBAGE:
                rows_RW = np.full((3, row_width(self.lookahead)), -7, dtype=np.int32)
            case _:
                tables = [*self._held_back, table]
                self._held_back.clear()
                rows_RW = pack_tables(tables, row_width(self.lookahead))
        epoch = self.epoch - (behaviour is Behaviour.OLD_EPOCH)
        self.channel.send(Frame(FrameKind.TABLES, epoch, 1, rows_RW))

    def _table(self, number: int, session: _Session, behaviour: Behaviour) -> OutcomeTable:
        """A table of two branches: a wrong outcome and the true one, each with its own tokens.

        A table that is to miss has the first alone.
        """
        base_len = len(session.tokens)
        outcome = self._outcome(session)
        after = session.future[base_len + outcome.accepted + 1 :][: self.lookahead]
        right = np.full(self.lookahead, -1, dtype=np.int32)
        right[: len(after)] = after
        keep = {Behaviour.HALF: 1, Behaviour.WRONG: 0}.get(behaviour, self.lookahead)
        right[keep:] = np.where(right[keep:] < 0, -1, (right[keep:] + 1) % self.vocab_size)
        if behaviour is Behaviour.BAD_ID:
            right[:] = self.vocab_size
        wrong = np.where(right < 0, -1, (right + 1) % self.vocab_size).astype(np.int32)
        wrong_bonus = (outcome.bonus + 1) % self.vocab_size
        bonus_N = np.array([wrong_bonus, outcome.bonus], dtype=np.int32)
        count = 1 if behaviour is Behaviour.MISS else 2
        return OutcomeTable(
            session=number + 1000 * (behaviour is Behaviour.FOREIGN),
            base_len=base_len + 100 * (behaviour is Behaviour.AHEAD),
            part=0,
            accepted_N=np.full(2, outcome.accepted, dtype=np.int32)[:count],
            bonus_N=bonus_N[:count],
            tokens_NK=np.stack([wrong, right])[:count],
        )

    def _outcome(self, session: _Session) -> Outcome:
        """What the target will decide, since the future is known."""
        base_len = len(session.tokens)
        truth = session.future[base_len:]
        accepted = 0
        for proposed, true in zip(session.proposal, truth, strict=False):
            if proposed != true:
                break
            accepted += 1
        bonus = truth[accepted] if accepted < len(truth) else 0
        return Outcome(accepted, bonus)
