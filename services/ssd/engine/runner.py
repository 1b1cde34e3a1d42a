"""Forward passes of fixed shapes over one model and one KV storage.

Four passes: ``forward`` (a target's verify; plain decoding is its one-column case), ``prefill``,
and a draft's ``run_explicit`` and ``run_branches``. They differ in which slots the queries see and
where new entries go; the model and the attention kernel are the same.

*Same shape, same bits*: a verify has P columns, or one when no sequence has a proposal; sequences
are padded to few counts; and attention runs over context chunks of fixed width merged in order. In
deterministic mode there is one shape only, so a row's bits do not depend on its column, its batch
mates or speculation.

*Decision*: the fast mode has the one-column shape where all linears are packed and the warm-up
finds the same bits in both. *Because*: with the pair widened 4x, 8 sequences took 31 ms, not 91,
in bf16. Packed linears sum in one order from 2 rows on (bf16 and fp32, AVX-512 and AVX2, weights up
to 1024 x 14336); plain ones do not: 7 and 16 rows differ. *Not chosen*: packing alone, which holds
for the measured CPUs; the comparison alone, since rounding to bf16 hides rare differences; a shape
for each proposal length, since start-up time and CUDA graphs grow with their number. *Revisit when*
proposals are mostly shorter than K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ssd.engine.attention.backend import AttentionBackend, make_backend
from ssd.engine.attention.context import (
    MAX_CHUNKS_A_CALL,
    AttentionPass,
    ContextRun,
    first_slots,
    make_run,
    widen,
)
from ssd.engine.batch import BranchBatch, ExplicitBatch, PagedBatch
from ssd.engine.config import DTYPES, EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import KVStorage, SlotMap
from ssd.engine.memory import plan_blocks
from ssd.engine.models.registry import CausalModel, load_model
from ssd.errors import SettingsError
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")
Progress = Callable[[str, float], None]
MIN_ROWS = 2
"""Fewest rows of a pass. A single row uses matrix-vector kernels, which sum in another order: on
AVX-512 packed fp32 linears of 1,536 inputs and more, and most bf16 ones, give other bits."""

OTHER_BITS = "one column alone has other logits than the same column among K+1"


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A paged batch with the slots that it writes and the context that it sees."""

    num_sequences: int
    """Those that are no padding; they come first."""
    tokens_BP: Tensor
    positions_BP: Tensor
    write_BP: Tensor
    """Slots of the new entries; 0 at padding."""
    runs: list[ContextRun]


