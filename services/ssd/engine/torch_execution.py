"""Passes in eager torch on CPUs: the reference with which the other engines are compared.

All passes have fixed shapes. They differ in which entries the queries see and in where new entries
are written. The model and the attention kernel are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ssd.engine.attention.context import (
    MAX_CHUNKS_A_CALL,
    AttentionPass,
    ContextRun,
    first_entries,
    make_run,
    widen,
)
from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch, pad_sequences
from ssd.engine.config import EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.execution import DraftExecution, TargetExecution
from ssd.engine.kv_cache.storage import KVStorage, fit_block_tables
from ssd.engine.memory import allocate_storage
from ssd.engine.models.decoder import Decoder, open_decoder
from ssd.engine.parallel.group import Group


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """The queries of a pass with the entries that they write and the context that they see."""

    num_sequences: int
    """Number of sequences that are not padding; they come first."""
    tokens_BQ: Tensor
    positions_BQ: Tensor
    write_BQ: Tensor
    """Entries that the pass writes; 0 at padding."""
    runs: list[ContextRun]
    is_whole: bool = False
    """See ``AttentionPass``."""


class TorchExecution:
    """A model with its KV storage, and the pass that both processes need: ``prefill``."""

    attention_name = "cpu"

    def __init__(self, decoder: Decoder, engine: EngineConfig, storage: KVStorage) -> None:
        self.num_blocks = storage.entries.num_blocks
        self._engine = engine
        self._decoder = decoder
        self._storage = storage
        self._entries = storage.entries
        self.sequence_counts: Sequence[int] = sequence_buckets(engine)
        self._group = decoder.config.num_heads // decoder.config.num_kv_heads
        self._last_position = engine.max_model_len - 1

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        hidden_RD = self._run(self._prepare(batch, 1))
        # A sum is finite if its terms are, and takes a twentieth of the time of testing each term.
        return hidden_RD.sum(dim=1, dtype=torch.float32).isfinite()

    def _prepare(self, batch: PagedBatch, num_sequences: int) -> PreparedPass:
        columns = batch.tokens_BP.shape[1]
        column_P = torch.arange(columns)
        position_BP = (batch.first_positions_B[:, None] + column_P).clamp_(max=self._last_position)
        width = self._engine.context_chunk
        num_chunks = int(position_BP.max()) // width + 1
        blocks = num_chunks * width // self._engine.block_size
        paged_BS = self._entries.paged(fit_block_tables(batch.block_tables_BJ, blocks))
        write_BP = paged_BS.gather(1, position_BP)
        write_BP = write_BP.where(column_P < batch.num_columns_B[:, None], 0)
        # Chunks are absolute ranges of positions, so they do not depend on the rest of the batch.
        entries_XBS = paged_BS.view(-1, num_chunks, width).transpose(0, 1)
        seen_XS = torch.arange(num_chunks * width).view(num_chunks, width)
        visible_XBQS = seen_XS[:, None, None] <= position_BP[:, :, None]
        runs = [
            self._context(
                entries_XBS[first : first + MAX_CHUNKS_A_CALL],
                visible_XBQS[first : first + MAX_CHUNKS_A_CALL],
            )
            for first in range(0, num_chunks, MAX_CHUNKS_A_CALL)
        ]
        return PreparedPass(num_sequences, batch.tokens_BP, position_BP, write_BP, runs)

    def _context(self, entries_XBS: Tensor, visible_XBQS: Tensor) -> ContextRun:
        dtype = self._storage.entries_L2ZW.dtype
        return make_run(entries_XBS, visible_XBQS, self._group, self._entries.num_entries, dtype)

    def _run(self, prepared: PreparedPass) -> Tensor:
        """Run all layers; returns hidden states [R, D]."""
        attention = AttentionPass(
            self._storage,
            prepared.write_BQ.flatten(),
            prepared.runs,
            len(prepared.tokens_BQ),
            is_whole=prepared.is_whole,
        )
        positions_R = prepared.positions_BQ.flatten().clamp(max=self._last_position)
        return self._decoder.forward(prepared.tokens_BQ.flatten(), positions_R, attention)

    def _logits(self, prepared: PreparedPass) -> Tensor:
        """Run all layers; returns logits [B, Q, V]."""
        logits_RV = self._decoder.logits(self._run(prepared))
        return logits_RV.view(-1, prepared.tokens_BQ.shape[1], logits_RV.shape[1])


class TorchTarget(TorchExecution, TargetExecution):
    """Verifies over pages, with sequences padded to a few counts."""

    @torch.inference_mode()
    def prepare(self, batch: PagedBatch) -> PreparedPass:
        """Pad the batch, compute its entries and masks."""
        num_sequences = len(batch.tokens_BP)
        bucket = next(count for count in self.sequence_counts if count >= num_sequences)
        return self._prepare(pad_sequences(batch, bucket), num_sequences)

    @torch.inference_mode()
    def verify(self, prepared: PreparedPass) -> Tensor:
        """See ``TargetExecution.verify``."""
        logits_BPV = self._logits(prepared)
        return logits_BPV[: prepared.num_sequences]


class TorchDraft(TorchExecution, DraftExecution):
    """Proposals, and steps of branches. The number of sessions is not padded."""

    def __init__(self, decoder: Decoder, engine: EngineConfig, storage: KVStorage) -> None:
        super().__init__(decoder, engine, storage)
        self._branch_context: ContextRun | None = None
        self._context_slots_B: Tensor | None = None
        self._num_shared = 0

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``TreePasses.run_proposals``."""
        num_sequences, columns = batch.tokens_BP.shape
        column_P = torch.arange(columns)
        is_real_BP = column_P < batch.num_columns_B[:, None]
        proposal_BP = self._entries.proposal(batch.slots_B)
        trunk_BS, in_trunk_BS = self._storage.entries.trunk(
            batch.block_tables_BJ, batch.trunk_lengths_B
        )
        visible_BPS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, columns, -1),
                (column_P <= column_P[:, None]).expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        run = self._whole_context(torch.cat((trunk_BS, proposal_BP), dim=1), visible_BPS)
        positions_BP = batch.trunk_lengths_B[:, None] + column_P
        write_BP = proposal_BP.where(is_real_BP, 0)
        return self._logits(
            PreparedPass(
                num_sequences, batch.tokens_BP, positions_BP, write_BP, [run], is_whole=True
            )
        )

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``TreePasses.run_branches``."""
        num_sequences, branches = batch.tokens_BN.shape
        own_BPN = self._entries.own(batch.slots_B, branches)
        if batch.step == 0 or batch.slots_B is not self._context_slots_B:
            self._branch_context, self._num_shared = self._branch_run(batch, own_BPN)
            self._context_slots_B = batch.slots_B
        assert self._branch_context is not None
        run = first_entries(self._branch_context, self._num_shared + (batch.step + 1) * branches)
        positions_BN = batch.trunk_lengths_B[:, None] + 1 + batch.accepted_BN + batch.step
        write_BN = own_BPN[:, batch.step]
        return self._logits(
            PreparedPass(
                num_sequences, batch.tokens_BN, positions_BN, write_BN, [run], is_whole=True
            )
        )

    def append_proposal(self, batch: AppendBatch) -> None:
        """See ``TreePasses.append_proposal``."""
        self._storage.append_proposal(batch)

    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``TreePasses.promote_branches``."""
        self._storage.promote_branches(slots_B, branches_B)

    def _branch_run(self, batch: BranchBatch, own_BPN: Tensor) -> tuple[ContextRun, int]:
        """Build the context of the last step; count the entries that all branches share.

        Earlier steps see a prefix of these entries.
        """
        num_sequences, branches = batch.tokens_BN.shape
        columns = self._engine.num_columns
        trunk_BS, in_trunk_BS = self._storage.entries.trunk(
            batch.block_tables_BJ, batch.trunk_lengths_B
        )
        proposal_BP = self._entries.proposal(batch.slots_B)
        same_branch_NX = torch.eye(branches, dtype=torch.bool).repeat(1, columns)
        visible_BNS = torch.cat(
            (
                in_trunk_BS[:, None].expand(-1, branches, -1),
                torch.arange(columns) <= batch.accepted_BN[:, :, None],
                same_branch_NX.expand(num_sequences, -1, -1),
            ),
            dim=2,
        )
        entries_BS = torch.cat((trunk_BS, proposal_BP, own_BPN.flatten(1)), dim=1)
        return self._whole_context(entries_BS, visible_BNS), trunk_BS.shape[1] + columns

    def _whole_context(self, entries_BS: Tensor, visible_BQS: Tensor) -> ContextRun:
        entries_BS, visible_BQS = widen(entries_BS, visible_BQS)
        return self._context(entries_BS[None], visible_BQS[None])


def load(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group,
) -> TorchTarget | TorchDraft:
    """Read a model folder and allocate its KV storage; see ``execution.load_execution``."""
    decoder = open_decoder(folder, model, engine, on_progress, group)
    storage = allocate_storage(decoder.config, engine, group)
    decoder.prepare(engine.max_model_len)
    kind = TorchDraft if engine.branches else TorchTarget
    return kind(decoder, engine, storage)
