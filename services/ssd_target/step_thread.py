"""What the target's step thread does: load the model, warm it up, run rounds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd.engine.config import EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.runner import load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.ports import Clock
from ssd.speculation.noise import NoiseRing
from ssd.step_thread import Watchdog
from ssd.telemetry import progress_log
from ssd_target.decoding.batch_builder import BatchBuilder, Sampler
from ssd_target.decoding.decode_loop import DecodeLoop, Parts
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.scheduler import Limits, Scheduler
from ssd_target.drafts.pool import DraftPool
from ssd_target.serving.streams import Wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What the step thread needs to know."""

    folder: Path
    engine: EngineConfig
    max_queue: int
    num_threads: int
    cpus: frozenset[int]
    """CPUs it runs on."""


class ModelLoader:
    """Loads the model and makes the decode loop around it. Step thread."""

    def __init__(
        self,
        settings: StepSettings,
        inbox: Inbox,
        drafts: DraftPool,
        wakeups: Wakeups,
        clock: Clock,
        watchdog: Watchdog,
    ) -> None:
        self._settings = settings
        self._inbox = inbox
        self._drafts = drafts
        self._wakeups = wakeups
        self._clock = clock
        self._watchdog = watchdog

    def load(self) -> tuple[TargetRunner, Callable[[], None]]:
        """Return the runner, and what serves with it until the inbox is closed.

        Raises:
            SetupError: the model cannot be loaded.
        """
        torch.set_num_threads(self._settings.num_threads)
        on_progress = progress_log()
        runner = load_runner(
            TargetRunner, self._settings.folder, self._settings.engine, on_progress
        )
        runner.warm_up(on_progress)
        return runner, DecodeLoop(self._assemble(runner)).run

    def _assemble(self, runner: TargetRunner) -> Parts:
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
                verify_columns=runner.verify_columns,
                num_blocks_each=-(-engine.max_model_len // engine.block_size),
            ),
            sampler=Sampler(ring, num_columns=engine.num_columns, max_num_seqs=engine.max_num_seqs),
            drafts=self._drafts,
            wakeups=self._wakeups,
            clock=self._clock,
            watchdog=self._watchdog,
        )
