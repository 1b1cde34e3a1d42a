"""A target without a model and without threads: the decode loop around a ledger."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
from prometheus_client import REGISTRY
from tests.sequences import check_scheduler

from ssd.engine.batch import BranchBatch
from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.sampling.choose import choose
from ssd.errors import FrameError
from ssd.pool.link import DraftLink
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.runtime.step_thread import Watchdog
from ssd.speculation.backup import BACKUPS
from ssd.speculation.controller import Choice
from ssd.speculation.noise import gumbel_noise
from ssd.testing.ledger_runner import LedgerRunner, law
from ssd.testing.ledger_tree import LedgerTreeRunner
from ssd.testing.scripted_controller import ScriptedController
from ssd.testing.scripted_draft import Behaviour, ScriptedDraft
from ssd.testing.sink import ListSink
from ssd.text.grammar import Grammar
from ssd.types import (
    Mode,
    SamplingParams,
    SpeculationStatistics,
    TokenId,
    Usage,
    Welcome,
)
from ssd_target.decoding.decode_loop import DecodeLoop
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.ports import LoopContext
from ssd_target.decoding.sampler import KeyedSampler, RingSampler
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.decoding.sequence import Sequence
from ssd_target.decoding.sequential_drafter import SequentialDrafter
from ssd_target.decoding.speculation_control import SpeculationControl
from ssd_target.settings import TargetSettings

VOCAB = 13
LOOKAHEAD = 3
COLUMNS = LOOKAHEAD + 1
BRANCHES = 2
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=2**63 + 11)
ENGINE = EngineConfig(
    dtype="bfloat16",
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    num_columns=COLUMNS,
    prefill_chunk=8,
)


Backup = Literal["none", "ngram"]
AnyRunner = Any
"""A ledger, or a ``TargetRunner`` of a model."""


@dataclass(frozen=True)
class Capacity:
    """What a bench computes with."""

    runner: AnyRunner | None = None
    """None: a ledger."""
    num_blocks: int = 80
    step_tokens: int = 8
    prefix_cache: bool = True
    joins_prompts: bool = False
    """Whether the verifies of a ledger can store prompts too."""
    sampler: type[RingSampler | KeyedSampler] = RingSampler


class StepClock:
    """Moves a millisecond each time it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 0.001
        return self.time


class NoWakeups:
    def mark(self, stream: object) -> None: ...

    def flush(self) -> None: ...


class Collector(ListSink):
    """A sink that keeps all."""

    @property
    def tokens(self) -> list[TokenId]:
        return list(self.token_ids)

    @property
    def usage(self) -> Usage:
        usage = self.chunks[-1].usage
        assert usage is not None
        return usage

    @property
    def statistics(self) -> SpeculationStatistics:
        statistics = self.chunks[-1].statistics
        assert statistics is not None
        return statistics


