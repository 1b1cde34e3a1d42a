"""The thread that owns the model: it loads, warms up, runs rounds, and says how it ended."""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.runner import ModelRunner, load_runner
from ssd.errors import SetupError
from ssd.ports import Clock
from ssd.speculation.noise import NoiseRing
from ssd_target.batch_builder import BatchBuilder, Chooser
from ssd_target.decode_loop import DecodeLoop, Parts
from ssd_target.draft_pool import DraftPool
from ssd_target.inbox import Inbox
from ssd_target.scheduler import Limits, Scheduler
from ssd_target.streams import Wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What the step thread needs to know."""

    folder: Path
    engine: EngineConfig
    max_queue: int
    num_threads: int
    cpus: frozenset[int]
    """CPUs it runs on; empty for all."""


class StepThread:
    """A thread with one life: load, serve, end. Asyncio loop, but for ``_run``.

    ``loaded`` has the runner, or the ``SetupError`` that prevented it; ``ended`` is set when the
    thread is over, with False if it crashed.
    """

    def __init__(
        self,
        settings: StepSettings,
        inbox: Inbox,
        drafts: DraftPool,
        clock: Clock,
        on_progress: Callable[[str, float], None],
    ) -> None:
        self._settings = settings
        self._inbox = inbox
        self._drafts = drafts
        self._clock = clock
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self.wakeups = Wakeups(self._loop)
        self.loaded: asyncio.Future[ModelRunner] = self._loop.create_future()
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        # A daemon: a forward pass that never returns must not keep a crashed process alive.
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def _run(self) -> None:
        ended_well = False
        try:
            ended_well = self._load_and_serve()
        finally:
            self._inbox.close()
            self._loop.call_soon_threadsafe(self.ended.set_result, ended_well)

    def _load_and_serve(self) -> bool:
        settings = self._settings
        if settings.cpus:
            os.sched_setaffinity(0, settings.cpus)
        torch.set_num_threads(settings.num_threads)
        try:
            runner = load_runner(settings.folder, settings.engine, self._on_progress)
            runner.warm_up(self._on_progress)
        except SetupError as error:
            self._loop.call_soon_threadsafe(self.loaded.set_exception, error)
            return False
        decode_loop = DecodeLoop(self._assemble(runner))
        self._loop.call_soon_threadsafe(self.loaded.set_result, runner)
        decode_loop.run()
        return True

    def _assemble(self, runner: ModelRunner) -> Parts:
        engine = runner.engine
        limits = Limits(
            max_num_seqs=engine.max_num_seqs,
            max_queue=self._settings.max_queue,
            block_size=engine.block_size,
            prefill_chunk=engine.prefill_chunk,
        )
        # Rows of the round in progress, and of the next one, which are filled while waiting.
        ring = NoiseRing(engine.max_num_seqs, 2 * engine.num_columns, runner.model.vocab_size)
        return Parts(
            inbox=self._inbox,
            scheduler=Scheduler(limits, BlockPool(runner.num_blocks)),
            runner=runner,
            builder=BatchBuilder(
                max_num_seqs=engine.max_num_seqs,
                verify_columns=engine.verify_columns,
                num_blocks_each=-(-engine.max_model_len // engine.block_size),
            ),
            chooser=Chooser(ring, num_columns=engine.num_columns, max_num_seqs=engine.max_num_seqs),
            drafts=self._drafts,
            wakeups=self.wakeups,
            clock=self._clock,
        )
