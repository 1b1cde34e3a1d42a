"""Passes over static buffers: the engine for GPUs.

Each shape of a pass has one buffer of inputs and one captured function, see ``capture``. A pass
writes its inputs into the host's copy of the buffer, copies the buffer to the device in one
transfer, and replays. Entries, masks and lengths are computed on the device. Nothing is read back.

Passes of the draft attend to a trunk in pages, and then to short segments beside it, in which the
trunk counts with its log-sum-exp.

*Decision*: shapes are padded to few counts of sequences. *Because*: a graph has one shape, and a
pass of a GPU takes the same time for one and for sixteen short sequences. *Not chosen*: eager
passes, whose launches take longer than the kernels of a small model. *Revisit when* a pass is bound
by arithmetic.

A shape that cannot be captured is captured without its attention to pages, or runs eagerly, which
is slower. The log reports it once.

Letters: J pages of a sequence; Y pages of the storage, of C slots.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd.engine.attention.dense import attend_beside
from ssd.engine.attention.paged import Attend, PagedAttention, make_paged
from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.capture import Capture, CudaTimer, Pass, capture_of
from ssd.engine.compiler import require_compiler
from ssd.engine.config import EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.execution import run_columns_by_steps
from ssd.engine.kv_cache.storage import KVStorage
from ssd.engine.memory import allocate_storage
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.registry import CausalModel, open_weights
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.parallel.shard import ids_of, model_of
from ssd.engine.precision import DTYPES
from ssd.engine.static_inputs import Inputs
from ssd.telemetry import get_logger

_log = get_logger("ssd.engine")


class PageWriter:
    """The attention of one pass: writes the new entries of a layer, then attends."""

    def __init__(
        self, storage: KVStorage, entries_R: Tensor, num_sequences: int, attend: "LayerAttend"
    ) -> None:
        self._storage = storage
        self._entries_R = entries_R
        self._num_sequences = num_sequences
        self._attend = attend

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store a layer's new keys and values and return the attention output, [R, H*E]."""
        self._storage.write(layer, self._entries_R, keys_RGE, values_RGE)
        queries_BQHE = queries_RHE.unflatten(0, (self._num_sequences, -1))
        return self._attend(layer, queries_BQHE).reshape(len(queries_RHE), -1)


LayerAttend = Callable[[int, Tensor], Tensor]
"""Attends in one layer: ``attend(layer, queries_BQHE)`` returns values [B, Q, H, E]."""


