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


def load_worker(
    setup: DraftSetup,
    inbox: Inbox,
    clock: Clock,
    on_count: Callable[[int], None],
    watchdog: Watchdog,
) -> tuple[Worker, Callable[[], None]]:
    """Return the worker, and the function that runs it until the inbox is closed. Step thread.

    Raises:
        SetupError: the model cannot be loaded.
    """
    settings, engine, num_token_ids = setup.settings, setup.model.engine, setup.model.num_token_ids
    torch.set_num_threads(settings.threads)
    runner = _load_runner(setup, clock)
    choice = _choice(runner, num_token_ids)
    learning = FanOutLearning(
        engine.branches, settings.state_folder, setup.peer.weights_fingerprint
    )
    learning.load()
    worker = Worker(
        inbox=inbox,
        sessions=Sessions(
            BlockPool(runner.num_blocks),
            max_sessions=engine.max_num_seqs,
            block_size=engine.block_size,
            max_len=engine.max_model_len,
            reserved=settings.num_reserved_positions,
            prefix_cache=settings.prefix_cache,
        ),
        tree=Tree(runner, choice, engine, num_token_ids),
        learning=learning,
        sizes=SizeChoice(engine.branch_counts, is_adaptive=settings.adaptive_branches),
        clock=clock,
        on_count=on_count,
        watchdog=watchdog,
        added_step_seconds=settings.inject_step_ms / 1000,
    )
    return worker, torch.inference_mode()(worker.run)


def _load_runner(setup: DraftSetup, clock: Clock) -> DraftRunner:
    started_at = clock.now()
    on_progress = progress_log()
    runner = load_runner(DraftRunner, setup.model.folder, setup.model.engine, on_progress)
    loaded_at = clock.now()
    runner.warm_up(on_progress)
    DRAFT_STARTUP_SECONDS.labels(part="load").set(loaded_at - started_at)
    DRAFT_STARTUP_SECONDS.labels(part="warm-up").set(clock.now() - loaded_at)
    return runner


def _choice(runner: DraftRunner, num_token_ids: int) -> TokenChoice:
    engine = runner.engine
    if engine.engine != STATIC:
        return RingChoice(engine.max_num_seqs, num_noise_rows(engine), runner.model.vocab_size)
    choice = KeyedChoice(engine.max_num_seqs, engine.device)
    candidates = num_candidates(engine, num_token_ids)
    choice.warm_up(engine.branches, candidates, runner.model.vocab_size)
    return choice
