"""Targets that share a draft whose KV blocks do not suffice for all their sequences."""

import itertools
from dataclasses import dataclass

import pytest
from tests.unit.ssd.pool import links
from tests.unit.ssd_draft.ledger_draft import FakeLink

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.pool.pool import DraftPool
from ssd.pool.settings import DraftsSettings
from ssd.testing.clock import FakeClock
from ssd.types import CloseSession, OpenSession, SessionRefused, TargetMessage
from ssd_draft.sessions import Session, Sessions

MAX_LEN = 64
BLOCK = 8
STEP_SECONDS = 0.1
SEQUENCE_SECONDS = 10.0


@dataclass
class SharedDraft:
    """A draft with blocks for some sessions of the maximum length, on a virtual clock."""

    num_sessions: float

    def __post_init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.sessions = Sessions(
            BlockPool(1 + int(self.num_sessions * MAX_LEN) // BLOCK),
            max_sessions=16,
            block_size=BLOCK,
            max_len=MAX_LEN,
            reserved=10,
        )

    def run(self, *targets: "Target", seconds: float) -> list[float]:
        """Return the mean number of sessions of each target."""
        num_steps = int(seconds / STEP_SECONDS)
        totals = [0] * len(targets)
        for _ in range(num_steps):
            for row, target in enumerate(targets):
                totals[row] += target.step()
            self.clock.advance(STEP_SECONDS)
        return [total / num_steps for total in totals]


class Target:
    """A target that always has some sequences of one maximum length."""

    def __init__(
        self, draft: SharedDraft, number: int, num_sequences: int, max_len: int = MAX_LEN
    ) -> None:
        self._draft = draft
        self._max_len = max_len
        self._end = FakeLink(number)
        self._pool = DraftPool(DraftsSettings(branches=2), links.LOOKAHEAD, 10, draft.clock)
        self._link = links.link(max_sessions=16)
        self._link.send = self._receive
        self._pool.attach(self._link)
        self._num_sequences = num_sequences
        self._ids = itertools.count()
        self._ends: dict[int, float] = {}
        draft.sessions.join(self._end)

    def step(self) -> int:
        """End and begin sequences, and open sessions; return how many there are."""
        now = self._draft.clock.now()
        for number in [number for number, end in self._ends.items() if end <= now]:
            del self._ends[number]
            self._pool.end(number)
        while len(self._ends) < self._num_sequences:
            number = next(self._ids)
            self._pool.begin(
                number, OpenSession(token_ids=(1,), max_len=self._max_len, seed=0, temperature=0.0)
            )
            self._ends[number] = now + SEQUENCE_SECONDS + number % 7
        self._pool.open_sessions(self._ends)
        return len(self._link.sessions)

    def _receive(self, message: TargetMessage | bytes) -> None:
        sessions = self._draft.sessions
        if isinstance(message, OpenSession):
            answer = sessions.open(self._end, message, self._draft.clock.now())
            if isinstance(answer, Session):
                self._link.sessions[message.session].is_open = True
            else:
                self._pool.refuse(self._link, SessionRefused(message.session, answer))
        elif isinstance(message, CloseSession):
            found = sessions.find(self._end, message.session)
            if found is not None:
                sessions.close(found)


@pytest.mark.parametrize("num_sessions", [2.0, 2.4, 3.0, 4.0])
def test_a_later_target_gets_its_share_of_the_blocks(num_sessions: float) -> None:
    draft = SharedDraft(num_sessions)
    first = Target(draft, 1, num_sequences=int(num_sessions))
    draft.run(first, seconds=5.0)
    second = Target(draft, 2, num_sequences=int(num_sessions))
    draft.run(first, second, seconds=20.0)
    means = draft.run(first, second, seconds=200.0)
    # A target asks a draft without room once a second, so free blocks wait for a while.
    assert sum(means) > 0.85 * int(num_sessions)
    assert min(means) > 0.85 * (num_sessions // 2)


@pytest.mark.parametrize("num_sessions", [1.0, 2.0])
def test_targets_with_short_sequences_share_the_blocks(num_sessions: float) -> None:
    draft, most = SharedDraft(num_sessions), int(num_sessions * MAX_LEN) // 16
    first = Target(draft, 1, num_sequences=most, max_len=16)
    draft.run(first, seconds=5.0)
    second = Target(draft, 2, num_sequences=most, max_len=16)
    draft.run(first, second, seconds=40.0)
    means = draft.run(first, second, seconds=200.0)
    assert sum(means) > 0.8 * most
    assert min(means) > 0.8 * most / 2


def test_a_single_target_has_all_blocks() -> None:
    draft = SharedDraft(num_sessions=3.0)
    assert draft.run(Target(draft, 1, num_sequences=3), seconds=50.0) == [3.0]


def test_beside_an_idle_target_only_the_blocks_of_one_session_stay_free() -> None:
    draft = SharedDraft(num_sessions=5.0)
    idle = Target(draft, 2, num_sequences=0)
    busy = Target(draft, 1, num_sequences=4)
    assert draft.run(busy, idle, seconds=50.0) == [4.0, 0.0]


@pytest.mark.parametrize(("num_sessions", "num_targets"), [(1.0, 2), (2.0, 3), (2.0, 4), (3.0, 4)])
def test_targets_take_turns_if_there_is_no_session_for_each(
    num_sessions: float, num_targets: int
) -> None:
    draft, targets = SharedDraft(num_sessions), list[Target]()
    for number in range(num_targets):
        targets.append(Target(draft, number, num_sequences=2))
        draft.run(*targets, seconds=5.0)
    means = draft.run(*targets, seconds=400.0)
    assert sum(means) > 0.8 * num_sessions
    assert min(means) > 0.6 * num_sessions / num_targets


def test_a_target_that_no_longer_asks_keeps_no_session_from_others() -> None:
    draft = SharedDraft(num_sessions=1.0)
    first, second = Target(draft, 1, num_sequences=1), Target(draft, 2, num_sequences=1)
    draft.run(first, second, seconds=5.0)
    assert draft.run(first, seconds=200.0)[0] > 0.85
