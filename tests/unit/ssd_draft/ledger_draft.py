"""A draft's worker over a ledger runner, and what it sends, for tests that run its steps."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.errors import LinkError
from ssd.pool.sustainable_sessions import BatchTimes
from ssd.ports import Clock
from ssd.runtime.step_thread import Watchdog
from ssd.speculation.table import OutcomeTable
from ssd.testing.clock import FakeClock
from ssd.testing.ledger_tree import LedgerTreeRunner
from ssd.testing.plain_text import PlainText
from ssd.types import Commit, LinkSettings, OpenSession, RefusalReason
from ssd_draft.fan_out_learning import FanOutLearning
from ssd_draft.inbox import Event, Inbox
from ssd_draft.sessions import Sessions
from ssd_draft.table_size import SizeChoice
from ssd_draft.token_choice import RingChoice
from ssd_draft.tree import Tree, num_noise_rows
from ssd_draft.worker import Worker

K = 3
N = 12
VOCAB = 61
MAX_LEN = 96
CHUNK = 8
BLOCK = 4
ENGINE = EngineConfig(
    max_model_len=MAX_LEN,
    max_num_seqs=4,
    num_columns=K + 1,
    branches=N,
    block_size=BLOCK,
    prefill_chunk=CHUNK,
)


@dataclass
class FakeLink:
    """Records what the draft sends."""

    number: int = 1
    settings: LinkSettings = field(default_factory=lambda: LinkSettings(fan_out_policy="uniform"))
    batch_times: BatchTimes = field(default_factory=BatchTimes)
    frames: list[list[OutcomeTable]] = field(default_factory=list)
    refused: list[tuple[int, RefusalReason]] = field(default_factory=list)
    errors: list[LinkError] = field(default_factory=list)

    @property
    def depths(self) -> list[int]:
        return [table.depth for frame in self.frames for table in frame]

    def push(self, tables: Collection[OutcomeTable]) -> None:
        # A frame contains the columns that are there now; the table goes on to grow.
        self.frames.append([replace(table, tokens_NK=table.tokens_NK.copy()) for table in tables])

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


def hits(link: FakeLink, texts: Mapping[int, PlainText]) -> list[Commit]:
    """Commits with a full proposal of the newest table of each session."""
    return [
        replace(text.hit(link.newest(session), 0, K), session=session)
        for session, text in texts.items()
    ]


class Draft:
    """A worker over a ledger runner; the tests run its steps."""

    def __init__(
        self,
        engine: EngineConfig = ENGINE,
        *,
        num_blocks: int = 200,
        vocab_size: int = VOCAB,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or FakeClock()
        slots, lookahead = engine.max_num_seqs, engine.lookahead
        self.runner = LedgerTreeRunner(
            num_slots=slots,
            num_branches=engine.branches,
            lookahead=lookahead,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
        )
        choice = RingChoice(slots, num_noise_rows(engine), vocab_size)
        self.pool = BlockPool(num_blocks)
        self.sessions = Sessions(
            self.pool,
            max_sessions=slots,
            block_size=engine.block_size,
            max_len=engine.max_model_len,
            reserved=2 * lookahead + 2,
        )
        self.inbox = Inbox(1000, 1 << 20)
        self.counts: list[int] = []
        self.arrived_at = 0.0
        self.learning = FanOutLearning(engine.branches)
        self.worker = Worker(
            inbox=self.inbox,
            sessions=self.sessions,
            tree=Tree(self.runner, choice, engine, vocab_size),
            learning=self.learning,
            sizes=SizeChoice(engine.branch_counts),
            clock=clock,
            on_count=self.counts.append,
            watchdog=Watchdog(clock),
        )

    def settle(self) -> None:
        while self.worker.run_step():
            pass
        self.sessions.check()

    def acceptance(self, link: FakeLink, session: int = 1) -> float:
        found = self.sessions.find(link, session)
        assert found is not None
        return found.acceptance.rate

    def open(
        self,
        link: FakeLink,
        text: PlainText,
        session: int = 1,
        max_len: int = 90,
        *,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> None:
        opening = OpenSession(
            session=session,
            token_ids=tuple(text.committed),
            seed=text.seed,
            temperature=text.temperature,
            max_len=max_len,
            top_k=top_k,
            min_p=min_p,
        )
        self.inbox.put(Event(link, opening))

    def commit(self, link: FakeLink, *commits: Commit) -> None:
        """Deliver commits a second after the ones before: far apart, so tables are sent whole."""
        self.arrived_at += 1.0
        self.inbox.put(Event(link, commits, self.arrived_at))

    def apply(self, link: FakeLink, *commits: Commit) -> None:
        """Deliver commits and build the tables that follow."""
        self.commit(link, *commits)
        self.settle()


Opened = tuple[Draft, FakeLink, PlainText]
