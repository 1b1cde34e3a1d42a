"""Sessions: a draft's copies of sequences, and the effect of each commit. No tensors.

A session with n committed tokens has n - 1 of them in its trunk. The last one and the proposal
that the target is verifying are the entries of its proposal segment (speculation.md, section 3).

*Decision*: a session gets the blocks of its whole length when it opens. *Because*: the KV cache of
a draft is small compared with the cache of its target, an open session never runs out of blocks,
and a target opens a session for at most ``SESSION_TOKENS`` new tokens.
*Not chosen*: allocating block by block, which needs preemption in the draft as well. *Revisit when*
``ssd_draft_sessions`` is limited by blocks and not by ``max_sessions``.

If a draft has fewer sessions than targets, they take turns: a link without sessions that was
refused gets the next one, if it still asks for it.

Sessions whose texts begin alike share the blocks of the beginning, also with those that have ended.
So a text is stored once, although each request of a chat, and each return of mode AUTO to
speculation, begins a session. The whole text of a session is shared when it ends.
"""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import takewhile
from secrets import token_bytes
from typing import Protocol

from ssd.engine.kv_cache.block_pool import BlockPool, Key, chain_keys
from ssd.errors import FrameError, LinkError
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.speculation.estimates import Acceptance
from ssd.speculation.table import OutcomeTable
from ssd.types import Commit, LinkSettings, OpenSession, RefusalReason, TokenId

USUAL_ACCEPTANCE = 0.8
"""Acceptance that is assumed until a target has verified tokens."""
WAITING_SECONDS = 5.0
"""After a refusal, a link without sessions is expected to try again for so long. A target tries in
its first round after one second. A slot stays free for this time if the target has no text left."""
_SALT = token_bytes(16)
"""Secret of the keys of texts, see ``chain_keys``."""


class LinkEnd(Protocol):
    """The draft's end of one link, as used by the step thread. Its methods never block or raise."""

    @property
    def number(self) -> int:
        """Number of the link, unique in the process."""

    @property
    def settings(self) -> LinkSettings:
        """The current settings of the link."""

    @property
    def batch_times(self) -> BatchTimes:
        """Work of the link's batches of tables, without the turns of other links."""

    def push(self, tables: Collection[OutcomeTable]) -> None:
        """Send tables in one frame."""

    def refuse(self, session: int, reason: RefusalReason) -> None:
        """Send that a session is closed or not opened."""

    def fail(self, error: LinkError) -> None:
        """End the link; its sessions are closed when the inbox delivers ``LinkChange.LOST``."""


@dataclass(frozen=True, slots=True)
class Move:
    """The effect of one commit on an open session, or of several that are applied together."""

    num_entries: int
    """Number of entries of the proposal segment that are appended to the trunk, k + 1."""
    bonus: TokenId
    proposal: tuple[TokenId, ...]
    """The next proposal, d_1..d_m."""
    branch: int | None = None
    """The winning branch, whose KV becomes the proposal segment; None: a pass over the proposal."""
    skipped: tuple[TokenId, ...] = ()
    """Committed tokens before ``bonus`` that no pass has run. They follow the appended entries."""
    num_from_table: int = 0
    """Tokens of ``proposal`` that are from a table; they come first."""

    def then(self, later: "Move") -> "Move":
        """Return this move and a later one, neither of which uses a branch, as one move."""
        accepted = self.proposal[: later.num_entries - 1]
        skipped = (*self.skipped, self.bonus, *accepted)
        return Move(self.num_entries, later.bonus, later.proposal, skipped=skipped)


class GapError(LinkError):
    """A commit does not match the state of its session."""


