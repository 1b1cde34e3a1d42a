"""Loads the model on the step thread and constructs the worker that runs there."""

from collections.abc import Callable

import torch

from ssd.engine.config import STATIC
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.runner import load_runner
from ssd.observability.log import progress_log
from ssd.observability.metrics import DRAFT_STARTUP_SECONDS
from ssd.ports import Clock
from ssd.runtime.step_thread import Watchdog
from ssd_draft.fan_out_learning import FanOutLearning
from ssd_draft.inbox import Inbox
from ssd_draft.sessions import Sessions
from ssd_draft.setup import DraftSetup
from ssd_draft.table_size import SizeChoice
from ssd_draft.token_choice import KeyedChoice, RingChoice, TokenChoice
from ssd_draft.tree import Tree, num_candidates, num_noise_rows
from ssd_draft.worker import Worker


class ModelLoader:
    """Loads and warms up the model, and constructs the worker around it. Step thread."""

    def __init__(
        self,
        setup: DraftSetup,
        inbox: Inbox,
        clock: Clock,
        on_count: Callable[[int], None],
        watchdog: Watchdog,
    ) -> None:
        self._setup = setup
        self._inbox = inbox
        self._clock = clock
        self._on_count = on_count
        self._watchdog = watchdog

    def load(self) -> tuple[Worker, Callable[[], None]]:
        """Return the worker, and the function that runs it until the inbox is closed.

        Raises:
            SetupError: the model cannot be loaded.
        """
        model = self._setup.model
        torch.set_num_threads(self._setup.settings.threads)
        started_at = self._clock.now()
        on_progress = progress_log()
        runner = load_runner(DraftRunner, model.folder, model.engine, on_progress)
        loaded_at = self._clock.now()
        runner.warm_up(on_progress)
        DRAFT_STARTUP_SECONDS.labels(part="load").set(loaded_at - started_at)
        DRAFT_STARTUP_SECONDS.labels(part="warm-up").set(self._clock.now() - loaded_at)
        worker = self._assemble(runner)
        return worker, torch.inference_mode()(worker.run)

    def _assemble(self, runner: DraftRunner) -> Worker:
        engine = self._setup.model.engine
        num_token_ids = self._setup.model.num_token_ids
        choice = _choice(runner, num_token_ids)
        learning = FanOutLearning(
            engine.branches,
            self._setup.settings.state_folder,
            self._setup.peer.weights_fingerprint,
        )
        learning.load()
        return Worker(
            inbox=self._inbox,
            sessions=Sessions(
                BlockPool(runner.num_blocks),
                max_sessions=engine.max_num_seqs,
                block_size=engine.block_size,
                max_len=engine.max_model_len,
                reserved=self._setup.settings.num_reserved_positions,
                prefix_cache=self._setup.settings.prefix_cache,
            ),
            tree=Tree(runner, choice, engine, num_token_ids),
            learning=learning,
            sizes=SizeChoice(
                engine.branch_counts, is_adaptive=self._setup.settings.adaptive_branches
            ),
            clock=self._clock,
            on_count=self._on_count,
            watchdog=self._watchdog,
            added_step_seconds=self._setup.settings.inject_step_ms / 1000,
        )


def _choice(runner: DraftRunner, num_token_ids: int) -> TokenChoice:
    engine = runner.engine
    if engine.engine != STATIC:
        return RingChoice(engine.max_num_seqs, num_noise_rows(engine), runner.model.vocab_size)
    choice = KeyedChoice(engine.max_num_seqs, engine.device)
    candidates = num_candidates(engine, num_token_ids)
    choice.warm_up(engine.branches, candidates, runner.model.vocab_size)
    return choice
