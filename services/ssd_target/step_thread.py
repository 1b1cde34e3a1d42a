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


class ModelLoader:
    """Loads and warms up the model, and builds the decode loop for it. Step thread."""

    def __init__(
        self,
        settings: TargetSettings,
        models: TargetModels,
        context: LoopContext,
        join: Callable[[], Group],
    ) -> None:
        """Construct; ``join`` waits for the other ranks of the target's model."""
        self._settings = settings
        self._models = models
        self._context = context
        self._join = join

    def load(self) -> tuple[TargetRunner, Callable[[], None]]:
        """Return the runner, and a function that runs rounds until the inbox is closed.

        Raises:
            SetupError: the model cannot be loaded.
            RankError: another rank of the model has ended or does not answer.
        """
        torch.set_num_threads(self._models.target.engine.threads)
        group = self._join()
        runner = _load(TargetRunner, self._models.target, group)
        draft = self._models.draft
        draft_runner = _load(DraftRunner, draft, ALONE) if draft is not None else None
        loop = self._loop(runner, draft_runner)
        group.begin_service()
        return runner, torch.inference_mode()(loop.run)

    def _loop(self, runner: TargetRunner, draft_runner: DraftRunner | None) -> DecodeLoop:
        engine = runner.engine
        sampler = _sampler(runner, draft_runner)
        drafter = None
        if draft_runner is not None:
            draft_blocks = BlockPool(draft_runner.num_blocks)
            drafter = SequentialDrafter(
                draft_runner,
                draft_runner.engine,
                draft_blocks,
                sampler,
                draft_runner.model.vocab_size,
                lambda: BACKUPS[self._context.drafts.settings.backup],
            )
        return DecodeLoop(
            self._context,
            runner,
            Scheduler(
                engine,
                BlockPool(runner.num_blocks),
                self._settings,
                joined_rows=runner.joined_rows,
            ),
            sampler,
            self._control(runner),
            drafter,
        )

    def _control(self, runner: TargetRunner) -> SpeculationControl:
        context, lookahead = self._context, self._settings.lookahead
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