class ModelRunner:
    """A model, its KV storage and the passes over them.

    Belongs to the step thread.
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
        self.num_blocks = storage.slots.num_blocks
        self.verify_columns: tuple[int, ...] = (engine.num_columns,)
        """Column counts that a verify may have, ascending; the last one fits every proposal."""
        self.attention_name = backend.name
        self._decoder = decoder
        self._backend = backend
        self._storage = storage
        self._slots = storage.slots
        self._group = model.num_heads // model.num_kv_heads
        self._last_position = engine.max_model_len - 1
        self._branch_context: ContextRun | None = None
        self._num_shared = 0
        self._buckets = sequence_buckets(engine)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch) -> Tensor:
        """Verify: run P columns of up to ``max_num_seqs`` sequences, or one.

        Returns:
            fp32 logits [B, P, V]; row i of a sequence chooses the token after column i. Rows of
            padding columns mean nothing. A row that is not finite affects no other row.
        """
        return self.verify(self.prepare(batch))

    @torch.inference_mode()
    def prepare(self, batch: PagedBatch) -> PreparedPass:
        """Pad a batch and build its slots and masks: all of ``forward`` that is not the model."""
        num_sequences, columns = batch.tokens_BP.shape
        padded = _pad_sequences(batch, self._bucket(num_sequences, columns))
        return self._prepare(padded, num_sequences)

    @torch.inference_mode()
    def verify(self, prepared: PreparedPass) -> Tensor:
        """Run a prepared batch; see ``forward``."""
        hidden_RD = self._run_prepared(prepared)
        logits_BPV = self._logits(hidden_RD, prepared.tokens_BP.shape[1])
        return logits_BPV[: prepared.num_sequences]

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> int | None:
        """Run one chunk of one prompt for its keys and values.

        Args:
            batch: one sequence; ``prefill_chunk`` columns, the first at a multiple of it.

        Returns:
            The first real column whose hidden state is not finite; None if all are.
        """
        assert batch.tokens_BP.shape == (1, self.engine.prefill_chunk), batch.tokens_BP.shape
        hidden_RD = self._run_prepared(self._prepare(batch, 1))[: int(batch.num_columns_B[0])]
        # A sum is finite if its terms are, and 20 times faster than to ask each.
        is_finite_R = hidden_RD.sum(dim=1, dtype=torch.float32).isfinite()
        return None if bool(is_finite_R.all()) else int(is_finite_R.long().argmin())

    @torch.inference_mode()
    def run_explicit(self, batch: ExplicitBatch) -> Tensor:
        """Run proposals that a target spelt out, into the proposal segments; [B, P, V] fp32."""
        num_sequences, columns = batch.tokens_BP.shape
        column_P = torch.arange(columns)
        is_real_BP = column_P < batch.num_columns_B[:, None]
        proposal_BP = self._slots.proposal(batch.slots_B)
        trunk_BS, in_trunk_BS = self._trunk(batch.block_tables_BJ, batch.trunk_lengths_B)
        visible_BPS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, columns, -1),
                (column_P <= column_P[:, None]).expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        run = self._whole_context(torch.cat((trunk_BS, proposal_BP), dim=1), visible_BPS)
        positions_BP = batch.trunk_lengths_B[:, None] + column_P
        hidden_RD = self._run(
            batch.tokens_BP, positions_BP, proposal_BP.where(is_real_BP, 0), [run], is_whole=True
        )
        return self._logits(hidden_RD, columns)

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """Run one step of all branches; fp32 logits [B, N, V].

        Steps are run in order from 0; slots, accepted lengths and trunks of step 0 hold for all.
        """
        branches = batch.tokens_BN.shape[1]
        own_BPN = self._slots.own(batch.slots_B)
        if batch.step == 0:
            self._branch_context, self._num_shared = self._branch_run(batch, own_BPN)
        assert self._branch_context is not None
        run = first_slots(self._branch_context, self._num_shared + (batch.step + 1) * branches)
        positions_BN = batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step
        hidden_RD = self._run(
            batch.tokens_BN, positions_BN, own_BPN[:, batch.step], [run], is_whole=True
        )
        return self._logits(hidden_RD, branches)

    @torch.inference_mode()
    def append_proposal(
        self,
        slots_B: Tensor,
        num_entries_B: Tensor,
        trunk_lengths_B: Tensor,
        block_tables_BJ: Tensor,
    ) -> None:
        """Copy the first ``num_entries`` proposal columns behind the trunks.

        The pages at positions trunk_length..trunk_length+num_entries-1 must be in the tables.
        """
        column_P = torch.arange(self.engine.num_columns)
        is_kept_BP = column_P < num_entries_B[:, None]
        paged_BS = self._slots.paged(block_tables_BJ)
        position_BP = (trunk_lengths_B[:, None] + column_P).clamp_(max=paged_BS.shape[1] - 1)
        to_BP = paged_BS.gather(1, position_BP)
        from_BP = self._slots.proposal(slots_B)
        self._storage.copy(from_BP[is_kept_BP], to_BP[is_kept_BP])

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """Make one branch's own entries the proposal segment of its session."""
        own_BPN = self._slots.own(slots_B)
        index_BP1 = branches_B[:, None, None].expand(-1, own_BPN.shape[1], 1)
        from_BP = own_BPN.gather(2, index_BP1).squeeze(2)
        self._storage.copy(from_BP.flatten(), self._slots.proposal(slots_B).flatten())

    def warm_up(self, on_progress: Progress) -> None:
        """Run every shape once, so that the first request pays for nothing.

        A target's engine also compares narrow verifies with wide ones: ``verify_columns`` has both
        afterwards if all linears are packed and the bits are the same.
        """
        self._warm_prefill()
        self.verify_columns = (self.engine.num_columns,)
        if self._decoder.is_packed:
            self.verify_columns = self.engine.verify_columns
        # A draft's passes are not padded: each number of sessions is a shape.
        is_draft = self.engine.branches > 0
        warm = self._warm_branches if is_draft else self._warm_forward
        counts = range(1, self.engine.max_num_seqs + 1) if is_draft else self._buckets
        for index, count in enumerate(counts):
            warm(count)
            on_progress("warm-up", (index + 1) / len(counts))

    def _bucket(self, num_sequences: int, columns: int) -> int:
        bucket = next(count for count in self._buckets if count >= num_sequences)
        return max(bucket, MIN_ROWS) if columns == 1 else bucket

    def _prepare(self, batch: PagedBatch, num_sequences: int) -> PreparedPass:
        columns = batch.tokens_BP.shape[1]
        column_P = torch.arange(columns)
        position_BP = (batch.first_positions_B[:, None] + column_P).clamp_(max=self._last_position)
        width = self.engine.context_chunk
        num_chunks = int(position_BP.max()) // width + 1
        blocks = num_chunks * width // self.engine.block_size
        paged_BS = self._slots.paged(_fit(batch.block_tables_BJ, blocks))
        write_BP = paged_BS.gather(1, position_BP)
        write_BP = write_BP.where(column_P < batch.num_columns_B[:, None], 0)
        # Chunk by chunk: absolute runs of positions, whatever else is in the batch.
        slots_XBS = paged_BS.view(-1, num_chunks, width).transpose(0, 1)
        seen_XS = torch.arange(num_chunks * width).view(num_chunks, width)
        # The kernel's bits depend on its number of queries: a narrow verify asks as many as a wide.
        asking_BP = position_BP.expand(-1, self.engine.num_columns) if columns == 1 else position_BP
        visible_XBQS = seen_XS[:, None, None] <= asking_BP[:, :, None]
        runs = [
            self._context(
                slots_XBS[first : first + MAX_CHUNKS_A_CALL],
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

    def _trunk(self, block_tables_BJ: Tensor, trunk_lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the trunks' slots, in whole blocks, and which are in use."""
        width = self.engine.block_size
        num_blocks = -(-int(trunk_lengths_B.max()) // width)
        num_slots = num_blocks * width
        tables_BJ = _fit(block_tables_BJ, num_blocks)
        in_use_BS = torch.arange(num_slots) < trunk_lengths_B[:, None]
        return self._slots.paged(tables_BJ), in_use_BS

    def _branch_run(self, batch: BranchBatch, own_BPN: Tensor) -> tuple[ContextRun, int]:
        """Build the context of the last step, and say how many of its slots all branches share.

        Earlier steps see a prefix of its slots.
        """
        num_sequences, branches = batch.tokens_BN.shape
        columns = self.engine.num_columns
        trunk_BS, in_trunk_BS = self._trunk(batch.block_tables_BJ, batch.trunk_lengths_B)
        proposal_BP = self._slots.proposal(batch.slots_B)
        same_branch_NX = torch.eye(branches, dtype=torch.bool).repeat(1, columns)
        visible_BNS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, branches, -1),
                torch.arange(columns) <= batch.accepted_BN[:, :, None],
                same_branch_NX.expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        slots_BS = torch.cat((trunk_BS, proposal_BP, own_BPN.flatten(1)), dim=1)
        return self._whole_context(slots_BS, visible_BNS), trunk_BS.shape[1] + columns

    def _whole_context(self, slots_BS: Tensor, visible_BQS: Tensor) -> ContextRun:
        slots_BS, visible_BQS = widen(slots_BS, visible_BQS)
        return self._context(slots_BS[None], visible_BQS[None])

    def _context(self, slots_XBS: Tensor, visible_XBQS: Tensor) -> ContextRun:
        like = self._storage.entries_L2ZW
        return make_run(slots_XBS, visible_XBQS, self._group, self._slots.num_slots, like)

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

    def _warm_prefill(self) -> None:
        self.prefill(_blank_paged(1, self.engine.prefill_chunk))

    def _warm_forward(self, count: int) -> None:
        """Verify ``count`` copies of one text: wide, then its last column alone."""
        columns = self.engine.num_columns
        zero_B = torch.zeros(count, dtype=torch.int64)
        tokens_BP = (torch.arange(columns) * 7919 % self.model.vocab_size).expand(count, -1)
        # Nothing is served yet, so the first blocks are free.
        blocks_J = torch.arange(1, self.num_blocks)[: -(-columns // self.engine.block_size)]
        tables_BJ = blocks_J.expand(count, -1)
        wide_BPV = self.forward(PagedBatch(tokens_BP, zero_B, zero_B + columns, tables_BJ))
        if 1 not in self.verify_columns:
            return
        narrow_B1V = self.forward(
            PagedBatch(tokens_BP[:, -1:], zero_B + columns - 1, zero_B + 1, tables_BJ)
        )
        if not torch.equal(narrow_B1V[:, 0], wide_BPV[:, -1]):
            self.verify_columns = (columns,)
            _log.info("narrow_verify_off", sequences=count, reason=OTHER_BITS)

    def _warm_branches(self, count: int) -> None:
        slot_B, zero_B = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        table_B1 = zero_B[:, None]
        tokens_BP = zero_B[:, None].expand(-1, self.engine.num_columns)
        one_B = zero_B + 1
        self.run_explicit(ExplicitBatch(slot_B, tokens_BP, one_B, one_B, table_B1))
        tokens_BN = zero_B[:, None].expand(-1, self.engine.branches)
        self.run_branches(BranchBatch(slot_B, tokens_BN, tokens_BN, 0, one_B, table_B1))


def sequence_buckets(engine: EngineConfig) -> list[int]:
    """Return the sequence counts that a pass is padded to, ascending."""
    if engine.deterministic:
        return [engine.max_num_seqs]
    buckets = [1]
    while buckets[-1] < engine.max_num_seqs:
        buckets.append(min(buckets[-1] * 2, engine.max_num_seqs))
    return buckets


def require_device(device: str) -> None:
    """Hold the settings to the machine: nothing falls back to another device.

    Raises:
        SettingsError: there is no such device here.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(f"device {device!r} cannot be used here: {cause}") from error


def load_runner(folder: Path, engine: EngineConfig, on_progress: Progress) -> ModelRunner:
    """Read a model folder and make a runner for it; nothing is warmed up yet.

    Args:
        folder: Hugging Face style.
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
    runner = make_runner(decoder, model, engine, backend)
    runner.num_parameters = num_parameters
    return runner


def make_runner(
    decoder: CausalModel, model: ModelConfig, engine: EngineConfig, backend: AttentionBackend
) -> ModelRunner:
    """Give a model its KV storage.

    Raises:
        MemoryBudgetError: not even one sequence of maximum length fits.
    """
    dtype = DTYPES[engine.dtype]
    num_blocks = plan_blocks(model, engine, dtype)
    sessions = engine.max_num_seqs if engine.branches else 0
    slots = SlotMap(num_blocks, engine.block_size, engine.num_columns, engine.branches, sessions)
    decoder.prepare(engine.max_model_len)
    return ModelRunner(
        decoder, model, engine, backend, KVStorage(model, slots, dtype, engine.device)
    )


def _fit(block_tables_BJ: Tensor, num_blocks: int) -> Tensor:
    """Cut or fill block tables to ``num_blocks`` columns; block 0 fills."""
    missing = num_blocks - block_tables_BJ.shape[1]
    if missing <= 0:
        return block_tables_BJ[:, :num_blocks]
    return torch.nn.functional.pad(block_tables_BJ, (0, missing))


def _pad_sequences(batch: PagedBatch, count: int) -> PagedBatch:
    """Add sequences without columns."""
    missing = count - len(batch.first_positions_B)
    if missing == 0:
        return batch
    pad = torch.nn.functional.pad
    return PagedBatch(
        tokens_BP=pad(batch.tokens_BP, (0, 0, 0, missing)),
        first_positions_B=pad(batch.first_positions_B, (0, missing)),
        num_columns_B=pad(batch.num_columns_B, (0, missing)),
        block_tables_BJ=pad(batch.block_tables_BJ, (0, 0, 0, missing)),
    )


def _blank_paged(count: int, columns: int) -> PagedBatch:
    zero_B = torch.zeros(count, dtype=torch.int64)
    return PagedBatch(zero_B[:, None].expand(-1, columns), zero_B, zero_B, zero_B[:, None])
