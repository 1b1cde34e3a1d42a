"""The target's step thread: it loads the model, warms it up and runs rounds."""

from collections.abc import Callable

import torch

from ssd.engine.config import STATIC
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.rank_loop import SplitTarget
from ssd.engine.runner import AnyRunner, load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.model_files.local_model import LocalModel
from ssd.observability.log import progress_log
from ssd.speculation.backup import BACKUPS
from ssd.speculation.controller import Controller
from ssd_target.decoding.calibration import calibrate
from ssd_target.decoding.decode_loop import DecodeLoop
from ssd_target.decoding.ports import LoopContext
from ssd_target.decoding.sampler import KeyedSampler, RingSampler, Sampler
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.decoding.sequential_drafter import SequentialDrafter
from ssd_target.decoding.speculation_control import SpeculationControl
from ssd_target.models import TargetModels
from ssd_target.settings import TargetSettings


def load_target(
    settings: TargetSettings,
    models: TargetModels,
    context: LoopContext,
    join: Callable[[], Group],
) -> tuple[TargetRunner, Callable[[], None]]:
    """Return the runner, and a function that runs rounds until the inbox is closed. Step thread.

    ``join`` waits for the other ranks of the target's model.

    Raises:
        SetupError: the model cannot be loaded.
        RankError: another rank of the model has ended or does not answer.
    """
    torch.set_num_threads(models.target.engine.threads)
    group = join()
    runner = _load(TargetRunner, models.target, group)
    draft_runner = _load(DraftRunner, models.draft, ALONE) if models.draft is not None else None
    sampler = _sampler(runner, draft_runner)
    drafter = None
    if draft_runner is not None:
        drafter = SequentialDrafter(
            draft_runner,
            BlockPool(draft_runner.num_blocks),
            sampler,
            lambda: BACKUPS[context.drafts.settings.backup],
        )
    blocks = BlockPool(runner.num_blocks)
    scheduler = Scheduler(runner.engine, blocks, settings, joined_rows=runner.joined_rows)
    control = _control(runner, context, settings.lookahead)
    loop = DecodeLoop(context, runner, scheduler, sampler, control, drafter)
    group.begin_service()
    return runner, torch.inference_mode()(loop.run)


def _control(runner: TargetRunner, context: LoopContext, lookahead: int) -> SpeculationControl:
    calibration = calibrate(runner, runner.row_counts, context.clock)
    controller = Controller(runner.row_counts, lookahead, calibration)
    return SpeculationControl(controller, context.drafts, context.round_log, lookahead)


def _sampler(runner: TargetRunner, draft_runner: DraftRunner | None) -> Sampler:
    """Return the sampler that reads the logits of both models where they are."""
    engine, execution, vocab_size = runner.engine, runner.execution, runner.model.vocab_size
    ranks = execution if isinstance(execution, SplitTarget) else None
    if ranks is not None:
        ranks.warm_up_choice()
    elif engine.engine != STATIC:
        return RingSampler(engine, vocab_size)
    sampler = KeyedSampler(engine, vocab_size, ranks)
    models = [each.model for each in (runner, draft_runner) if each is not None]
    sampler.warm_up(engine.num_columns, {model.vocab_size for model in models})
    return sampler


def _load(kind: type[AnyRunner], model: LocalModel, group: Group) -> AnyRunner:
    on_progress = progress_log()
    runner = load_runner(kind, model.folder, model.engine, on_progress, group)
    runner.warm_up(on_progress)
    return runner
