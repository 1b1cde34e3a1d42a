"""Admission of sessions, and the effect of commits. No model, no threads."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import LinkError
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.speculation.table import OutcomeTable
from ssd.types import Commit, LinkSettings, OpenSession, Outcome, RefusalReason
from ssd_draft.sessions import GapError, Move, Session, Sessions, may_take

MAX_LEN = 64
BLOCK = 8
RESERVED = 10


@dataclass
class SilentLink:
    number: int = 1
    settings: LinkSettings = field(default_factory=LinkSettings)
    batch_times: BatchTimes = field(default_factory=BatchTimes)

    def push(self, tables: Collection[OutcomeTable]) -> None:
        raise AssertionError

    def refuse(self, session: int, reason: RefusalReason) -> None:
        raise AssertionError

    def fail(self, error: LinkError) -> None:
        raise AssertionError


def make_sessions(
    *, max_sessions: int = 2, num_blocks: int = 100, prefix_cache: bool = True
) -> Sessions:
    return Sessions(
        BlockPool(num_blocks),
        max_sessions=max_sessions,
        block_size=BLOCK,
        max_len=MAX_LEN,
        reserved=RESERVED,
        prefix_cache=prefix_cache,
    )


def opening(session: int = 1, *, num_tokens: int = 5, max_len: int = 40) -> OpenSession:
    return OpenSession(
        session=session, token_ids=(3,) * num_tokens, seed=1, temperature=1.0, max_len=max_len
    )


def open_one(sessions: Sessions) -> Session:
    session = sessions.open(SilentLink(), opening(), 0.0)
    assert isinstance(session, Session)
    return session


def with_table() -> Session:
    """A session whose table has the branches (0, 20), (1, 21), (2, 22)."""
    session = open_one(make_sessions())
    session.is_open = True
    session.proposal = (10, 11)
    session.table = OutcomeTable(
        session=1,
        base_len=5,
        accepted_N=np.array([0, 1, 2], dtype=np.int32),
        bonus_N=np.array([20, 21, 22], dtype=np.int32),
        tokens_NK=np.array([[30, 31], [40, 41], [50, 51]], dtype=np.int32),
        length=2,
    )
    return session


def test_slots_limit_the_sessions() -> None:
    sessions, link = make_sessions(max_sessions=1), SilentLink()
    first = sessions.open(link, opening(1), 0.0)
    assert isinstance(first, Session)
    assert sessions.open(link, opening(2), 0.0) is RefusalReason.MAX_SESSIONS
    sessions.close(first)
    assert isinstance(sessions.open(link, opening(3), 0.0), Session)


def test_blocks_limit_the_sessions() -> None:
    sessions, link = make_sessions(num_blocks=1 + 40 // BLOCK), SilentLink()
    assert isinstance(sessions.open(link, opening(1), 0.0), Session)
    assert sessions.open(link, opening(2, max_len=8), 0.0) is RefusalReason.MAX_SESSIONS


def test_sessions_with_the_same_text_need_as_many_free_blocks_as_others() -> None:
    """So that admission does not depend on what is shared, and no session runs out of blocks."""
    sessions, link = make_sessions(max_sessions=4, num_blocks=1 + 3 * 5), SilentLink()
    for number in (1, 2, 3):
        session = sessions.open(link, opening(number, num_tokens=17), 0.0)
        assert isinstance(session, Session)
        assert session.num_stored == 16 * (number > 1)
        sessions.offer(session, 16)
        sessions.check()
    assert sessions.open(link, opening(4, num_tokens=17), 0.0) is RefusalReason.MAX_SESSIONS
    for session in list(sessions):
        sessions.close(session, 16)
        sessions.check()


def test_without_a_prefix_cache_no_session_shares_a_text() -> None:
    sessions = make_sessions(prefix_cache=False)
    for _ in range(2):
        session = open_one(sessions)
        session.tokens.extend(range(30))
        assert not sessions.share(session)
        sessions.close(session, 30)
        sessions.check()


def test_the_newest_token_and_a_block_that_has_begun_are_not_shared() -> None:
    sessions, link = make_sessions(max_sessions=3), SilentLink()
    for number, num_tokens, num_stored, num_after in ((1, 17, 0, 0), (2, 16, 0, 8), (3, 17, 5, 5)):
        session = sessions.open(link, opening(number, num_tokens=num_tokens), 0.0)
        assert isinstance(session, Session)
        if num_stored:
            session.num_stored = num_stored
            assert not sessions.share(session)
        assert session.num_stored == num_after
        sessions.offer(session, 16 if number == 1 else num_after)


@pytest.mark.parametrize(("num_stored", "num_shared"), [(7, 0), (8, 1), (23, 2), (24, 3)])
def test_the_full_blocks_of_a_session_that_ends_are_shared(
    num_stored: int, num_shared: int
) -> None:
    sessions, link = make_sessions(), SilentLink()
    first = open_one(sessions)
    first.is_open = True
    for token in range(30):
        first.apply(Move(1, token, ()))
    sessions.close(first, num_stored)
    again = OpenSession(
        session=2, token_ids=(*first.tokens[:29], 99), seed=2, temperature=0.0, max_len=40
    )
    second = sessions.open(link, again, 0.0)
    assert isinstance(second, Session)
    assert second.num_stored == num_shared * BLOCK
    sessions.check()


def test_the_same_id_on_two_links_is_two_sessions() -> None:
    sessions = make_sessions()
    for number in (1, 2):
        assert isinstance(sessions.open(SilentLink(number), opening(), 0.0), Session)
    with pytest.raises(LinkError):
        sessions.open(SilentLink(1), opening(), 0.0)
    sessions.check()


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "fits"),
    [
        (MAX_LEN - RESERVED, 1000, True),
        (MAX_LEN - RESERVED + 1, 1000, False),
        (12, 13, True),
        (13, 13, False),
    ],
)
def test_a_session_needs_room_for_a_tree_in_the_models_length(
    num_tokens: int, max_len: int, *, fits: bool
) -> None:
    requested = opening(num_tokens=num_tokens, max_len=max_len)
    answer = make_sessions().open(SilentLink(), requested, 0.0)
    assert isinstance(answer, Session) if fits else answer is RefusalReason.LENGTH


@pytest.mark.parametrize(
    ("outcome", "tokens", "branch", "num_from_table"),
    [
        (Outcome(1, 21), (40, 41), 1, 2),
        (Outcome(1, 21), (40,), 1, 1),
        (Outcome(2, 22), (), 2, 0),
        (Outcome(1, 21), (40, 9), None, 1),
        (Outcome(1, 21), (40, 41, 9), None, 2),
        (Outcome(1, 99), (40,), None, 0),
        (Outcome(1, 99), (), None, 0),
    ],
)
def test_a_branch_that_starts_with_the_next_proposal_is_used(
    outcome: Outcome, tokens: tuple[int, ...], branch: int | None, num_from_table: int
) -> None:
    move = with_table().plan(Commit(1, 5, outcome, tokens=tokens))
    num_entries = outcome.accepted + 1
    assert move == Move(num_entries, outcome.bonus, tokens, branch, (), num_from_table)


@pytest.mark.parametrize(
    "commit",
    [
        Commit(1, 4, Outcome(1, 21), tokens=(40, 41)),
        Commit(1, 6, Outcome(1, 21), tokens=(40, 41)),
        Commit(1, 5, Outcome(3, 21)),
    ],
)
def test_a_commit_that_does_not_match_exactly_is_a_gap(commit: Commit) -> None:
    with pytest.raises(GapError):
        with_table().plan(commit)


@pytest.mark.parametrize("tokens", [(), (40, 41)])
def test_a_commit_without_a_table_uses_no_branch(tokens: tuple[int, ...]) -> None:
    session = with_table()
    session.table = None
    move = session.plan(Commit(1, 5, Outcome(1, 21), tokens=tokens))
    assert move == Move(2, 21, tokens)


def test_a_commit_advances_by_the_accepted_tokens_and_the_bonus_token() -> None:
    session = with_table()
    session.apply(session.plan(Commit(1, 5, Outcome(2, 22), tokens=(50, 51))))
    assert (session.num_committed, session.proposal, session.table) == (8, (50, 51), None)


@pytest.mark.parametrize(
    ("mine", "others", "may"),
    [
        (0, [], True),
        (7, [], True),
        (8, [], False),
        (4, [0], True),  # beyond its share, but more than one slot is free
        (6, [0], True),
        (7, [0], False),  # the last free slot is the other link's
        (3, [4], True),  # its own share, to the last slot
        (0, [7], True),
        (4, [3], False),
        (5, [2], False),
        (4, [0, 0], True),
        (6, [0, 0], True),
        (7, [0, 0], False),
        (0, [8], False),
    ],
)
def test_beyond_its_share_a_link_leaves_one_slot_for_links_below_theirs(
    mine: int, others: list[int], *, may: bool
) -> None:
    assert may_take(1, mine, others, 8) == may


@pytest.mark.parametrize(
    ("wanted", "mine", "others", "may"),
    [
        (8, 16, [], True),  # alone, to the last block
        (9, 16, [], False),
        (8, 0, [8], True),
        (4, 8, [0], True),  # to its share
        (4, 12, [0], True),  # beyond it, the longest session of the other link still fits
        (5, 12, [0], False),
        (8, 8, [8], True),  # the share of the other link has no room for a second one
        (4, 8, [4], True),
        (8, 8, [4], False),
        (2, 14, [2], False),  # the other link has a short session, and lacks most of its share
        (2, 12, [2], True),
        (8, 0, [16], True),  # a first session has a share
        (8, 0, [8, 8], True),
        (8, 8, [8, 0], False),
    ],
)
def test_beyond_its_share_a_link_leaves_blocks_for_a_session_of_links_below_theirs(
    wanted: int, mine: int, others: list[int], *, may: bool
) -> None:
    assert may_take(wanted, mine, others, total=24, most=8) == may


def fill(sessions: Sessions, link: SilentLink, first: int = 1) -> list[Session]:
    """Open sessions until one is refused."""
    opened: list[Session] = []
    while isinstance(session := sessions.open(link, opening(first + len(opened)), 0.0), Session):
        opened.append(session)
    return opened


def test_a_link_with_many_sessions_leaves_slots_for_a_later_link() -> None:
    sessions, greedy, late = make_sessions(max_sessions=8), SilentLink(1), SilentLink(2)
    sessions.join(greedy)
    sessions.join(late)
    taken = fill(sessions, greedy)
    assert len(taken) == 7
    assert len(fill(sessions, late)) == 1
    for number, session in enumerate(taken[:3]):
        sessions.close(session)
        assert sessions.open(greedy, opening(100 + number), 0.0) is RefusalReason.MAX_SESSIONS
        assert len(fill(sessions, late, first=10 * number + 10)) == 1
    assert [len(sessions.of(link.number)) for link in (greedy, late)] == [4, 4]
    sessions.check()


def test_a_single_link_has_all_slots_also_after_another_has_left() -> None:
    sessions, alone, gone = make_sessions(max_sessions=8), SilentLink(1), SilentLink(2)
    for link in (alone, gone):
        sessions.join(link)
    sessions.leave(gone)
    assert len(fill(sessions, alone)) == 8
