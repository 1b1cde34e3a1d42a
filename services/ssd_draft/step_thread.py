"""The thread that owns the model: it loads, warms up, grows tables, and says how it ended."""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ssd.engine.config import DTYPES, EngineConfig
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.runner import ModelRunner, load_runner
from ssd.errors import SetupError
from ssd.ports import Clock
from ssd.speculation.fan_out import make_policy
from ssd.speculation.noise import NoiseRing
from ssd.telemetry import DRAFT_STARTUP_SECONDS
from ssd_draft.inbox import Inbox
from ssd_draft.sessions import Sessions
from ssd_draft.tree import Tree, TreeShape
from ssd_draft.worker import Parts, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What the step thread needs to know."""

    folder: Path
    engine: EngineConfig
    num_reserved_positions: int
    """Positions that a tree may reach beyond the committed tokens."""
    num_threads: int
    cpus: frozenset[int]
    """CPUs it runs on."""


class StepThread:
    """A thread with one life: load, serve, end. Asyncio loop, but for ``_run``.

    ``loaded`` has the worker, or the ``SetupError`` that prevented it; ``ended`` is set when the
    thread is over, with False if it crashed.
    """

    def __init__(
        self,
        settings: StepSettings,
        inbox: Inbox,
        clock: Clock,
        on_progress: Callable[[str, float], None],
        on_count: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._inbox = inbox
        self._clock = clock
        self._on_progress = on_progress
        self._on_count = on_count
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Worker] = self._loop.create_future()
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        # A daemon: a forward pass that never returns must not keep a crashed process alive.
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def _run(self) -> None:
        ended_well = False
        # What is raised here goes to threading.excepthook, which logs it.
        try:
            ended_well = self._load_and_serve()
        finally:
            self._inbox.close()
            self._loop.call_soon_threadsafe(self.ended.set_result, ended_well)

    def _load_and_serve(self) -> bool:
        settings = self._settings
        os.sched_setaffinity(0, settings.cpus)
        torch.set_num_threads(settings.num_threads)
        try:
            started_at = self._clock.now()
            runner = load_runner(settings.folder, settings.engine, self._on_progress)
            loaded_at = self._clock.now()
            runner.warm_up(self._on_progress)
            DRAFT_STARTUP_SECONDS.labels(part="load").set(loaded_at - started_at)
            DRAFT_STARTUP_SECONDS.labels(part="warm-up").set(self._clock.now() - loaded_at)
        except SetupError as error:
            self._loop.call_soon_threadsafe(self.loaded.set_exception, error)
            return False
        worker = Worker(self._assemble(runner))
        self._loop.call_soon_threadsafe(self.loaded.set_result, worker)
        with torch.inference_mode():
            worker.run()
        return True

    def _assemble(self, runner: ModelRunner) -> Parts:
        engine = runner.engine
        shape = TreeShape(
            max_sessions=engine.max_num_seqs,
            lookahead=engine.num_columns - 1,
            branches=engine.branches,
            prefill_chunk=engine.prefill_chunk,
            num_blocks_each=-(-engine.max_model_len // engine.block_size),
            vocab_size=engine.num_token_ids or runner.model.vocab_size,
            logits_dtype=DTYPES[engine.dtype],
        )
        ring = NoiseRing(shape.max_sessions, shape.num_noise_rows, runner.model.vocab_size)
        return Parts(
            inbox=self._inbox,
            sessions=Sessions(
                BlockPool(runner.num_blocks),
                max_sessions=shape.max_sessions,
                block_size=engine.block_size,
                max_len=engine.max_model_len,
                reserved=self._settings.num_reserved_positions,
            ),
            tree=Tree(runner, ring, shape),
            policy_of=lru_cache(maxsize=64)(
                lambda policy: make_policy(policy.fan_out_policy, policy.fan_out)
            ),
            prefill_chunk=engine.prefill_chunk,
            clock=self._clock,
            on_count=self._on_count,
        )
