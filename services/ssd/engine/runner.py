"""The part that the runners of target and draft share: an execution, ``prefill`` and the warm-up.

``target_runner`` and ``draft_runner`` contain the passes that only one process uses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.execution import Execution, load_execution
from ssd.engine.parallel.group import ALONE, Group, RankGroup
from ssd.engine.parallel.shard import check_shards, ids_of_ranks
from ssd.engine.rank_loop import SplitTarget
from ssd.engine.sizes import num_weights
from ssd.errors import SettingsError
from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")
Progress = Callable[[str, float], None]


class ModelRunner(ABC):
    """An execution, and the pass that both processes need: ``prefill``.

    Step thread only. Tensors that a pass returns are valid until the next pass.
    """

    execution: Execution
    folder: Path | None = None
    """The model folder; None if the weights were not read from one."""
    _joins_chunks = False
    """Whether several chunks of a prompt run in one pass, with the same bits."""

    def __init__(self, execution: Execution, model: ModelConfig, engine: EngineConfig) -> None:
        self.model = model
        self.engine = engine
        self.execution = execution
        self.num_parameters = num_weights(model)
        self.num_blocks = execution.num_blocks
        self.attention_name = execution.attention_name

    def prefill(
        self, batch: PagedBatch, before_pass: Callable[[], None] = lambda: None
    ) -> int | None:
        """Compute the keys and values of consecutive chunks of one prompt.

        Args:
            batch: one sequence; its number of columns is a multiple of ``prefill_chunk``. On a
                target, its first position is one too, so that a row always has the same bits.
            before_pass: called before each pass.

        Returns:
            The first real column whose hidden state is not finite; None if all are finite.
        """
        chunk = self.engine.prefill_chunk
        count, columns = batch.tokens_BP.shape
        assert count == 1, batch.tokens_BP.shape
        assert columns % chunk == 0, batch.tokens_BP.shape
        width = columns if self._joins_chunks else chunk
        for first in range(0, columns, width):
            num_columns = min(width, int(batch.num_columns_B[0]) - first)
            part = PagedBatch(
                batch.tokens_BP[:, first : first + width],
                batch.first_positions_B + first,
                torch.full_like(batch.num_columns_B, num_columns),
                batch.block_tables_BJ,
            )
            before_pass()
            bad = first_bad(self.execution.prefill(part)[:num_columns])
            if bad is not None:
                return first + bad
        return None

    @abstractmethod
    def warm_up(self, on_progress: Progress) -> None:
        """Run every shape once, so that no request pays for kernel compilation.

        Then the weights are freed of which the execution has copies. ``on_progress`` is called with
        ("warm-up", 0..1).
        """

    def _without_padding_ids(self, logits_BQV: Tensor) -> Tensor:
        num_ids = self.engine.num_token_ids
        if num_ids is not None and num_ids < logits_BQV.shape[-1]:
            logits_BQV[..., num_ids:] = -torch.inf
        return logits_BQV


def first_bad(is_finite_P: Tensor) -> int | None:
    """Return the first column that is not finite."""
    # One read of the device, also where a column is not finite.
    is_finite_P = is_finite_P.cpu()
    return None if bool(is_finite_P.all()) else int(is_finite_P.long().argmin())


AnyRunner = TypeVar("AnyRunner", bound=ModelRunner)


_CUDA_BUILDS = "https://download.pytorch.org/whl/cu130"
_DRIVERS = "CUDA 13 needs a driver of at least 580, CUDA 12 of at least 525"


def require_device(device: str) -> None:
    """Use the device of the settings in this thread; there is no fall-back to another device.

    Raises:
        SettingsError: this machine has no such device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).partition("\n")[0]
        if torch.version.cuda is None and device.startswith("cuda"):
            cause = (
                f"torch {torch.__version__} is built without CUDA; install a CUDA build, for "
                f"example with pip install --force-reinstall torch --index-url {_CUDA_BUILDS}"
            )
        elif "driver" in cause:
            cause += f"; torch is built for CUDA {torch.version.cuda}: {_DRIVERS}"
        raise SettingsError(f"device {device!r} cannot be used here: {cause}") from error
    index = torch.device(device).index
    if device.startswith("cuda") and index is not None:
        # Streams, events and pinned memory belong to the current device of a thread.
        torch.cuda.set_device(index)


def load_runner(
    kind: type[AnyRunner],
    folder: Path,
    engine: EngineConfig,
    on_progress: Progress,
    group: Group = ALONE,
) -> AnyRunner:
    """Read a folder in the layout of Hugging Face and construct its runner, not warmed up.

    ``on_progress`` is called with ("load", 0..1). In a group of ranks, this process is rank 0.

    Raises:
        SetupError: the folder, its config, its weights or the memory do not allow it.
        RankError: another rank has ended or does not answer.
    """
    require_device(engine.device)
    _log.info(
        "engine",
        engine=engine.engine,
        engine_reason=engine.engine_reason,
        dtype=engine.dtype,
        dtype_reason=engine.dtype_reason,
        weights=engine.weights,
        device=engine.device,
        attention=engine.attention,
        tensor_parallel_size=engine.tensor_parallel_size,
    )
    model = ModelConfig.from_folder(folder)
    check_shards(model, engine.tensor_parallel_size)
    execution = load_execution(
        folder, model, engine, lambda fraction: on_progress("load", fraction), group
    )
    if isinstance(group, RankGroup):
        execution = SplitTarget(execution, group, engine, ids_of_ranks(model, group.shard.size))
    runner = kind(execution, model, engine)
    runner.folder = folder
    return runner