class StaticExecution:
    """A model with its KV storage, and the pass that both processes need: ``prefill``."""

    def __init__(
        self,
        decoder: CausalModel,
        engine: EngineConfig,
        attention: PagedAttention,
        storage: KVStorage,
        capture: Capture,
    ) -> None:
        self.attention_name = attention.name
        self.num_blocks = storage.entries.num_blocks
        self.num_parameters = 0
        self.capture = capture
        """Knows how each shape runs."""
        self.sequence_counts: Sequence[int] = sequence_buckets(engine)
        self._engine = engine
        self._decoder = decoder
        self._attention = attention
        self._storage = storage
        self._entries = storage.entries
        self._last_position = engine.max_model_len - 1
        # Padding columns of a last pass are beyond the last position.
        chunk = engine.prefill_chunk
        stored = -(-engine.max_model_len // chunk) * chunk
        longest = max(engine.max_model_len + engine.num_columns, stored)
        self._num_pages_each = -(-longest // engine.block_size)
        self._passes: dict[tuple[Any, ...], tuple[Inputs, Pass]] = {}

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        return self._run_paged(batch, "prefill", 1, self._engine.prefill_chunk)

    def _run_paged(self, batch: PagedBatch, kind: str, count: int, columns: int) -> Tensor:
        """Run a causal pass over pages, padded to ``count`` sequences of ``columns``."""
        inputs, run = self._pass_of(
            (kind, count),
            {
                "tokens_BP": (count, columns),
                "first_B": (count,),
                "num_columns_B": (count,),
                "tables_BJ": (count, self._num_pages_each),
            },
            lambda device: self._paged(device, kind),
        )
        inputs.write(
            tokens_BP=batch.tokens_BP,
            first_B=batch.first_positions_B,
            num_columns_B=batch.num_columns_B,
            tables_BJ=batch.block_tables_BJ,
        )
        return run()

    def _pass_of(
        self,
        key: tuple[Any, ...],
        shapes: Mapping[str, tuple[int, ...]],
        function: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> tuple[Inputs, Pass]:
        """Return the inputs and the captured function of a shape; the first call captures."""
        if key not in self._passes:
            padding = {"slots_B": self._storage.entries.num_sessions - 1}
            inputs = Inputs(shapes, padding, self._engine.device)
            # A capture runs the function: of padding only, so that no session changes.
            inputs.write()
            self._passes[key] = inputs, self.capture(key, lambda: function(inputs.device))
        return self._passes[key]

    def _paged(self, inputs: Mapping[str, Tensor], kind: str) -> Tensor:
        """Return logits [B, P, V] of a verify; of a prefill, which hidden states are finite."""
        tokens_BP, tables_BJ = inputs["tokens_BP"], inputs["tables_BJ"]
        first_B1, num_columns_B1 = inputs["first_B"][:, None], inputs["num_columns_B"][:, None]
        count, columns = tokens_BP.shape
        column_P = torch.arange(columns, device=tokens_BP.device)
        positions_BP = first_B1 + column_P
        size = self._engine.block_size
        blocks_BP = tables_BJ.gather(1, positions_BP // size)
        entries_BP = blocks_BP * size + positions_BP % size
        entries_BP = torch.where(column_P < num_columns_B1, entries_BP, 0)
        lengths_B = (inputs["first_B"] + columns).int()
        attend = self._attention.prepare(
            tables_BJ.int(),
            lengths_B,
            num_queries=columns,
            num_pages=self.num_blocks,
            is_causal=True,
        )
        hidden_RD = self._decoder.forward(
            tokens_BP.flatten(),
            positions_BP.clamp(max=self._last_position).flatten(),
            PageWriter(
                self._storage,
                entries_BP.flatten(),
                count,
                lambda layer, queries_BQHE: self._attend_pages(attend, layer, queries_BQHE)[0],
            ),
        )
        if kind == "prefill":
            # A sum is finite if its terms are.
            return hidden_RD.sum(dim=1, dtype=torch.float32).isfinite()
        return self._logits(hidden_RD, count)

    def _attend_pages(
        self, attend: Attend, layer: int, queries_BQHE: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (self.num_blocks, self._engine.block_size)
        size = self.num_blocks * self._engine.block_size
        keys_YCGE = self._storage.keys[layer][:size].unflatten(0, shape)
        values_YCGE = self._storage.values[layer][:size].unflatten(0, shape)
        return self.capture.outside(lambda: attend(queries_BQHE, keys_YCGE, values_YCGE))

    def _logits(self, hidden_RD: Tensor, count: int) -> Tensor:
        logits_RV = self._decoder.logits(hidden_RD)
        return logits_RV.view(count, -1, logits_RV.shape[1])

    def _bucket(self, num_sequences: int) -> int:
        return next(count for count in self.sequence_counts if count >= num_sequences)


class StaticTarget(StaticExecution):
    """Verifies over pages. Every verify of a count of sequences has K+1 columns."""

    packs_rows = False
    _timer: CudaTimer | None = None

    def use_one_shape(self) -> None:
        """See ``TargetExecution.use_one_shape``."""
        self.sequence_counts = self.sequence_counts[-1:]

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        """See ``TargetExecution.prepare``."""
        return batch

    @torch.inference_mode()
    def verify(self, prepared: PagedBatch) -> Tensor:
        """See ``TargetExecution.verify``."""
        num_sequences, columns = prepared.tokens_BP.shape
        if self._timer is None and self._engine.device.startswith("cuda"):
            self._timer = CudaTimer()
        if self._timer is not None:
            self._timer.begin()
        count, all_columns = self._bucket(num_sequences), self._engine.num_columns
        logits_BPV = self._run_paged(prepared, "verify", count, all_columns)
        if self._timer is not None:
            self._timer.end()
        return logits_BPV[:num_sequences, :columns]

    def verify_seconds(self) -> float | None:
        """See ``TargetExecution.verify_seconds``."""
        return None if self._timer is None else self._timer.seconds()


class StaticDraft(StaticExecution):
    """Proposals, and steps of branches. Padding rows use the segments of the spare session."""

    whole_branches: Collection[int] = ()

    def __init__(
        self,
        decoder: CausalModel,
        engine: EngineConfig,
        attention: PagedAttention,
        storage: KVStorage,
        capture: Capture,
    ) -> None:
        super().__init__(decoder, engine, attention, storage, capture)
        self._written: dict[tuple[Any, ...], Tensor] = {}
        """By shape, the slots of the batch of branches whose inputs are on the device."""

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``DraftExecution.run_proposals``."""
        num_sequences, columns = batch.tokens_BP.shape
        count = self._bucket(num_sequences)
        inputs, run = self._pass_of(
            ("proposals", count),
            {
                "slots_B": (count,),
                "tokens_BP": (count, columns),
                "num_columns_B": (count,),
                "lengths_B": (count,),
                "tables_BJ": (count, self._num_pages_each),
            },
            self._proposals,
        )
        inputs.write(
            slots_B=batch.slots_B,
            tokens_BP=batch.tokens_BP,
            num_columns_B=batch.num_columns_B,
            lengths_B=batch.trunk_lengths_B,
            tables_BJ=batch.block_tables_BJ,
        )
        return run()[:num_sequences]

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``DraftExecution.run_branches``. The tokens may be on the device."""
        num_sequences, branches = batch.tokens_BN.shape
        count = self._bucket(num_sequences)
        key = ("branches", count, branches)
        inputs, run = self._pass_of(
            key,
            {
                "slots_B": (count,),
                "accepted_BN": (count, branches),
                "lengths_B": (count,),
                "tables_BJ": (count, self._num_pages_each),
                "step_1": (1,),
                "tokens_BN": (count, branches),
            },
            self._branches,
        )
        if batch.step == 0 or self._written.get(key) is not batch.slots_B:
            inputs.write(
                slots_B=batch.slots_B,
                accepted_BN=batch.accepted_BN,
                lengths_B=batch.trunk_lengths_B,
                tables_BJ=batch.block_tables_BJ,
            )
            self._written[key] = batch.slots_B
        inputs.device["step_1"].fill_(batch.step)
        inputs.device["tokens_BN"][:num_sequences].copy_(batch.tokens_BN, non_blocking=True)
        return run()[:num_sequences].clone()

    run_columns = run_columns_by_steps

    @torch.inference_mode()
    def append_proposal(
        self,
        slots_B: Tensor,
        num_entries_B: Tensor,
        trunk_lengths_B: Tensor,
        block_tables_BJ: Tensor,
    ) -> None:
        """See ``DraftExecution.append_proposal``."""
        count = self._bucket(len(slots_B))
        inputs, run = self._pass_of(
            ("append", count),
            {
                "slots_B": (count,),
                "num_entries_B": (count,),
                "lengths_B": (count,),
                "tables_BJ": (count, self._num_pages_each),
            },
            self._append,
        )
        inputs.write(
            slots_B=slots_B,
            num_entries_B=num_entries_B,
            lengths_B=trunk_lengths_B,
            tables_BJ=block_tables_BJ,
        )
        run()

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``DraftExecution.promote_branches``."""
        count = self._bucket(len(slots_B))
        inputs, run = self._pass_of(
            ("promote", count), {"slots_B": (count,), "branches_B": (count,)}, self._promote
        )
        inputs.write(slots_B=slots_B, branches_B=branches_B)
        run()

    def _proposals(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, P, V] of a causal pass over trunk and proposal segment."""
        tokens_BP, lengths_B = inputs["tokens_BP"], inputs["lengths_B"]
        count, columns = tokens_BP.shape
        column_P = torch.arange(columns, device=tokens_BP.device)
        proposal_BP = self._proposal_entries(inputs["slots_B"])
        is_real_BP = column_P < inputs["num_columns_B"][:, None]
        visible_BPS = (column_P <= column_P[:, None]).expand(count, -1, -1)
        attend = self._attend_trunk(inputs, columns)

        def attend_layer(layer: int, queries_BQHE: Tensor) -> Tensor:
            keys_BPGE, values_BPGE = self._entries_of(layer, proposal_BP)
            trunk = attend(layer, queries_BQHE)
            return attend_beside(trunk, queries_BQHE, keys_BPGE, values_BPGE, visible_BPS)

        positions_BP = (lengths_B[:, None] + column_P).clamp(max=self._last_position)
        entries_BP = torch.where(is_real_BP, proposal_BP, 0)
        hidden_RD = self._decoder.forward(
            tokens_BP.flatten(),
            positions_BP.flatten(),
            PageWriter(self._storage, entries_BP.flatten(), count, attend_layer),
        )
        return self._logits(hidden_RD, count)

    def _branches(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, N, V] of one step of all branches."""
        tokens_BN, accepted_BN, step_1 = (
            inputs["tokens_BN"],
            inputs["accepted_BN"],
            inputs["step_1"],
        )
        count, branches = tokens_BN.shape
        column_P = torch.arange(self._engine.num_columns, device=tokens_BN.device)
        proposal_BP = self._proposal_entries(inputs["slots_B"])
        own_BNP = self._own_entries(inputs["slots_B"], branches)
        # Each branch is a sequence of its own beside the trunk: X = B x N.
        entries_XS = torch.cat(
            (proposal_BP[:, None].expand(-1, branches, -1), own_BNP), dim=2
        ).flatten(0, 1)
        in_proposal_BNP = column_P <= accepted_BN[:, :, None]
        in_own_BNP = (column_P <= step_1).expand(count, branches, -1)
        visible_X1S = torch.cat((in_proposal_BNP, in_own_BNP), dim=2).flatten(0, 1)[:, None]
        attend = self._attend_trunk(inputs, branches)

        def attend_layer(layer: int, queries_BQHE: Tensor) -> Tensor:
            trunk_BQHE, mass_BHQ = attend(layer, queries_BQHE)
            trunk_X1HE, queries_X1HE = (
                tensor.flatten(0, 1)[:, None] for tensor in (trunk_BQHE, queries_BQHE)
            )
            mass_XH1 = mass_BHQ.transpose(1, 2).flatten(0, 1)[..., None]
            keys_XSGE, values_XSGE = self._entries_of(layer, entries_XS)
            out_X1HE = attend_beside(
                (trunk_X1HE, mass_XH1), queries_X1HE, keys_XSGE, values_XSGE, visible_X1S
            )
            return out_X1HE.view(queries_BQHE.shape)

        positions_BN = inputs["lengths_B"][:, None] + 1 + accepted_BN + step_1
        entries_BN = own_BNP.gather(2, step_1.expand(count, branches, 1)).squeeze(2)
        hidden_RD = self._decoder.forward(
            tokens_BN.flatten(),
            positions_BN.clamp(max=self._last_position).flatten(),
            PageWriter(self._storage, entries_BN.flatten(), count, attend_layer),
        )
        return self._logits(hidden_RD, count)

    def _append(self, inputs: Mapping[str, Tensor]) -> Tensor:
        proposal_BP, tables_BJ = self._proposal_entries(inputs["slots_B"]), inputs["tables_BJ"]
        column_P = torch.arange(proposal_BP.shape[1], device=proposal_BP.device)
        positions_BP = inputs["lengths_B"][:, None] + column_P
        size = self._engine.block_size
        paged_BP = tables_BJ.gather(1, positions_BP // size) * size + positions_BP % size
        # Entries that are not appended are copied from entry 0 to itself.
        is_kept_BP = column_P < inputs["num_entries_B"][:, None]
        return self._copy(
            torch.where(is_kept_BP, proposal_BP, 0), torch.where(is_kept_BP, paged_BP, 0)
        )

    def _promote(self, inputs: Mapping[str, Tensor]) -> Tensor:
        own_BNP = self._own_entries(inputs["slots_B"], self._engine.branches)
        index_B1P = inputs["branches_B"][:, None, None].expand(-1, 1, own_BNP.shape[2])
        from_BP = own_BNP.gather(1, index_B1P).squeeze(1)
        return self._copy(from_BP, self._proposal_entries(inputs["slots_B"]))

    def _copy(self, from_BP: Tensor, to_BP: Tensor) -> Tensor:
        """Copy entries of all layers; all sources are read before the first write."""
        entries_L2ZW = self._storage.entries_L2ZW
        copied = entries_L2ZW.index_select(2, from_BP.flatten())
        return entries_L2ZW.index_copy_(2, to_BP.flatten(), copied)

    def _attend_trunk(
        self, inputs: Mapping[str, Tensor], num_queries: int
    ) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
        attend = self._attention.prepare(
            inputs["tables_BJ"].int(),
            inputs["lengths_B"].int(),
            num_queries=num_queries,
            num_pages=self.num_blocks,
            is_causal=False,
        )
        return lambda layer, queries_BQHE: self._attend_pages(attend, layer, queries_BQHE)

    def _entries_of(self, layer: int, entries_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some entries, [B, S, G, E] each."""
        return self._storage.keys[layer][entries_BS], self._storage.values[layer][entries_BS]

    def _proposal_entries(self, slots_B: Tensor) -> Tensor:
        """Return the entries of proposal segments, [B, P]."""
        columns = self._engine.num_columns
        first = self.num_blocks * self._engine.block_size
        column_P = torch.arange(columns, device=slots_B.device)
        return first + slots_B[:, None] * columns + column_P

    def _own_entries(self, slots_B: Tensor, branches: int) -> Tensor:
        """Return the entries of the own segments of the first branches, [B, N, P]."""
        columns, all_branches = self._engine.num_columns, self._engine.branches
        sessions = self._storage.entries.num_sessions
        first = self.num_blocks * self._engine.block_size + sessions * columns
        branch_N1 = torch.arange(branches, device=slots_B.device)[:, None]
        column_P = torch.arange(columns, device=slots_B.device)
        own_NP = branch_N1 + column_P * all_branches
        return first + slots_B[:, None, None] * columns * all_branches + own_NP


def make_execution(
    decoder: CausalModel,
    model: ModelConfig,
    engine: EngineConfig,
    attention: PagedAttention,
    capture: Capture,
    group: Group = ALONE,
) -> StaticTarget | StaticDraft:
    """Allocate the KV storage of a model, or of a rank's part of it.

    Raises:
        MemoryBudgetError: not one sequence of maximum length fits.
    """
    storage = allocate_storage(model, engine, group)
    decoder.prepare(engine.max_model_len)
    kind = StaticDraft if engine.branches else StaticTarget
    return kind(decoder, engine, attention, storage, capture)


def load(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group,
) -> StaticTarget | StaticDraft:
    """Read a model folder and allocate its KV storage; see ``execution.load_execution``."""
    if engine.compile_layers:
        require_compiler(engine.device)
    dtype, shard = DTYPES[engine.dtype], group.shard
    attention, is_exact = engine.attention, engine.deterministic
    chosen = make_paged(attention, engine.device, engine.dtype, is_deterministic=is_exact)
    _log.info("attention", name=chosen.attention.name, reason=chosen.reason)
    weights, reader = open_weights(folder, model, dtype, engine.device, on_progress, shard)
    part, ids = model_of(model, shard), ids_of(model, shard)
    decoder = Decoder(part, weights, group, ids.start, is_compiled=engine.compile_layers)
    capture = capture_of(engine.device)
    execution = make_execution(decoder, part, engine, chosen.attention, capture, group)
    execution.num_parameters = reader.num_parameters
    return execution
