"""The worker over a ledger runner: every branch of every table is recomputed from plain text."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ssd_draft.ledger_draft import (
    CHUNK,
    MAX_LEN,
    VOCAB,
    Draft,
    FakeLink,
    K,
    N,
    Opened,
    a_text,
    hits,
)

from ssd.engine.batch import BranchBatch
from ssd.types import CloseSession, Commit, LinkSettings, Outcome, RefusalReason
from ssd_draft.inbox import EVENTS_PER_STEP, Event, LinkChange
from ssd_draft.worker import MAX_PENDING

LAST_SHARES = {"uniform": N // (K + 1), "geometric": 4}
"""Branches of the accepted length K, by policy."""


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


def test_the_filters_of_a_session_apply_to_its_tables_only() -> None:
    """Sessions with filters, and one without in the slot that the first one had."""
    draft, link, text = Draft(), FakeLink(), a_text([5, 9, 2, 7], temperature=1.0)
    found = []
    for session, top_k, min_p in ((1, 1, 0.0), (2, 0, 1.0), (3, 0, 0.0)):
        draft.open(link, text, session, top_k=top_k, min_p=min_p)
        draft.settle()
        found.append(link.newest(session).tokens_NK.tolist())
        draft.inbox.put(Event(link, CloseSession(session)))
        draft.settle()
    text.check(link.newest(3))
    assert found[0] == found[1] != found[2], "both keep the best token"


def test_a_hit_needs_no_pass_over_its_proposal(opened: Opened) -> None:
    draft, link, text = opened
    draft.apply(link, text.hit(link.newest(), 0, K))
    for accepted in range(K + 1):
        passes = draft.runner.num_proposal_passes
        text.check(link.newest())
        draft.apply(link, text.hit(link.newest(), accepted, K))
        assert draft.runner.num_proposal_passes == passes
    text.check(link.newest())


@pytest.mark.parametrize("num_proposed", range(K + 1))
def test_a_shorter_proposal_ends_the_forks_at_its_own_length(
    opened: Opened, num_proposed: int
) -> None:
    draft, link, text = opened
    draft.apply(link, text.hit(link.newest(), 0, num_proposed))
    text.check(link.newest())
    assert max(link.newest().accepted_N.tolist()) == num_proposed
    draft.apply(link, text.hit(link.newest(), num_proposed, K))
    text.check(link.newest())


@pytest.mark.parametrize("guess", [(), (4,), (4, 4, 30)])
def test_a_miss_is_followed_by_a_table_for_its_tokens(
    opened: Opened, guess: tuple[int, ...]
) -> None:
    draft, link, text = opened
    draft.apply(link, text.hit(link.newest(), 0, K))
    draft.apply(link, text.miss(link.newest(), 2, guess))
    text.check(link.newest())
    assert len(link.newest().bonus_N) == N
    draft.apply(link, text.hit(link.newest(), len(guess), K))
    text.check(link.newest())


@pytest.mark.parametrize("count", range(K + 1))
def test_a_proposal_that_begins_a_branch_needs_no_pass(opened: Opened, count: int) -> None:
    draft, link, text = opened
    table = link.newest()
    tokens = table.proposal(3, count)
    bonus = int(table.bonus_N[3])
    draft.commit(link, text.commit(0, bonus, tokens))
    text.move(0, bonus, tokens)
    draft.settle()
    assert draft.runner.num_proposal_passes == 1
    text.check(link.newest())


def test_several_commits_of_a_session_are_applied_as_one_and_need_one_table(opened: Opened) -> None:
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, K), text.miss(None, K, (7, 8)))
    for guess in ((), (9,)):
        draft.commit(link, text.miss(None, len(text.proposal), guess))
    passes, steps = draft.runner.num_proposal_passes, draft.runner.num_branch_steps
    draft.settle()
    assert draft.runner.num_proposal_passes == passes + 2, "one for what was skipped, one more"
    assert draft.runner.num_branch_steps == steps + K + 1
    text.check(link.newest())


@pytest.mark.parametrize("count", [K + 3, 2 * CHUNK])
def test_a_session_that_is_far_behind_stores_what_was_skipped(opened: Opened, count: int) -> None:
    """A target does not wait for its first table, and commits faster than passes of K + 1 rows."""
    draft, link, text = opened
    for _ in range(count):
        draft.commit(link, text.miss(None, 0, ()))
    passes = draft.runner.num_proposal_passes
    draft.settle()
    # One after each chunk, for its last token.
    assert draft.runner.num_proposal_passes == passes + -(-count // (CHUNK + 1))
    text.check(link.newest())


def test_commits_during_prefill_are_applied() -> None:
    draft, link, text = Draft(), FakeLink(), a_text(list(range(2 * CHUNK)))
    draft.open(link, text)
    draft.worker.run_step()
    draft.commit(link, text.miss(None, 0, (3, 4)))
    draft.worker.run_step()
    draft.apply(link, text.miss(None, 1, (5, 6)))
    assert len(link.frames) == 1
    text.check(link.newest())
    draft.apply(link, text.hit(link.newest(), 2, K))
    text.check(link.newest())


def num_complete(link: FakeLink) -> int:
    """Return the number of tables that have arrived with all their columns."""
    return sum(table.depth == table.length for frame in link.frames for table in frame)


@pytest.mark.parametrize(("num_open", "opening"), [(1, [3, 4]), (3, [4])])
def test_a_prompt_waits_for_fewer_tables_where_more_sessions_open(
    num_open: int, opening: list[int]
) -> None:
    draft, link = Draft(), FakeLink()
    texts = {number: a_text([number] * (5 * CHUNK)) for number in range(1, 5)}
    for number in range(1, num_open + 1):
        draft.open(link, texts[number], number)
    draft.settle()
    for number in range(num_open + 1, 5):
        draft.open(link, texts[number], number)
    for _ in range(4):
        num_tables = num_complete(link)
        draft.commit(link, *hits(link, {each: texts[each] for each in range(1, num_open + 1)}))
        while num_complete(link) < num_tables + num_open:
            draft.worker.run_step()
    assert [each.number for each in draft.sessions if not each.is_open] == opening
    draft.settle()
    for number, text in texts.items():
        text.check(link.newest(number))


def test_columns_are_sent_at_once_while_another_session_opens() -> None:
    draft, link = Draft(), FakeLink()
    text, another = a_text([1, 2, 3]), a_text(list(range(5 * CHUNK)))
    draft.open(link, text, 1)
    draft.settle()
    draft.open(link, another, 2)
    draft.commit(link, *hits(link, {1: text}))
    num_frames = len(link.frames)
    while len(link.frames) == num_frames:
        draft.worker.run_step()
    assert link.newest(1).depth < link.newest(1).length
    draft.settle()
    text.check(link.newest(1))
    another.check(link.newest(2))


def test_sessions_with_commits_in_one_frame_share_a_batch() -> None:
    draft, link = Draft(), FakeLink()
    texts = {1: a_text([1, 2, 3]), 2: a_text([4, 5], temperature=0.0), 3: a_text([6] * 12, seed=3)}
    for session, text in texts.items():
        draft.open(link, text, session)
    draft.settle()
    steps = draft.runner.num_branch_steps
    draft.apply(link, *hits(link, texts))
    assert draft.runner.num_branch_steps == steps + K + 1
    assert [table.session for table in link.frames[-1]] == [1, 2, 3]
    for session, text in texts.items():
        text.check(link.newest(session))


def test_each_link_gets_the_tables_of_its_policy() -> None:
    draft, texts = Draft(), [a_text([1, 2, 3]), a_text([1, 2, 3])]
    links = [FakeLink(1), FakeLink(2, settings=LinkSettings(fan_out_policy="geometric"))]
    for link, text in zip(links, texts, strict=True):
        draft.open(link, text)
    draft.settle()
    for link, text in zip(links, texts, strict=True):
        draft.commit(link, text.hit(link.newest(), 0, K))
    draft.settle()
    for link, text in zip(links, texts, strict=True):
        text.check(link.newest())
    counts = [link.newest().accepted_N.tolist().count(K) for link in links]
    assert counts == list(LAST_SHARES.values())


def test_another_policy_of_a_link_applies_to_its_next_tables(opened: Opened) -> None:
    draft, link, text = opened
    counts = []
    policies = ["uniform", "geometric", "uniform"]
    for policy in policies:
        link.settings = LinkSettings(fan_out_policy=policy)
        draft.apply(link, text.hit(link.newest(), 0, K))
        text.check(link.newest())
        counts.append(link.newest().accepted_N.tolist().count(K))
    assert counts == [LAST_SHARES[policy] for policy in policies]


@pytest.mark.parametrize("distance", [-1, 1])
def test_a_gap_closes_the_session(opened: Opened, distance: int) -> None:
    draft, link, text = opened
    base_len = len(text.committed) + distance
    draft.apply(link, Commit(1, base_len, Outcome(0, 1)))
    assert link.refused == [(1, RefusalReason.GAP)]
    assert len(draft.sessions) == 0


def test_a_session_ends_if_no_tree_fits_into_the_length_of_the_model() -> None:
    draft, link = Draft(), FakeLink()
    last = MAX_LEN - (2 * K + 2)
    text = a_text([i % VOCAB for i in range(last)])
    draft.open(link, text, max_len=2 * MAX_LEN)
    draft.settle()
    text.check(link.newest())
    draft.apply(link, text.hit(link.newest(), 0, K))
    assert link.refused == [(1, RefusalReason.LENGTH)]
    too_long = a_text([i % VOCAB for i in range(last + 1)])
    draft.open(link, too_long, session=2)
    draft.settle()
    assert link.refused[1:] == [(2, RefusalReason.LENGTH)]


@pytest.mark.parametrize("first", [0, 1], ids=["in each step", "in the first step only"])
def test_a_session_that_is_not_finite_is_closed_and_the_others_are_served(first: int) -> None:
    """A step runs token 0 where the one before chose none, so with a bad token 0, NaN stays."""
    text = a_text([4, 5, 6])
    alone, link = Draft(), FakeLink()
    alone.open(link, text)
    alone.settle()
    used = {*text.committed, *link.newest().bonus_N, *link.newest().tokens_NK.flatten()}
    bad, fork = next(
        (bad, token)
        for bad in range(first, VOCAB)
        for token in range(VOCAB)
        if bad not in used and token != bad and bad in a_text([token]).forks(0, N)
    )
    assert bool(bad) is bool(first)
    for committed in ([5, bad, 2], [5, 2, bad], [fork]):
        draft, link = Draft(), FakeLink()
        draft.runner.nan_token = bad
        draft.open(link, a_text(committed), 2)
        draft.open(link, text, 1)
        draft.settle()
        assert link.refused == [(2, RefusalReason.NOT_FINITE)]
        assert {table.session for frame in link.frames for table in frame} == {1}
        text.check(link.newest(1))


def test_a_session_whose_commit_is_not_finite_is_closed(opened: Opened) -> None:
    draft, link, text = opened
    table = link.newest()
    bad = next(token for token in range(VOCAB) if token not in table.bonus_N)
    draft.runner.nan_token = bad
    draft.apply(link, text.commit(0, bad))
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
    draft.apply(link, text.hit(link.newest(), 0, K))
    assert link.refused == [(2, RefusalReason.DRAINING)]
    text.check(link.newest())


def test_a_lost_link_closes_only_its_own_sessions() -> None:
    draft, links = Draft(), [FakeLink(1), FakeLink(2)]
    for link in links:
        draft.open(link, a_text([1, 2]))
    draft.settle()
    draft.inbox.put(Event(links[0], LinkChange.LOST))
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
        st.sampled_from(["open", "close", "hit", "gap", "miss", "lose", "step"]),
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
                draft.inbox.put(Event(link, CloseSession(session)))
            case "gap":
                draft.commit(link, Commit(session, 0, Outcome(0, 1)))
            case "miss" if found:
                outcome = Outcome(0, count)
                guess = tuple(range(count))
                draft.commit(link, Commit(session, found.num_committed, outcome, tokens=guess))
            case "hit" if found and found.table is not None:
                table = found.table
                outcome = Outcome(int(table.accepted_N[count]), int(table.bonus_N[count]))
                branch = table.proposal(count, count)
                draft.commit(link, Commit(session, table.base_len, outcome, tokens=branch))
            case "lose":
                draft.inbox.put(Event(link, LinkChange.LOST))
            case "step":
                draft.worker.run_step()
            case _:
                pass
    draft.settle()
    for link in links.values():
        draft.inbox.put(Event(link, LinkChange.LOST))
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
    # The links take turns.
    for _ in range(2 * K):
        passes = draft.runner.num_proposal_passes
        draft.commit(hostile, flood.miss(None, 0, ()))
        draft.worker.run_step()
        assert draft.runner.num_proposal_passes <= passes + 2
    assert honest.newest().base_len == first.base_len + 1, "no step was run for the other target"
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


def test_the_logits_of_closed_sessions_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, link = Draft(), FakeLink()
    run_branches = draft.runner.run_branches
    storages: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def recorded(batch: BranchBatch) -> torch.Tensor:
        array_BNV = run_branches(batch).numpy().copy()
        storages.append(weakref.ref(array_BNV))
        return torch.from_numpy(array_BNV)

    monkeypatch.setattr(draft.runner, "run_branches", recorded)
    texts = {session: a_text([1, 2, 3, session]) for session in (1, 2, 3, 4)}
    for session, text in texts.items():
        draft.open(link, text, session)
    draft.settle()
    while texts:
        # Each session closes after a batch of its own.
        draft.apply(link, *hits(link, texts))
        session, _ = texts.popitem()
        draft.inbox.put(Event(link, CloseSession(session)))
        draft.settle()
        kept = [storage for storage in storages if storage() is not None]
        assert len(kept) == (K + 1 if texts else 0), f"{len(texts)} sessions are open"


def test_the_entries_of_a_session_are_dropped_when_it_ends(opened: Opened) -> None:
    draft, link, _ = opened
    own_XNP = draft.runner.own_XNP
    assert len(own_XNP.unique()) > 1
    draft.inbox.put(Event(link, CloseSession(1)))
    draft.settle()
    assert len(own_XNP.unique()) == 1


def test_links_take_turns_when_prompts_are_stored() -> None:
    draft, greedy, modest = Draft(), FakeLink(1), FakeLink(2)
    for session in (1, 2, 3):
        draft.open(greedy, a_text([i % VOCAB for i in range(8 * CHUNK)]), session)
    draft.open(modest, a_text([1, 2, 3]))
    for _ in range(2 * (1 + K)):
        draft.worker.run_step()
    assert modest.depths[-1] == K
    assert greedy.frames == []
    draft.settle()
