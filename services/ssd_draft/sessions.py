"""Sessions: a draft's copies of sequences, and what each commit does to one. No tensors.

A session with n committed tokens has n - 1 of them in its trunk; the last one and the proposal
that the target is verifying are the entries of its proposal segment (speculation.md, section 3).

Decision: a session gets the blocks of its whole length when it opens.
Because: a draft's KV is small beside its target's, and a session that was admitted can then never
run short in mid-flight. Not chosen: growing block by block, which needs preemption here as well.
Revisit when: ``ssd_draft_sessions`` is bounded by blocks and not by ``max_sessions``.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import FrameError, LinkError
from ssd.speculation.table import OutcomeTable
from ssd.types import Branch, Commit, LinkPolicy, SessionOpening, TokenId


class Refusal(StrEnum):
    """Why a session is not, or no longer, kept; the words go over the wire."""

    MAX_SESSIONS = "max_sessions"
    GAP = "gap"
    LENGTH = "length"
    DRAINING = "draining"
    NOT_FINITE = "not finite"


class LinkEnd(Protocol):
    """The draft's end of one link, as the step thread sees it. Never blocks, never raises."""

    @property
    def number(self) -> int:
        """Unique in the life of the process."""
        ...

    @property
    def policy(self) -> LinkPolicy:
        """The fan-out policy in force."""
        ...

    def push(self, tables: Collection[OutcomeTable]) -> None:
        """Send tables in one frame."""
        ...

    def refuse(self, session: int, reason: Refusal) -> None:
        """Tell the target that a session is not kept."""
        ...

    def fail(self, error: LinkError) -> None:
        """End the link; its sessions are dropped when ``LinkLost`` comes back through the inbox."""
        ...


@dataclass(frozen=True, slots=True)
class Move:
    """What one commit does to a live session."""

    num_entries: int
    """Entries of the proposal segment that join the trunk, k + 1."""
    bonus: TokenId
    proposal: tuple[TokenId, ...]
    """The next proposal, d_1..d_m."""
    branch: int | None
    """The branch whose KV becomes the next proposal segment; None runs an explicit pass."""


class GapError(LinkError):
    """A commit does not follow from what the session knows."""


@dataclass(slots=True)
class Session:
    """A draft's copy of one sequence. Step thread only."""

    number: int
    link: LinkEnd
    slot: int
    blocks: list[int]
    max_len: int
    tokens: list[TokenId]
    """Committed tokens; no longer kept up to date, and empty, once the prompt is stored."""
    num_committed: int
    """Committed tokens (n), the base length of the coming round."""
    arrived_at: float
    """When the newest commit or the opening came off the wire."""
    proposal: tuple[TokenId, ...] = ()
    """What the target is verifying, d_1..d_m."""
    table: OutcomeTable | None = None
    """The newest table; None while it is due."""
    num_stored: int = 0
    """Tokens of the trunk stored so far, while opening."""
    is_open: bool = False
    """Whether the prompt is stored and the first pass has run."""
    pending: deque[Commit] = field(default_factory=deque)

    @property
    def num_to_store(self) -> int:
        """Tokens that belong into the trunk and are not there yet, while opening."""
        return self.num_committed - 1 - self.num_stored

    def plan(self, commit: Commit) -> Move:
        """What a commit asks for, given the newest table.

        Raises:
            GapError: the commit is not of the coming round, or speaks of what was never proposed.
        """
        outcome = commit.outcome
        if commit.base_len != self.num_committed:
            raise GapError(f"commit of base length {commit.base_len}, not {self.num_committed}")
        if outcome.accepted > len(self.proposal):
            raise GapError(f"{outcome.accepted} accepted of {len(self.proposal)} proposed")
        index = self.table.look_up(outcome) if self.table is not None else None
        num_entries = outcome.accepted + 1
        if isinstance(commit.next, Branch):
            if self.table is None or index != commit.next.index:
                raise GapError(f"branch {commit.next.index} is not that of the outcome")
            proposal = self.table.proposal(index, commit.next.num_proposed)
            return Move(num_entries, outcome.bonus, proposal, index)
        proposal = commit.next.tokens
        is_branch = (
            self.table is not None
            and index is not None
            and self.table.proposal(index, len(proposal)) == proposal
        )
        return Move(num_entries, outcome.bonus, proposal, index if is_branch else None)

    def apply(self, move: Move) -> None:
        """Become the session after a commit; the only place where one moves forward."""
        if not self.is_open:
            self.tokens += [*self.proposal[: move.num_entries - 1], move.bonus]
        self.num_committed += move.num_entries
        self.proposal = move.proposal
        self.table = None


