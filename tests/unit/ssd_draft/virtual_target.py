"""A target on a virtual clock: it verifies for a fixed time and follows the real rules of waiting.

The draft is the real worker over a ledger. Its steps take a fixed time, and messages a latency.
"""

import random
from dataclasses import dataclass, field, replace

import torch
from tests.unit.ssd_draft import ledger_draft
from tests.unit.ssd_draft.ledger_draft import Draft, FakeLink, N, a_text

from ssd.engine.batch import BranchBatch
from ssd.pool.link import DraftedSequence, DraftLink
from ssd.pool.rounds import Lookup
from ssd.pool.table_deadline import Prospect, RoundPace, wait_until
from ssd.speculation.sources import Candidates
from ssd.speculation.table import OutcomeTable
from ssd.types import (
    NO_TOKEN,
    Commit,
    LinkSettings,
    LookupResult,
    OpenSession,
    Welcome,
)
from ssd_draft.inbox import Event

ACCEPTANCE = 0.83
LATENCY_SECONDS = 0.0005
LOOKAHEAD = 6
MAX_LEN = 640
ENGINE = replace(ledger_draft.ENGINE, num_columns=LOOKAHEAD + 1, max_model_len=MAX_LEN)


class VirtualClock:
    """A clock that the simulation moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Counts:
    """What the target has done."""

    rounds: int = 0
    tokens: int = 0
    late: int = 0
    depths: list[int] = field(default_factory=list)


class VirtualTarget:
    """One sequence. A round is a hit if a branch has its accepted length, which is random."""

    def __init__(
        self,
        *,
        verify_seconds: float,
        step_seconds: float,
        fan_out_policy: str = "uniform",
        fixed_share: float = 1.0,
    ) -> None:
        """Construct; ``fixed_share`` of a step does not depend on the branches."""
        self.clock = VirtualClock()
        self.draft = Draft(ENGINE, clock=self.clock)
        self.link = FakeLink(settings=LinkSettings(fan_out_policy=fan_out_policy))
        self.text = replace(a_text([5, 9, 2, 7]), lookahead=LOOKAHEAD)
        self.counts = Counts()
        self.num_frames = 0
        self._verify_seconds = verify_seconds
        self._random = random.Random(3)
        self._pace = RoundPace()
        self._arrivals: list[tuple[float, OutcomeTable]] = []
        self._commits: list[tuple[float, Commit]] = []
        welcome = Welcome(epoch=1, max_sessions=1, lookahead=LOOKAHEAD, branches=N)
        self._draft_link = DraftLink("draft", welcome, lambda _message: None)
        committed = tuple(self.text.committed)
        opening = OpenSession(token_ids=committed, max_len=MAX_LEN, seed=0, temperature=0.0)
        self._session = self._draft_link.add_session(DraftedSequence(opening), 0.0)
        run_branches = self.draft.runner.run_branches

        def run_slowly(batch: BranchBatch) -> torch.Tensor:
            share = fixed_share + (1.0 - fixed_share) * batch.tokens_BN.shape[1] / N
            self.clock.time += share * step_seconds
            return run_branches(batch)

        self.draft.runner.run_branches = run_slowly  # type: ignore[method-assign]
        self.draft.inbox.wait = self._wait  # type: ignore[method-assign]
        self.draft.open(self.link, self.text, max_len=MAX_LEN)

    def run(self, num_rounds: int) -> Counts:
        """Run rounds; return what happened in those after the first ten."""
        while not self.draft.worker.run_step():
            pass
        self._need_at = self._verify_seconds
        self._begun_at: float | None = None
        for warm_up in (True, False):
            self.counts = Counts()
            self._first_frame = self.num_frames
            self._started_at = self.clock.time
            while self.counts.rounds < (10 if warm_up else num_rounds):
                self._deliver()
                if not self.draft.worker.run_step():
                    self.clock.time = self._next_event()
        return self.counts

    @property
    def num_frames_counted(self) -> int:
        """Frames that the draft has sent in the counted rounds."""
        return self.num_frames - self._first_frame

    @property
    def tokens_per_verify(self) -> float:
        """Tokens in the time of one verify."""
        seconds = self.clock.time - self._started_at
        return self.counts.tokens * self._verify_seconds / seconds

    def _wait(self, seconds: float | None = None) -> None:
        assert seconds is not None
        self._receive_frames()
        self._advance_target(self.clock.time + seconds)
        arrivals = [max(self.clock.time, at) for at, _ in self._commits]
        self.clock.time = min([self.clock.time + seconds, *arrivals])

    def _deliver(self) -> None:
        """Advance the target to now, and give the draft the commits that have arrived."""
        self._receive_frames()
        self._advance_target(self.clock.time)
        while self._commits and self._commits[0][0] <= self.clock.time:
            at, commit = self._commits.pop(0)
            self.draft.inbox.put(Event(self.link, (commit,), at))

    def _receive_frames(self) -> None:
        for frame in self.link.frames[self.num_frames :]:
            self._arrivals.append((self.clock.time + LATENCY_SECONDS, frame[0]))
        self.num_frames = len(self.link.frames)

    def _next_event(self) -> float:
        times = [at for at, _ in (*self._arrivals, *self._commits)]
        return min(each for each in (*times, self._need_at) if each > self.clock.time)

    def _advance_target(self, now: float) -> None:
        """Let the target do what it does until ``now``."""
        while True:
            at = self._need_at
            arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            if min(at, arrival) > now:
                return
            if arrival <= at:
                self._receive(*self._arrivals.pop(0))
                if self._begun_at is not None:
                    self._look_up(arrival)
            elif self._begun_at is None:
                self._begun_at = at
                self._look_up(at)
            else:
                self._commit(at)

    def _receive(self, at: float, table: OutcomeTable) -> None:
        self._draft_link.sessions[table.session] = self._session
        self._draft_link.receive([table], at)

    def _look_up(self, now: float) -> None:
        """Wait for another column, or commit."""
        assert self._begun_at is not None
        row = Prospect(0)
        if self._session.is_open:
            depth = self._session.depth
            found = Lookup(LookupResult.HIT, (0,) * depth, num_from_table=depth)
            row = self._session.prospect(found, self.text.lookahead)
        self._need_at = wait_until([row], self._pace, self._begun_at, now)
        if self._need_at <= now:
            self._commit(now)

    def _commit(self, now: float) -> None:
        assert self._begun_at is not None
        proposed, table = self.text.proposal, self._session.table
        accepted = 0
        while accepted < len(proposed) and self._random.random() < ACCEPTANCE:
            accepted += 1
        is_hit = table is not None and accepted in table.accepted_N
        if table is not None and is_hit:
            commit = self.text.hit(table, accepted, table.depth)
        else:
            commit = self.text.miss(None, accepted, ())
        if self._session.is_open:
            self._draft_link.add_round([self._session], now)
        if table is not None:
            self._pace.hits.add(1, is_hit)
        waited_us = int(1e6 * (now - self._begun_at))
        self._commits.append((now + LATENCY_SECONDS, replace(commit, waited_us=waited_us)))
        selected = *proposed[:accepted], NO_TOKEN
        self._pace.sources.add_round([(Candidates(tuple(proposed)), selected)])
        self._pace.add_round(self._verify_seconds, is_plain=not proposed)
        self.counts.rounds += 1
        self.counts.tokens += accepted + 1
        self.counts.late += table is None and self._session.is_open
        self.counts.depths.append(self._session.depth)
        self._session.begin_round(len(self.text.committed), now, is_branch=is_hit)
        self._begun_at = None
        self._need_at = now + self._verify_seconds
