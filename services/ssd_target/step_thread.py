"""The target's step thread: it loads the model, warms it up and runs rounds."""

from collections.abc import Callable

import torch

from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.engine.runner import load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.local_model import LocalModel
from ssd.speculation.controller import Controller
from ssd.telemetry import progress_log
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.calibration import calibrate
from ssd_target.decoding.decode_loop import DecodeLoop
from ssd_target.decoding.ports import LoopContext
from ssd_target.decoding.sampler import Sampler
from ssd_target.decoding.scheduler import Scheduler
from ssd_target.decoding.speculation_control import SpeculationControl
from ssd_target.settings import TargetSettings


class ModelLoader:
    """Loads and warms up the model, and builds the decode loop for it. Step thread."""

    def __init__(self, settings: TargetSettings, model: LocalModel, context: LoopContext) -> None:
        self._settings = settings
        self._model = model
        self._context = context

    def load(self) -> tuple[TargetRunner, Callable[[], None]]:
        """Return the runner, and a function that runs rounds until the inbox is closed.

        Raises:
            SetupError: the model cannot be loaded.
        """
        torch.set_num_threads(self._settings.threads)
        on_progress = progress_log()
        runner = load_runner(TargetRunner, self._model.folder, self._model.engine, on_progress)
        runner.warm_up(on_progress)
        return runner, self._loop(runner).run

    def _loop(self, runner: TargetRunner) -> DecodeLoop:
        engine = runner.engine
        return DecodeLoop(
            self._context,
            runner,
            Scheduler(engine, self._settings.max_queue, BlockPool(runner.num_blocks)),
            BatchBuilder(engine, runner.verify_columns),
            Sampler(engine, runner.model.vocab_size),
            self._control(runner),
        )

    def _control(self, runner: TargetRunner) -> SpeculationControl:
        context, lookahead = self._context, self._settings.lookahead
        calibration = calibrate(runner, runner.verify_columns, context.clock)
        controller = Controller(runner.verify_columns, lookahead, calibration)
        return SpeculationControl(controller, context.drafts, context.round_log, lookahead)
