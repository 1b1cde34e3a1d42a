"""Tables sent column by column, or ended early: each column is recomputed from plain text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.ssd_draft.ledger_draft import CHUNK, Draft, FakeLink, K, N, Opened, a_text, hits

from ssd.engine.batch import BranchBatch
from ssd.testing.clock import FakeClock
from ssd.testing.plain_text import PlainText
from ssd.types import Commit
from ssd_draft.inbox import Event
from ssd_draft.table_size import Need


def timed(step_seconds: float, interval: float, waited: float = 0.0) -> Opened:
    """Return a draft whose steps take time, and a target that commits at a fixed interval."""
    clock = FakeClock()
    draft, link = Draft(clock=clock), FakeLink()
    text = a_text([5, 9, 2, 7])
    run_branches = draft.runner.run_branches

    def run_slowly(batch: BranchBatch) -> torch.Tensor:
        clock.advance(step_seconds)
        return run_branches(batch)

    draft.runner.run_branches = run_slowly  # type: ignore[method-assign]
    draft.open(link, text)
    draft.settle()
    for number in range(4):
        commit = text.miss(None, 0, ())
        waiting = replace(commit, waited_us=int(waited * 1e6))
        draft.inbox.put(Event(link, (waiting,), clock.now() + number * interval))
    clock.advance(3 * interval)
    link.frames.clear()
    return draft, link, text


def test_a_table_that_ends_early_has_the_time_since_its_own_commit() -> None:
    draft, link, text = timed(step_seconds=0.010, interval=1.0)
    draft.settle()
    for _ in range(80):
        draft.inbox.put(Event(link, (text.miss(None, 0, ()),), draft.worker.clock.now()))
        for _ in range(K - 1):
            draft.worker.run_step()
    assert draft.worker.table_seconds == pytest.approx(K * 0.010)


def test_the_time_in_which_a_prompt_is_stored_is_no_part_of_a_table() -> None:
    draft, link, text = timed(step_seconds=0.010, interval=1.0)
    needs, choose = list[Need](), draft.worker.sizes.choose

    def noted(num_sessions: int, lengths: Any, need: Need | None, probability_BN: Any) -> Any:
        assert need is not None
        needs.append(need)
        return choose(num_sessions, lengths, need, probability_BN)

    draft.settle()
    draft.worker.sizes.choose = noted  # type: ignore[method-assign]
    draft.open(link, a_text([1, 2, 3]), 2)
    draft.worker.clock.advance(1000.0)  # type: ignore[attr-defined]
    draft.settle()
    draft.inbox.put(Event(link, (text.miss(None, 0, ()),), draft.worker.clock.now()))
    draft.settle()
    assert len(needs) == 2
    assert max(need.spent_seconds for need in needs) < 1.0
    assert draft.worker.table_seconds < 1.0


def test_a_commit_that_arrives_while_its_prompt_is_stored_keeps_its_time() -> None:
    clock = FakeClock()
    draft, link, text = Draft(clock=clock), FakeLink(), a_text(list(range(1, 2 * CHUNK)))
    draft.open(link, text)
    draft.worker.run_step()
    clock.advance(5.0)
    draft.inbox.put(Event(link, (text.miss(None, 0, ()),), clock.now()))
    clock.advance(2.0)
    draft.settle()
    assert draft.worker._recent_seconds[-1] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("interval", "waited", "depths"),
    [
        ((K + 1) * 0.010, 0.0, [K]),
        (0.025, 0.0, [2, 3]),
        (0.045, 0.020, [2, 3]),
        (0.005, 0.0, [1, 2, 3]),
    ],
    ids=["fast enough", "slow", "slow, and the round waited", "very slow"],
)
def test_a_draft_sends_at_the_last_step_before_the_commit_and_after_each_later_one(
    interval: float, waited: float, depths: list[int]
) -> None:
    draft, link, text = timed(0.010, interval, waited)
    draft.settle()
    assert link.depths == depths
    text.check(link.newest())


@pytest.mark.parametrize(("interval", "num_waits"), [(0.100, 0), (0.025, 1), (0.005, 3)])
def test_the_draft_waits_a_moment_for_the_commit_after_late_columns(
    interval: float, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, _, _ = timed(0.010, interval)
    waits: list[float | None] = []
    monkeypatch.setattr(draft.inbox, "wait", waits.append)
    draft.settle()
    assert waits == [0.002] * num_waits


@pytest.mark.parametrize("num_steps", range(1, K + 2))
@pytest.mark.parametrize("num_proposed", range(K + 1))
def test_a_commit_ends_a_table_and_the_winner_keeps_its_tokens(
    opened: Opened, num_steps: int, num_proposed: int
) -> None:
    """Tokens that were chosen and not run need a pass; of the winner only."""
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, K))
    for _ in range(num_steps):
        draft.worker.run_step()
    (session,) = draft.sessions
    assert session.table is not None
    assert session.table.depth == min(num_steps, K)
    text.check(session.table)
    passes, steps = draft.runner.num_proposal_passes, draft.runner.num_branch_steps
    num_proposed = min(num_proposed, session.table.depth)
    draft.apply(link, text.hit(session.table, int(session.table.accepted_N[-1]), num_proposed))
    assert draft.runner.num_proposal_passes - passes == (num_proposed >= num_steps)
    assert draft.runner.num_branch_steps == steps + K + 1, "no further step of the ended table"
    text.check(link.newest())
    draft.apply(link, text.hit(link.newest(), num_proposed, K))
    text.check(link.newest())


def two_sessions() -> tuple[Draft, FakeLink, dict[int, PlainText]]:
    """Return a draft with two open sessions, and their texts."""
    draft, link = Draft(), FakeLink()
    texts = {1: a_text([1, 2, 3]), 2: a_text([4, 5], seed=3)}
    for session, text in texts.items():
        draft.open(link, text, session)
    draft.settle()
    return draft, link, texts


def test_a_commit_ends_only_the_table_of_its_session() -> None:
    draft, link, texts = two_sessions()
    draft.commit(
        link, *(replace(text.miss(None, 0, ()), session=each) for each, text in texts.items())
    )
    draft.worker.run_step()
    draft.commit(link, texts[1].miss(None, 0, (3,)))
    link.frames.clear()
    draft.settle()
    assert sorted(each.session for frame in link.frames for each in frame) == [1, 2]
    for session, text in texts.items():
        text.check(link.newest(session))


def test_a_proposal_with_more_tokens_than_its_branch_is_run(opened: Opened) -> None:
    draft, link, text = opened
    draft.commit(link, text.hit(link.newest(), 0, K))
    draft.worker.run_step()
    (session,) = draft.sessions
    assert session.table is not None
    accepted, bonus = int(session.table.accepted_N[0]), int(session.table.bonus_N[0])
    proposal = (*session.table.proposal(0, 2), 7)
    assert len(proposal) == 2
    commit, passes = text.commit(accepted, bonus, proposal), draft.runner.num_proposal_passes
    text.move(accepted, bonus, proposal)
    draft.apply(link, commit)
    assert draft.runner.num_proposal_passes == passes + 1
    text.check(link.newest())


@pytest.mark.parametrize("length", range(1, K + 1))
def test_a_table_has_the_columns_that_the_target_needs(opened: Opened, length: int) -> None:
    draft, link, text = opened
    for _ in range(3):
        commit = text.hit(link.newest(), 0, min(K, link.newest().depth))
        steps = draft.runner.num_branch_steps
        draft.apply(link, replace(commit, length=length))
        assert draft.runner.num_branch_steps - steps == length + 1
        assert (link.newest().depth, link.newest().length) == (length, length)
        text.check(link.newest())


def test_the_acceptance_counts_tokens_of_tables_only(opened: Opened) -> None:
    draft, link, text = opened
    rates = []

    def commit(commit: Commit) -> None:
        draft.apply(link, commit)
        rates.append(draft.acceptance(link))

    commit(text.miss(link.newest(), 0, (1, 2)))
    commit(text.miss(link.newest(), 1, ()))
    commit(text.hit(link.newest(), 0, K))
    assert rates[0] == rates[1] == rates[2], "none of the verified tokens was from a table"
    commit(text.miss(link.newest(), K, ()))
    assert rates[3] > rates[2]
    commit(text.hit(link.newest(), 0, K))
    commit(text.miss(link.newest(), 0, ()))
    assert rates[5] < rates[3]


def test_each_text_has_its_own_acceptance_and_a_new_one_starts_with_that_of_all() -> None:
    draft, link, texts = two_sessions()
    accepted = {1: K, 2: 0}
    for _ in range(6):
        draft.apply(link, *hits(link, texts))
        misses = [text.miss(link.newest(each), accepted[each], ()) for each, text in texts.items()]
        draft.apply(link, misses[0], replace(misses[1], session=2))
    draft.open(link, a_text([1, 2]), 3)
    draft.settle()
    easy, hard, new = (draft.acceptance(link, each) for each in (1, 2, 3))
    assert easy > new + 0.1
    assert new > hard + 0.3


def test_tables_of_one_batch_have_the_columns_that_any_of_them_needs() -> None:
    draft, link, texts = two_sessions()
    misses = {each: text.miss(None, 0, ()) for each, text in texts.items()}
    draft.apply(link, *(replace(misses[each], session=each, length=each) for each in texts))
    for session, text in texts.items():
        assert link.newest(session).depth == max(texts)
        text.check(link.newest(session))


@pytest.mark.parametrize(("length", "depth"), [(0, K), (1, 2), (2, 2), (K, K)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_builds_the_columns_of_a_table_of_one_session(
    temperature: float, length: int, depth: int
) -> None:
    draft, link = Draft(), FakeLink()
    draft.runner.whole_tables = ((N, 2), (N, K))
    text = a_text([5, 9, 2, 7], temperature=temperature)
    draft.open(link, text)
    draft.settle()
    table = link.newest()
    for _ in range(3):
        link.frames.clear()
        draft.commit(link, replace(text.hit(table, 0, table.depth), length=length))
        draft.worker.run_step()
        assert link.depths == [depth], "all columns in the first step"
        table = link.newest()
        text.check(table)
        draft.settle()
