"""The part that the runners of target and draft share: a model, its KV storage, passes over both.

All passes have fixed shapes. They differ in which entries the queries see and in where new entries
are written. The model and the attention kernel are the same. ``target_runner`` and ``draft_runner``
contain the passes that only one process uses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ssd.engine.attention.backend import AttentionBackend, make_backend
from ssd.engine.attention.context import MAX_CHUNKS_A_CALL, AttentionPass, ContextRun, make_run
from ssd.engine.batch import PagedBatch
from ssd.engine.config import DTYPES, EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import EntryMap, KVStorage, fit_block_tables
from ssd.engine.memory import plan_blocks
from ssd.engine.models.registry import CausalModel, load_model
from ssd.errors import SettingsError
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A paged batch with the entries that it writes and the context that it sees."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    tokens_BP: Tensor
    positions_BP: Tensor
    write_BP: Tensor
    """Entries that the pass writes; 0 at padding."""
    runs: list[ContextRun]


class ModelRunner(ABC):
    """A model with its KV storage, and the pass that both processes need: ``prefill``.

    Step thread only.
    """

    def __init__(
        self,
        decoder: CausalModel,
        model: ModelConfig,
        engine: EngineConfig,
        backend: AttentionBackend,
        storage: KVStorage,
    ) -> None:
        self.model = model
        self.engine = engine
        self.num_parameters = 0
        self.num_blocks = storage.entries.num_blocks
        self.attention_name = backend.name
        self._decoder = decoder
        self._backend = backend
        self._storage = storage
        self._entries = storage.entries
        self._group = model.num_heads // model.num_kv_heads
        self._last_position = engine.max_model_len - 1

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> int | None:
        """Compute the keys and values of one chunk of one prompt.

        Args:
            batch: one sequence with ``prefill_chunk`` columns; the first position is a multiple of
                ``prefill_chunk``.

        Returns:
            The first real column whose hidden state is not finite; None if all are finite.
        """
        assert batch.tokens_BP.shape == (1, self.engine.prefill_chunk), batch.tokens_BP.shape
        prepared = self._prepare(batch, 1)
        hidden_RD = self._run_prepared(prepared)[: int(batch.num_columns_B[0])]
        # A sum is finite if its terms are, and takes a twentieth of the time of testing each term.
        is_finite_R = hidden_RD.sum(dim=1, dtype=torch.float32).isfinite()
        return None if bool(is_finite_R.all()) else int(is_finite_R.long().argmin())

    def warm_up(self, on_progress: Progress) -> None:
        """Run every shape once, so that no request pays for kernel compilation.

        Args:
            on_progress: called with ("warm-up", 0..1).
        """
        zero_B = torch.zeros(1, dtype=torch.int64)
        tokens_BP = torch.zeros((1, self.engine.prefill_chunk), dtype=torch.int64)
        self.prefill(PagedBatch(tokens_BP, zero_B, zero_B, zero_B[:, None]))
        counts = self._warm_up_counts()
        for index, count in enumerate(counts):
            self._warm_up(count)
            on_progress("warm-up", (index + 1) / len(counts))

    @abstractmethod
    def _warm_up_counts(self) -> Sequence[int]:
        """Return the numbers of sequences that are shapes of their own, ascending."""

    @abstractmethod
    def _warm_up(self, count: int) -> None:
        """Run the passes of ``count`` sequences once."""

    def _prepare(self, batch: PagedBatch, num_sequences: int) -> PreparedPass:
        columns = batch.tokens_BP.shape[1]
        column_P = torch.arange(columns)
        position_BP = (batch.first_positions_B[:, None] + column_P).clamp_(max=self._last_position)
        width = self.engine.context_chunk
        num_chunks = int(position_BP.max()) // width + 1
        blocks = num_chunks * width // self.engine.block_size
        paged_BS = self._entries.paged(fit_block_tables(batch.block_tables_BJ, blocks))
        write_BP = paged_BS.gather(1, position_BP)
        write_BP = write_BP.where(column_P < batch.num_columns_B[:, None], 0)
        # Chunks are absolute ranges of positions, so they do not depend on the rest of the batch.
        entries_XBS = paged_BS.view(-1, num_chunks, width).transpose(0, 1)
        seen_XS = torch.arange(num_chunks * width).view(num_chunks, width)
        # The kernel's bits depend on its number of queries, so one column is expanded to P.
        query_BP = position_BP.expand(-1, self.engine.num_columns) if columns == 1 else position_BP
        visible_XBQS = seen_XS[:, None, None] <= query_BP[:, :, None]
        runs = [
            self._context(
                entries_XBS[first : first + MAX_CHUNKS_A_CALL],
                visible_XBQS[first : first + MAX_CHUNKS_A_CALL],
            )
            for first in range(0, num_chunks, MAX_CHUNKS_A_CALL)
        ]
        return PreparedPass(num_sequences, batch.tokens_BP, position_BP, write_BP, runs)

    def _run_prepared(self, prepared: PreparedPass) -> Tensor:
        return self._run(
            prepared.tokens_BP,
            prepared.positions_BP,
            prepared.write_BP,
            prepared.runs,
            is_whole=False,
        )

    def _context(self, entries_XBS: Tensor, visible_XBQS: Tensor) -> ContextRun:
        like = self._storage.entries_L2ZW
        return make_run(entries_XBS, visible_XBQS, self._group, self._entries.num_entries, like)

    def _run(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        write_BQ: Tensor,
        runs: list[ContextRun],
        *,
        is_whole: bool,
    ) -> Tensor:
        device = self.engine.device
        attention = AttentionPass(
            self._backend,
            self._storage,
            write_BQ.flatten().to(device),
            runs,
            len(tokens_BQ),
            is_whole=is_whole,
        )
        positions_R = positions_BQ.flatten().clamp(max=self._last_position).to(device)
        return self._decoder.forward(tokens_BQ.flatten().to(device), positions_R, attention)

    def _logits(self, hidden_RD: Tensor, queries: int) -> Tensor:
        logits_RV = self._decoder.logits(hidden_RD)
        if self.engine.num_token_ids is not None:
            logits_RV[:, self.engine.num_token_ids :] = -torch.inf
        return logits_RV.view(-1, queries, logits_RV.shape[1])


AnyRunner = TypeVar("AnyRunner", bound=ModelRunner)


def require_device(device: str) -> None:
    """Check that the device of the settings exists; there is no fall-back to another device.

    Raises:
        SettingsError: this machine has no such device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(f"device {device!r} cannot be used here: {cause}") from error