@dataclass(slots=True)
class Session:
    """A draft's copy of one sequence. Step thread only."""

    number: int
    link: LinkEnd
    slot: int
    blocks: list[int]
    max_len: int
    tokens: "array[TokenId]"
    """Committed tokens."""
    keys: list[Key]
    """Keys of the full blocks of the prompt; when the session ends, of the whole text."""
    arrived_at: float
    """Arrival time of the newest commit, or of the opening."""
    proposal: tuple[TokenId, ...] = ()
    """The tokens that the target verifies, d_1..d_m."""
    num_from_table: int = 0
    """Tokens of ``proposal`` that are from a table; they come first."""
    table: OutcomeTable | None = None
    """The newest table, whose columns appear while it is built; None until it begins."""
    num_stored: int = 0
    """Number of tokens in the trunk while the session opens."""
    num_offered: int = 0
    """First blocks that other sessions can share."""
    has_table: bool = False
    """Whether a table has begun since the session opened."""
    has_commit: bool = False
    """Whether a commit has arrived."""
    is_open: bool = False
    """Whether the prompt is in the trunk and the first pass has run."""
    pending: deque[Commit] = field(default_factory=deque)
    length: int = 0
    """Tokens that each branch of the next table needs; 0 is K."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(USUAL_ACCEPTANCE))
    """Acceptance of the tokens of tables in this text."""

    @property
    def num_committed(self) -> int:
        """Number of committed tokens (n), the base length of the next round."""
        return len(self.tokens)

    @property
    def num_to_store(self) -> int:
        """Number of prompt tokens that are not yet in the trunk, while the session opens."""
        return self.num_committed - 1 - self.num_stored

    @property
    def is_due(self) -> bool:
        """Whether its next table can begin."""
        return self.is_open and self.table is None and not self.pending

    def plan(self, commit: Commit) -> Move:
        """Return the effect of a commit, given the newest table.

        Raises:
            GapError: the commit is not of the next round, or accepts more tokens than proposed.
        """
        outcome = commit.outcome
        if commit.base_len != self.num_committed:
            raise GapError(f"commit of base length {commit.base_len}, not {self.num_committed}")
        if outcome.accepted > len(self.proposal):
            raise GapError(f"{outcome.accepted} accepted of {len(self.proposal)} proposed")
        proposal = commit.tokens
        index = self.table.look_up(outcome) if self.table is not None else None
        of_table: tuple[TokenId, ...] = ()
        if self.table is not None and index is not None:
            of_table = self.table.proposal(index, len(proposal))
        pairs = zip(of_table, proposal, strict=False)
        num_from_table = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branch = index if of_table == proposal else None
        num_entries = outcome.accepted + 1
        return Move(num_entries, outcome.bonus, proposal, branch, num_from_table=num_from_table)

    def apply(self, move: Move) -> None:
        """Apply a commit. No other method advances a session."""
        self.tokens.extend((*self.proposal[: move.num_entries - 1], move.bonus))
        self.proposal = move.proposal
        self.num_from_table = move.num_from_table
        self.table = None


class Sessions:
    """All sessions of the process: admission, slots and blocks. Step thread only.

    There are at most ``max_sessions`` sessions, and no more than the blocks of the pool allow. The
    active links share slots and blocks; see ``may_take``. Where there is no session for each link,
    they take turns.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sessions: int,
        block_size: int,
        max_len: int,
        reserved: int,
        prefix_cache: bool = True,
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._max_len = max_len
        self._reserved = reserved
        self._free_slots = list(range(max_sessions))[::-1]
        self._max_sessions = max_sessions
        self._links: set[int] = set()
        self._waiting: dict[int, float] = {}
        """When links without sessions were last refused, in the order of their first refusals."""
        self._sessions: dict[tuple[int, int], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def join(self, link: LinkEnd) -> None:
        """Add a link, which gets a share of the slots and blocks."""
        self._links.add(link.number)

    def leave(self, link: LinkEnd) -> None:
        """Remove a link; the caller closes its sessions."""
        self._links.discard(link.number)
        self._waiting.pop(link.number, None)

    def find(self, link: LinkEnd, number: int) -> Session | None:
        """Return the session with this id on this link."""
        return self._sessions.get((link.number, number))

    def open(
        self, link: LinkEnd, opening: OpenSession, arrived_at: float
    ) -> Session | RefusalReason:
        """Open a session, or return the reason why not.

        Raises:
            FrameError: the link has an open session with this id.
        """
        key = (link.number, opening.session)
        if key in self._sessions:
            raise FrameError(f"session {opening.session} is already open")
        num_tokens = len(opening.token_ids)
        max_len = min(opening.max_len, self._max_len)
        num_blocks = self._num_blocks(max_len)
        if not self._has_room_for_a_tree(num_tokens, max_len):
            return RefusalReason.LENGTH
        is_kept = self._is_kept(link, num_blocks, arrived_at)
        if is_kept or not self._may_open(link, num_blocks):
            if not self.of(link.number):
                self._waiting[link.number] = arrived_at
            return RefusalReason.MAX_SESSIONS
        self._waiting.pop(link.number, None)
        # Without the newest token: its pass has the logits of the first table.
        keys = self._keys(opening.token_ids[:-1])
        # Blocks that are shared are found before others are allocated, which may drop them.
        shared = self._pool.find(keys)
        self._pool.share(shared)
        session = Session(
            number=opening.session,
            link=link,
            slot=self._free_slots.pop(),
            blocks=shared + self._pool.allocate(num_blocks - len(shared)),
            max_len=max_len,
            tokens=array("q", opening.token_ids),
            keys=keys,
            arrived_at=arrived_at,
            num_stored=len(shared) * self._block_size,
        )
        self._sessions[key] = session
        return session

    def has_room(self, session: Session, num_entries: int) -> bool:
        """Return whether a tree still fits after ``num_entries`` more committed tokens."""
        num_committed = session.num_committed + num_entries
        return self._has_room_for_a_tree(num_committed, session.max_len)

    def share(self, session: Session) -> bool:
        """Replace blocks of an opening session by those with its next tokens, if there are some.

        Another session may have stored them since the opening.
        """
        first, remainder = divmod(session.num_stored, self._block_size)
        shared = [] if remainder else self._pool.find(session.keys[first:])
        last = first + len(shared)
        self._pool.share(shared)
        self._pool.free(session.blocks[first:last])
        session.blocks[first:last] = shared
        session.num_stored += len(shared) * self._block_size
        return bool(shared)

    def offer(self, session: Session, num_stored: int) -> None:
        """Let other sessions share the blocks that the first ``num_stored`` tokens fill."""
        num_full = min(num_stored // self._block_size, len(session.keys))
        for index in range(session.num_offered, num_full):
            self._pool.keep(session.blocks[index], session.keys[index])
        session.num_offered = max(session.num_offered, num_full)

    def close(self, session: Session, num_stored: int = 0) -> None:
        """Remove a session and free its slot and blocks.

        Later sessions can share the blocks that its first ``num_stored`` tokens fill.
        """
        first = len(session.keys) * self._block_size
        session.keys += self._keys(session.tokens[first:num_stored], *session.keys[-1:])
        self.offer(session, num_stored)
        del self._sessions[(session.link.number, session.number)]
        self._pool.free(session.blocks)
        self._free_slots.append(session.slot)

    def of(self, number: int) -> list[Session]:
        """Return the sessions of a link, by its number."""
        return [session for session in self if session.link.number == number]

    def check(self) -> None:
        """Assert that each slot and each block has one owner and none is lost."""
        self._pool.check()
        slots = [session.slot for session in self] + self._free_slots
        assert len(set(slots)) == len(slots), "a slot is owned twice"
        held = Counter(block for session in self for block in session.blocks)
        assert len(held) == self._pool.num_taken, "a block without an owner is taken"
        for session in self:
            unique = session.blocks[-(-session.num_committed // self._block_size) :]
            assert all(held[block] == 1 for block in unique), (
                "a block that is written has two owners"
            )

    def _keys(self, tokens: Rows[TokenId], before: Key = _SALT) -> list[Key]:
        """Return the keys of the full blocks of these tokens, after the block of ``before``."""
        return chain_keys(tokens, self._block_size, before) if self._prefix_cache else []

    def _num_blocks(self, max_len: int) -> int:
        return -(-max_len // self._block_size)

    def _may_open(self, link: LinkEnd, num_blocks: int) -> bool:
        slots = dict.fromkeys((*self._links, link.number), 0)
        blocks = slots.copy()
        for session in self:
            number = session.link.number
            slots[number] = slots.get(number, 0) + 1
            blocks[number] = blocks.get(number, 0) + len(session.blocks)
        my_slots, my_blocks = slots.pop(link.number), blocks.pop(link.number)
        total = self._pool.num_free + self._pool.num_taken
        most = self._num_blocks(self._max_len)
        return may_take(1, my_slots, slots.values(), self._max_sessions) and may_take(
            num_blocks, my_blocks, blocks.values(), total, most
        )

    def _is_kept(self, link: LinkEnd, num_blocks: int, now: float) -> bool:
        """Return whether this link must leave a slot and blocks to the link that was refused first.

        Otherwise one target could take each slot again as soon as its session has ended.
        """
        oldest = now - WAITING_SECONDS
        self._waiting = {each: at for each, at in self._waiting.items() if at > oldest}
        if next(iter(self._waiting), link.number) == link.number:
            return False
        num_longest = self._num_blocks(self._max_len)
        has_blocks_for_both = self._pool.can_allocate(num_blocks + num_longest)
        return not has_blocks_for_both or len(self._free_slots) < 2

    def _has_room_for_a_tree(self, num_committed: int, max_len: int) -> bool:
        return num_committed < max_len and num_committed + self._reserved <= self._max_len


def may_take(wanted: int, mine: int, others: Collection[int], total: int, most: int = 1) -> bool:
    """Return whether a link may take ``wanted`` more slots or blocks for a session.

    Up to its share, total / links, a link may take all that are free; its first session may be
    larger. Beyond its share, it leaves free what another link lacks of that link's share, at most
    what the longest session needs, unless that is too little for such a session. So a target that
    links later gets a session at once, and the others as sessions end.

    Args:
        wanted: what the session needs.
        mine: what the sessions of the link have.
        others: what those of each other link have.
        total: what all links share.
        most: what the longest session needs.
    """
    num_free = total - mine - sum(others)
    share = -(-total // (1 + len(others)))
    is_beyond = mine > 0 and mine + wanted > share
    lacking = (share - count for count in others)
    kept = max((min(most, count) for count in lacking if count >= wanted), default=0)
    return wanted + kept * is_beyond <= num_free
