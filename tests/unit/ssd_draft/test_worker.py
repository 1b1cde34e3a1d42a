"""The worker over a ledger runner: every branch of every table is recomputed from plain text."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import LinkError
from ssd.speculation.fan_out import make_policy
from ssd.speculation.noise import NoiseRing
from ssd.speculation.table import OutcomeTable
from ssd.step_thread import Watchdog
from ssd.testing.ledger_tree import LedgerTreeRunner
from ssd.testing.plain_text import PlainText
from ssd.types import (
    Branch,
    Commit,
    Explicit,
    LinkSettings,
    OpenSession,
    Outcome,
    RefusalReason,
)
from ssd_draft.inbox import EVENTS_PER_STEP, Closing, Commits, Inbox, LinkLost, Opening
from ssd_draft.sessions import Sessions
from ssd_draft.tree import Tree, TreeShape
from ssd_draft.worker import MAX_PENDING, Parts, Worker

K = 3
N = 12
VOCAB = 61
MAX_LEN = 96
CHUNK = 8
SLOTS = 4
BLOCK = 4


class StillClock:
    def now(self) -> float:
        return 0.0


@dataclass
class FakeLink:
    """Records what the draft sends."""

    number: int = 1
    settings: LinkSettings = field(default_factory=lambda: LinkSettings(fan_out_policy="uniform"))
    frames: list[list[OutcomeTable]] = field(default_factory=list)
    refused: list[tuple[int, RefusalReason]] = field(default_factory=list)
    errors: list[LinkError] = field(default_factory=list)

    def push(self, tables: Collection[OutcomeTable]) -> None:
        self.frames.append(list(tables))

    def refuse(self, session: int, reason: RefusalReason) -> None:
        self.refused.append((session, reason))

    def fail(self, error: LinkError) -> None:
        self.errors.append(error)

    def newest(self, session: int = 1) -> OutcomeTable:
        return next(
            table
            for frame in reversed(self.frames)
            for table in reversed(frame)
            if table.session == session
        )


def a_text(
    committed: list[int], temperature: float = 1.0, seed: int = 0xFEDCBA9876543210
) -> PlainText:
    return PlainText(K, VOCAB, committed, temperature, seed)


class Draft:
    """A worker over a ledger runner; the tests run its steps."""

    def __init__(self, num_blocks: int = 200) -> None:
        self.runner = LedgerTreeRunner(
            num_slots=SLOTS,
            num_branches=N,
            lookahead=K,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
        )
        engine = EngineConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=SLOTS,
            num_columns=K + 1,
            branches=N,
            block_size=BLOCK,
            prefill_chunk=CHUNK,
        )
        shape = TreeShape(engine, VOCAB)
        self.pool = BlockPool(num_blocks)
        self.sessions = Sessions(
            self.pool, max_sessions=SLOTS, block_size=BLOCK, max_len=MAX_LEN, reserved=2 * K + 2
        )
        self.inbox = Inbox(1000, 1 << 20, StillClock())
        self.counts: list[int] = []
        self.worker = Worker(
            Parts(
                inbox=self.inbox,
                sessions=self.sessions,
                tree=Tree(self.runner, NoiseRing(SLOTS, shape.num_noise_rows, VOCAB), shape),
                policy_of=cache(lambda link: make_policy(link.fan_out_policy, link.fan_out)),
                prefill_chunk=CHUNK,
                clock=StillClock(),
                on_count=self.counts.append,
                watchdog=Watchdog(StillClock()),
            )
        )

    def settle(self) -> None:
        while self.worker.run_step():
            pass
        self.sessions.check()

    def open(self, link: FakeLink, text: PlainText, session: int = 1, max_len: int = 90) -> None:
        opening = OpenSession(
            session=session,
            token_ids=tuple(text.committed),
            seed=text.seed,
            temperature=text.temperature,
            max_len=max_len,
        )
        self.inbox.put(Opening(link, opening, 0.0))

    def commit(self, link: FakeLink, *commits: Commit) -> None:
        self.inbox.put(Commits(link, commits, 0.0))


Opened = tuple[Draft, FakeLink, PlainText]


@pytest.fixture(params=[0.0, 0.7, 1.0])
def opened(request: pytest.FixtureRequest) -> Opened:
    draft, link = Draft(), FakeLink()
    text = a_text([5, 9, 2, 7, 1, 1, 3, 8, 4, 30, 11], temperature=request.param)
    draft.open(link, text)
    draft.settle()
    return draft, link, text


def test_the_first_table_contains_outcomes_of_the_first_token(opened: Opened) -> None:
    _, link, text = opened
    table = link.newest()
    text.check(table)
    assert set(table.accepted_N.tolist()) == {0}
    assert len(table.bonus_N) == N


@pytest.mark.parametrize("prompt_len", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK])
def test_prompts_of_any_length_open(prompt_len: int) -> None:
    draft, link, text = Draft(), FakeLink(), a_text([(7 * i) % VOCAB for i in range(prompt_len)])
    draft.open(link, text)
    draft.settle()
    text.check(link.newest())


def test_a_hit_needs_no_explicit_pass(opened: Opened) -> None:
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    for accepted in range(K + 1):
        passes = draft.runner.num_proposal_passes
        text.check(link.newest())
        draft.commit(link, text.hit(link.newest(), accepted, K))
        draft.settle()
        assert draft.runner.num_proposal_passes == passes
    text.check(link.newest())


@pytest.mark.parametrize("num_proposed", range(K + 1))
def test_a_shorter_proposal_ends_the_forks_at_its_own_length(
    opened: Opened, num_proposed: int
) -> None:
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, num_proposed))
    draft.settle()
    text.check(link.newest())
    assert max(link.newest().accepted_N.tolist()) == num_proposed
    draft.commit(link, text.hit(link.newest(), num_proposed, K))
    draft.settle()
    text.check(link.newest())


@pytest.mark.parametrize("guess", [(), (4,), (4, 4, 30)])
def test_a_miss_is_followed_by_a_table_for_the_explicit_tokens(
    opened: Opened, guess: tuple[int, ...]
) -> None:
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    draft.commit(link, text.miss(link.newest(), 2, guess))
    draft.settle()
    text.check(link.newest())
    assert len(link.newest().bonus_N) == N
    draft.commit(link, text.hit(link.newest(), len(guess), K))
    draft.settle()
    text.check(link.newest())


@pytest.mark.parametrize("count", range(K + 1))
def test_explicit_tokens_equal_to_a_branch_use_that_branch(opened: Opened, count: int) -> None:
    draft, link, text = opened
    table = link.newest()
    tokens = table.proposal(3, count)
    bonus = int(table.bonus_N[3])
    draft.commit(link, text.commit(0, bonus, Explicit(tokens)))
    text.move(0, bonus, tokens)
    draft.settle()
    assert draft.runner.num_proposal_passes == 1
    text.check(link.newest())


def test_several_commits_of_a_session_need_one_table(opened: Opened) -> None:
    draft, link, text = opened
    commits = [
        text.hit(link.newest(), 0, 2),
        text.miss(None, 1, (9, 9)),
        text.miss(None, 2, ()),
    ]
    steps = draft.runner.num_branch_steps
    draft.commit(link, *commits)
    draft.settle()
    assert draft.runner.num_branch_steps == steps + K + 1
    text.check(link.newest())


def test_commits_during_prefill_are_applied() -> None:
    draft, link, text = Draft(), FakeLink(), a_text(list(range(2 * CHUNK)))
    draft.open(link, text)
    draft.worker.run_step()
    draft.commit(link, text.miss(None, 0, (3, 4)))
    draft.worker.run_step()
    draft.commit(link, text.miss(None, 1, (5, 6)))
    draft.settle()
    assert len(link.frames) == 1
    text.check(link.newest())
    draft.commit(link, text.hit(link.newest(), 2, K))
    draft.settle()
    text.check(link.newest())


def test_sessions_with_commits_in_one_frame_share_a_batch() -> None:
    draft, link = Draft(), FakeLink()
    texts = {1: a_text([1, 2, 3]), 2: a_text([4, 5], temperature=0.0), 3: a_text([6] * 12, seed=3)}
    for session, text in texts.items():
        draft.open(link, text, session)
    draft.settle()
    steps = draft.runner.num_branch_steps
    commits = []
    for session, text in texts.items():
        commit = text.hit(link.newest(session), 0, K)
        commits.append(Commit(session, commit.base_len, commit.outcome, commit.next))
    draft.commit(link, *commits)
    draft.settle()
    assert draft.runner.num_branch_steps == steps + K + 1
    assert [table.session for table in link.frames[-1]] == [1, 2, 3]
    for session, text in texts.items():
        text.check(link.newest(session))


def test_each_link_gets_the_tables_of_its_policy() -> None:
    draft, texts = Draft(), [a_text([1, 2, 3]), a_text([1, 2, 3])]
    split = LinkSettings(fan_out_policy="explicit", fan_out=(N - 3, 1, 1, 1))
    links = [FakeLink(1), FakeLink(2, settings=split)]
    for link, text in zip(links, texts, strict=True):
        draft.open(link, text)
    draft.settle()
    for link, text in zip(links, texts, strict=True):
        draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    for link, text in zip(links, texts, strict=True):
        text.check(link.newest())
    counts = [link.newest().accepted_N.tolist().count(0) for link in links]
    assert counts == [N // (K + 1), N - 3]


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_gap_closes_the_session(opened: Opened, distance: int) -> None:
    draft, link, text = opened
    base_len = len(text.committed) + distance
    draft.commit(link, Commit(1, base_len, Outcome(0, 1), Explicit()))
    draft.settle()
    assert link.refused == [(1, RefusalReason.GAP)]
    assert len(draft.sessions) == 0


def test_a_session_ends_if_no_tree_fits_into_the_length_of_the_model() -> None:
    draft, link = Draft(), FakeLink()
    last = MAX_LEN - (2 * K + 2)
    text = a_text([i % VOCAB for i in range(last)])
    draft.open(link, text, max_len=2 * MAX_LEN)
    draft.settle()
    text.check(link.newest())
    draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    assert link.refused == [(1, RefusalReason.LENGTH)]
    too_long = a_text([i % VOCAB for i in range(last + 1)])
    draft.open(link, too_long, session=2)
    draft.settle()
    assert link.refused[1:] == [(2, RefusalReason.LENGTH)]


def test_a_session_that_is_not_finite_is_closed_and_the_others_are_served() -> None:
    text = a_text([4, 5, 6])
    alone, link = Draft(), FakeLink()
    alone.open(link, text)
    alone.settle()
    used = {*text.committed, *link.newest().bonus_N, *link.newest().tokens_NK.flatten()}
    bad = next(token for token in range(VOCAB) if token not in used)
    fork = next(token for token in range(VOCAB) if bad in a_text([token]).forks(0, N))
    for committed in ([5, bad, 2], [5, 2, bad], [fork]):
        draft, link = Draft(), FakeLink()
        draft.runner.nan_token = bad
        draft.open(link, a_text(committed), 2)
        draft.open(link, text, 1)
        draft.settle()
        assert link.refused == [(2, RefusalReason.NOT_FINITE)]
        assert [table.session for frame in link.frames for table in frame] == [1]
        text.check(link.newest(1))


def test_a_session_whose_commit_is_not_finite_is_closed(opened: Opened) -> None:
    draft, link, text = opened
    table = link.newest()
    bad = next(token for token in range(VOCAB) if token not in table.bonus_N)
    draft.runner.nan_token = bad
    draft.commit(link, text.commit(0, bad, Explicit()))
    draft.settle()
    assert link.refused == [(1, RefusalReason.NOT_FINITE)]
    assert link.newest() is table


def test_an_id_in_use_ends_the_link() -> None:
    draft, link = Draft(), FakeLink()
    draft.open(link, a_text([1, 2]))
    draft.open(link, a_text([1, 2]))
    draft.settle()
    assert len(link.errors) == 1


def test_a_draining_draft_keeps_its_sessions_and_refuses_new_ones(opened: Opened) -> None:
    draft, link, text = opened
    draft.worker.start_draining()
    draft.open(link, a_text([1, 2]), 2)
    draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    assert link.refused == [(2, RefusalReason.DRAINING)]
    text.check(link.newest())


def test_a_lost_link_closes_only_its_own_sessions() -> None:
    draft, links = Draft(), [FakeLink(1), FakeLink(2)]
    for link in links:
        draft.open(link, a_text([1, 2]))
    draft.settle()
    draft.inbox.put(LinkLost(links[0]))
    draft.settle()
    assert [session.link.number for session in draft.sessions] == [2]
    assert draft.counts[-1] == 1


def test_a_prompt_is_stored_while_others_are_served(opened: Opened) -> None:
    draft, link, text = opened
    draft.open(link, a_text([i % VOCAB for i in range(6 * CHUNK)]), 2)
    for _ in range(30):
        draft.commit(link, text.hit(link.newest(), 0, 0))
        draft.worker.run_step()
        draft.worker.run_step()
    assert any(table.session == 2 for frame in link.frames for table in frame)


Action = tuple[str, int, int]
_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "hit", "gap", "explicit", "lose", "step"]),
        st.integers(1, 6),
        st.integers(0, K),
    ),
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(actions=_ACTIONS)
def test_no_sequence_of_events_leaks_a_block(actions: list[Action]) -> None:
    draft, links = Draft(num_blocks=60), {1: FakeLink(1), 2: FakeLink(2)}
    free = draft.pool.num_free
    opened: set[tuple[int, int]] = set()
    for action, session, count in actions:
        link = links[1 + session % 2]
        key = (link.number, session)
        found = draft.sessions.find(link, session)
        match action:
            case "open" if key not in opened:
                opened.add(key)
                draft.open(link, a_text([1 + i for i in range(6 * count + 1)]), session)
            case "close":
                draft.inbox.put(Closing(link, session))
            case "gap":
                draft.commit(link, Commit(session, 1, Outcome(0, 1), Branch(0, 0)))
            case "explicit" if found:
                outcome = Outcome(0, count)
                guess = Explicit(tuple(range(count)))
                draft.commit(link, Commit(session, found.num_committed, outcome, guess))
            case "hit" if found and found.table is not None:
                table = found.table
                outcome = Outcome(int(table.accepted_N[count]), int(table.bonus_N[count]))
                draft.commit(link, Commit(session, table.base_len, outcome, Branch(count, count)))
            case "lose":
                draft.inbox.put(LinkLost(link))
            case "step":
                draft.worker.run_step()
            case _:
                pass
    draft.settle()
    for link in links.values():
        draft.inbox.put(LinkLost(link))
    draft.settle()
    assert draft.pool.num_free == free
    assert len(draft.sessions) == 0


def test_many_commits_of_one_target_delay_no_table_of_another() -> None:
    draft, hostile, honest = Draft(), FakeLink(1), FakeLink(2)
    text, flood = a_text([1, 2, 3]), a_text([4, 5, 6])
    draft.open(hostile, flood)
    draft.open(honest, text)
    draft.settle()
    first = honest.newest()
    for _ in range(30):
        draft.commit(hostile, flood.miss(None, 0, ()))
    draft.commit(honest, text.hit(first, 0, K))
    passes = draft.runner.num_proposal_passes
    draft.worker.run_step()
    assert honest.newest().base_len == first.base_len + 1, "its table came in the same step"
    assert draft.runner.num_proposal_passes == passes + 1
    draft.settle()
    flood.check(hostile.newest())


def test_a_session_with_too_many_pending_commits_is_closed(opened: Opened) -> None:
    draft, link, text = opened
    for _ in range(MAX_PENDING):
        draft.commit(link, text.miss(None, 0, ()))
    for _ in range(1 + MAX_PENDING // EVENTS_PER_STEP):
        draft.worker.run_step()
    assert link.refused == []
    for _ in range(MAX_PENDING):
        draft.commit(link, text.miss(None, 0, ()))
    draft.settle()
    assert link.refused == [(1, RefusalReason.GAP)]


def test_links_take_turns_when_prompts_are_stored() -> None:
    draft, greedy, modest = Draft(), FakeLink(1), FakeLink(2)
    for session in (1, 2, 3):
        draft.open(greedy, a_text([i % VOCAB for i in range(8 * CHUNK)]), session)
    draft.open(modest, a_text([1, 2, 3]))
    for _ in range(3):
        draft.worker.run_step()
    assert len(modest.frames) == 1
    assert greedy.frames == []
    draft.settle()