class Sessions:
    """All sessions of the process: admission, slots and blocks. Step thread only.

    At most ``max_sessions`` sessions, and no more than the blocks of the pool allow. Links that are
    up share the slots: see ``may_open``.
    """

    def __init__(
        self, pool: BlockPool, *, max_sessions: int, block_size: int, max_len: int, reserved: int
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_len = max_len
        self._reserved = reserved
        self._free_slots = list(range(max_sessions))[::-1]
        self._max_sessions = max_sessions
        self._links: set[int] = set()
        self._sessions: dict[tuple[int, int], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def join(self, link: LinkEnd) -> None:
        """A link is up and has its share of the slots."""
        self._links.add(link.number)

    def leave(self, link: LinkEnd) -> None:
        """A link is gone; its sessions are closed one by one."""
        self._links.discard(link.number)

    def find(self, link: LinkEnd, number: int) -> Session | None:
        """The session of that id on that link."""
        return self._sessions.get((link.number, number))

    def open(self, link: LinkEnd, opening: SessionOpening, arrived_at: float) -> Session | Refusal:
        """Admit a session, or say why not.

        Raises:
            FrameError: the id is in use on this link.
        """
        key = (link.number, opening.session)
        if key in self._sessions:
            raise FrameError(f"session {opening.session} is open already")
        num_tokens = len(opening.token_ids)
        max_len = min(opening.max_len, self._max_len)
        num_blocks = -(-max_len // self._block_size)
        if not self._has_room_for_a_tree(num_tokens, max_len):
            return Refusal.LENGTH
        if not self._may_take_a_slot(link) or not self._pool.can_allocate(num_blocks):
            return Refusal.MAX_SESSIONS
        session = Session(
            number=opening.session,
            link=link,
            slot=self._free_slots.pop(),
            blocks=self._pool.allocate(num_blocks),
            max_len=max_len,
            tokens=list(opening.token_ids),
            num_committed=num_tokens,
            arrived_at=arrived_at,
        )
        self._sessions[key] = session
        return session

    def has_room(self, session: Session, num_entries: int) -> bool:
        """Whether a tree fits beyond the tokens committed once ``num_entries`` more are."""
        num_committed = session.num_committed + num_entries
        return self._has_room_for_a_tree(num_committed, session.max_len)

    def close(self, session: Session) -> None:
        """Forget a session and take back what it held."""
        del self._sessions[(session.link.number, session.number)]
        self._pool.free(session.blocks)
        self._free_slots.append(session.slot)

    def of(self, link: LinkEnd) -> list[Session]:
        """The sessions of a link."""
        return [each for each in self if each.link.number == link.number]

    def check(self) -> None:
        """Assert that slots and blocks are owned once and none is lost."""
        self._pool.check()
        slots = [each.slot for each in self] + self._free_slots
        assert len(set(slots)) == len(slots), "a slot is owned twice"
        held = [block for each in self for block in each.blocks]
        assert len(set(held)) == len(held), "a block is owned twice"

    def _may_take_a_slot(self, link: LinkEnd) -> bool:
        held = dict.fromkeys(self._links, 0)
        for session in self:
            held[session.link.number] = held.get(session.link.number, 0) + 1
        mine = held.pop(link.number, 0)
        return may_open(mine, list(held.values()), self._max_sessions)

    def _has_room_for_a_tree(self, num_committed: int, max_len: int) -> bool:
        return num_committed < max_len and num_committed + self._reserved <= self._max_len


def may_open(mine: int, others: Collection[int], max_sessions: int) -> bool:
    """Whether a link with so many sessions may open one more beside those of the other links.

    A link takes any free slot up to its share, ceil(max_sessions / links). Beyond it, it leaves one
    slot free as long as another link is below its own: hardly a slot is idle for links that want
    none, and a target that comes late finds one at once and the rest as sessions end.
    """
    num_free = max_sessions - mine - sum(others)
    share = -(-max_sessions // (1 + len(others)))
    keeps_one_free = mine >= share and any(each < share for each in others)
    return num_free > keeps_one_free