class Bench:
    """A decode loop that is stepped by hand, with a pool that scripted drafts can join."""

    def __init__(
        self,
        *,
        backup: Backup = "none",
        circuit_breaker: bool = True,
        deadline_ms: float = 0.0,
        controller: ScriptedController | None = None,
        own_draft: AnyRunner | None = None,
        **capacity: Any,
    ) -> None:
        self.clock = StepClock()
        self.wakeups = NoWakeups()
        self.controller = controller or ScriptedController(
            Choice(is_on=True, max_proposed=LOOKAHEAD)
        )
        room = Capacity(**capacity)
        self.blocks = BlockPool(room.num_blocks)
        self.runner: AnyRunner = room.runner or LedgerRunner(
            ENGINE, num_blocks=room.num_blocks, vocab_size=VOCAB
        )
        engine = self.runner.engine
        if room.runner is None:
            self.runner.joined_rows = 1000 if room.joins_prompts else 0
        self.inbox = Inbox()
        settings = TargetSettings(
            max_queue=10,
            step_tokens=room.step_tokens,
            prefix_cache=room.prefix_cache,
            lookahead=LOOKAHEAD,
            branches=BRANCHES,
            draft_deadline_ms=deadline_ms,
            backup=backup,
            circuit_breaker=circuit_breaker,
        )
        self.scheduler = Scheduler(
            engine, self.blocks, settings, joined_rows=self.runner.joined_rows
        )
        self.pool = DraftPool(settings, LOOKAHEAD, VOCAB, self.clock)
        self.log = RoundLog()
        self.watchdog = Watchdog(self.clock)
        context = LoopContext(
            inbox=self.inbox,
            drafts=self.pool,
            wakeups=self.wakeups,
            round_log=self.log,
            clock=self.clock,
            watchdog=self.watchdog,
        )
        vocab_size = VOCAB if room.runner is None else room.runner.model.vocab_size
        sampler = room.sampler(engine, vocab_size)
        self.draft_blocks = BlockPool(own_draft.num_blocks if own_draft else 2)
        self.loop = DecodeLoop(
            context,
            self.runner,
            self.scheduler,
            sampler,
            SpeculationControl(self.controller, self.pool, self.log, LOOKAHEAD),
            SequentialDrafter(
                own_draft,
                self.draft_blocks,
                sampler,
                lambda: BACKUPS[self.pool.settings.backup],
            )
            if own_draft
            else None,
        )
        self.num_submitted = 0
        self.grammar: Grammar | None = None
        """Of the next requests."""
        self.all_free = self.blocks.num_free

    def submit(
        self,
        prompt: Iterable[TokenId],
        limit: int = 20,
        *,
        sampling: SamplingParams | None = None,
        mode: Mode = Mode.AUTO,
        eos: Iterable[TokenId] = (),
        **others: Any,
    ) -> Collector:
        self.num_submitted += 1
        sink = Collector()
        sampling, prompt_ids = sampling or GREEDY, tuple(prompt)
        self.inbox.submit(
            Sequence(
                sequence_id=self.num_submitted,
                request_id=str(self.num_submitted),
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=sampling.seed or 0,
                max_len=len(prompt_ids) + limit,
                mode=mode,
                eos_token_ids=frozenset(eos),
                sink=sink,
                stop_detectors=(self.grammar,) if self.grammar else (),
                grammar=self.grammar,
                **others,
            )
        )
        return sink

    def join(
        self,
        script: Iterable[Behaviour],
        *,
        sampling: SamplingParams | None = None,
        name: str = "scripted",
        max_sessions: int = 16,
        max_len: int = 0,
        text: tuple[TokenId, ...] | None = None,
    ) -> ScriptedDraft:
        """Attach a draft whose tables follow from the tokens that the target will emit.

        These are those of ``plain`` with ``sampling``, or those of ``text``, prompt included.
        """
        how = sampling or GREEDY

        def continued(tokens: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
            if text is not None:
                return (*tokens, *text[len(tokens) :], *[0] * 64)[:64]
            return (*tokens, *plain(tokens, 64 - len(tokens), how))

        draft = ScriptedDraft(
            send=lambda frame: self.receive(link, frame),
            end=lambda: self.pool.detach(link, "the draft ended the link"),
            continuations=continued,
            lookahead=LOOKAHEAD,
            vocab_size=VOCAB,
            script=tuple(script),
        )
        welcome = Welcome(
            epoch=1,
            max_sessions=max_sessions,
            lookahead=LOOKAHEAD,
            branches=BRANCHES,
            max_len=max_len,
        )
        link = DraftLink(name, welcome, draft.receive)
        self.pool.attach(link)
        return draft

    def receive(self, link: DraftLink, frame: bytes) -> None:
        try:
            self.pool.receive(link, frame)
        except FrameError as error:
            self.pool.detach(link, str(error))

    def run_rounds(self, num_rounds: int = 1) -> None:
        for _ in range(num_rounds):
            self.loop.run_round()

    def run(self, max_rounds: int = 400) -> None:
        """Step until nothing is left to do, then look for leaks."""
        for _ in range(max_rounds):
            self.run_rounds()
            if self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle, "a sequence does not end"
        check_scheduler(self.scheduler)
        assert self.blocks.num_free == self.all_free
        assert self.draft_blocks.num_taken == 0


def num_preemptions() -> float:
    return REGISTRY.get_sample_value("ssd_preemptions_total") or 0.0


def plain(prompt: Iterable[TokenId], count: int, sampling: SamplingParams) -> list[TokenId]:
    """Plain decoding, one token at a time, straight from the law."""
    tokens = tuple(prompt)
    num_given = len(tokens)
    for _ in range(count):
        tokens = (*tokens, next_token(tokens, sampling))
    return list(tokens[num_given:])


@cache
def next_token(tokens: tuple[TokenId, ...], sampling: SamplingParams) -> TokenId:
    """The token after some; many texts of one test begin alike."""
    position = len(tokens)
    noise_RV = torch.from_numpy(gumbel_noise(sampling.seed or 0, [position], VOCAB))
    logits_RV = law(torch.tensor(tokens), VOCAB)[None]
    return int(choose(logits_RV, torch.tensor([sampling.temperature]), noise_RV)[0])


class OwnDraft(LedgerTreeRunner):
    """The runner of a draft on the target's own device."""

    def __init__(self, num_blocks: int) -> None:
        self.engine = replace(ENGINE, num_columns=COLUMNS, branches=1)
        self.num_blocks = num_blocks
        self.model = SimpleNamespace(vocab_size=VOCAB)
        super().__init__(
            num_slots=self.engine.max_num_seqs,
            num_branches=1,
            lookahead=self.engine.lookahead,
            num_blocks=num_blocks,
            vocab_size=VOCAB,
        )


class OtherLaw(OwnDraft):
    """A draft that seldom agrees with the target."""

    def run_branches(self, batch: BranchBatch) -> torch.Tensor:
        return super().run_branches(batch).roll(1, dims=2)


def own_draft(
    kind: Literal["perfect", "other"], num_blocks: int = 80, *, runs_whole: bool = False
) -> OwnDraft:
    runner = OwnDraft(num_blocks) if kind == "perfect" else OtherLaw(num_blocks)
    runner.whole_tables = ((1, LOOKAHEAD),) if runs_whole else ()
    return runner