def load_runner(
    kind: type[AnyRunner], folder: Path, engine: EngineConfig, on_progress: Progress
) -> AnyRunner:
    """Read a model folder and construct its runner, which is not warmed up.

    Args:
        kind: ``TargetRunner`` or ``DraftRunner``.
        folder: a folder in the layout of Hugging Face.
        engine: shapes, precision, device.
        on_progress: called with ("load", 0..1).

    Raises:
        SetupError: the folder, its config, its weights or the memory do not allow it.
    """
    require_device(engine.device)
    _log.info(
        "engine",
        dtype=engine.dtype,
        dtype_reason=engine.dtype_reason,
        device=engine.device,
        attention=engine.attention,
    )
    model = ModelConfig.from_folder(folder)
    dtype = DTYPES[engine.dtype]
    backend = make_backend(engine.attention)
    decoder, num_parameters = load_model(
        folder, model, dtype, engine.device, lambda fraction: on_progress("load", fraction)
    )
    runner = make_runner(kind, decoder, model, engine, backend)
    runner.num_parameters = num_parameters
    return runner


def make_runner(
    kind: type[AnyRunner],
    decoder: CausalModel,
    model: ModelConfig,
    engine: EngineConfig,
    backend: AttentionBackend,
) -> AnyRunner:
    """Allocate the KV storage of a model and construct its runner.

    Raises:
        MemoryBudgetError: not one sequence of maximum length fits.
    """
    dtype = DTYPES[engine.dtype]
    num_blocks = plan_blocks(model, engine, dtype)
    sessions = engine.max_num_seqs if engine.branches else 0
    entries = EntryMap(num_blocks, engine.block_size, engine.num_columns, engine.branches, sessions)
    decoder.prepare(engine.max_model_len)
    return kind(decoder, model, engine, backend, KVStorage(model, entries, dtype, engine.device))
