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

A shape that cannot be captured runs eagerly, which is slower. The log reports it once.

Letters: J pages of a sequence; Y pages of the storage, of C slots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.attention.dense import attend_beside
from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.capture import Capture, CudaTimer, Pass, capture_of
from ssd.engine.compiler import require_compiler
from ssd.engine.config import EngineConfig, ModelConfig, sequence_buckets
from ssd.engine.execution import DraftExecution, TargetExecution
from ssd.engine.kv_cache.storage import KVStorage
from ssd.engine.memory import allocate_storage
from ssd.engine.models.decoder import Decoder, open_decoder
from ssd.engine.parallel.group import ALONE, Group
from ssd.observability.log import get_logger

_log = get_logger("ssd.engine")


PageAttend = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Attends to pages in one layer: ``attend(layer, queries_BQHE)``, results as of ``Attend``."""
LayerAttend = Callable[[int, Tensor], Tensor]
"""Attends in one layer: ``attend(layer, queries_BQHE)`` returns values [B, Q, H, E]."""
Tensors = Mapping[str, Tensor]
"""The inputs of a pass on the device, by name."""


@dataclass(frozen=True, slots=True)
class PageWriter:
    """The attention of one pass: writes the new entries of a layer, then attends."""

    storage: KVStorage
    entries_R: Tensor
    num_sequences: int
    attend_layer: LayerAttend

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        """Store a layer's new keys and values and return the attention output, [R, H*E]."""
        self.storage.write(layer, self.entries_R, keys_RGE, values_RGE)
        queries_BQHE = queries_RHE.unflatten(0, (self.num_sequences, -1))
        return self.attend_layer(layer, queries_BQHE).reshape(len(queries_RHE), -1)


class Inputs:
    """The integers of a pass: written on the host, copied to the device in one transfer."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], padding: Mapping[str, int], device: str
    ) -> None:
        """Construct; ``padding`` by name, 0 if there is none."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        is_pinned = device.startswith("cuda")
        self._on_host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_pinned)
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_pinned else None
        self._padding = padding
        self._host = {
            name: part.numpy().reshape(shape)
            for (name, shape), part in zip(shapes.items(), self._on_host.split(sizes), strict=True)
        }
        self.device = {
            name: part.view(shape)
            for (name, shape), part in zip(
                shapes.items(), self._on_device.split(sizes), strict=True
            )
        }
        """The inputs on the device, by name, always in the same place."""

    def write(self, **values: Tensor) -> None:
        """Write a batch, pad it, and start to copy it to the device.

        Args:
            values: int64 on the CPU, by name, each at most as large as its input. Inputs that are
                not named are padding.
        """
        if self._copied is not None:
            # The last copy may still read the host's buffer.
            self._copied.synchronize()
        for name, buffer in self._host.items():
            buffer[...] = self._padding.get(name, 0)
            if name in values:
                rows = values[name].numpy()
                buffer[tuple(slice(size) for size in rows.shape)] = rows
        self._on_device.copy_(self._on_host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StaticExecution:
    """A model with its KV storage, and the pass that both processes need: ``prefill``."""

    def __init__(
        self,
        decoder: Decoder,
        engine: EngineConfig,
        attention: PagedAttention,
        storage: KVStorage,
        capture: Capture,
    ) -> None:
        self.attention_name = attention.name
        self.num_blocks = storage.entries.num_blocks
        self.capture = capture
        """Knows which shapes are graphs."""
        self.sequence_counts: Sequence[int] = sequence_buckets(engine)
        self._engine = engine
        self._decoder = decoder
        self._attention = attention
        self._storage = storage
        self._last_position = engine.max_model_len - 1
        # Padding columns of a last pass are beyond the last position.
        chunk = engine.prefill_chunk
        stored = -(-engine.max_model_len // chunk) * chunk
        longest = max(engine.max_model_len + engine.num_columns, stored)
        if engine.branches:
            # A draft that is behind stores a chunk from any position on.
            longest = max(longest, engine.max_model_len + chunk)
        self._num_pages_each = -(-longest // engine.block_size)
        shape = (self.num_blocks, engine.block_size)
        self._pages = [
            tuple(entries[: shape[0] * shape[1]].unflatten(0, shape) for entries in layer)
            for layer in zip(storage.keys, storage.values, strict=True)
        ]
        """Keys and values of the pages of each layer, [Y, C, G, E] each."""
        self._passes: dict[tuple[Any, ...], tuple[Inputs, Pass]] = {}
        self._written: dict[tuple[Any, ...], Tensor] = {}
        """By shape, the slots of the batch of branches whose inputs are on the device."""

    @torch.inference_mode()
    def prefill(self, batch: PagedBatch) -> Tensor:
        """See ``Execution.prefill``."""
        return self._paged("prefill", 1, self._prefill, batch.tokens_BP, batch)()

    def _paged(
        self,
        kind: str,
        count: int,
        function: Callable[[Tensors], Tensor],
        tokens_BP: Tensor,
        batch: PagedBatch,
    ) -> Pass:
        """Prepare a causal pass over pages, padded to ``count`` sequences."""
        return self._ready(
            (kind, count),
            function,
            tokens_BP=tokens_BP,
            first_positions_B=batch.first_positions_B,
            num_columns_B=batch.num_columns_B,
            block_tables_BJ=batch.block_tables_BJ,
        )

    def _ready(
        self, key: tuple[str, int], function: Callable[[Tensors], Tensor], **values: Tensor
    ) -> Pass:
        """Return a pass whose inputs, all from the host, are written.

        Args:
            key: kind of the pass, and the number of sequences to which it is padded.
            function: computes the result from the inputs on the device.
            values: int64, by name; the first dimension are the sequences.
        """
        _, count = key
        widths = {name: tensor.shape[1:] for name, tensor in values.items()}
        if "block_tables_BJ" in widths:
            widths["block_tables_BJ"] = torch.Size((self._num_pages_each,))
        shapes = {name: (count, *width) for name, width in widths.items()}
        inputs, run = self._pass_of(key, shapes, function)
        inputs.write(**values)
        return run

    def _pass_of(
        self,
        key: tuple[Any, ...],
        shapes: Mapping[str, tuple[int, ...]],
        function: Callable[[Tensors], Tensor],
    ) -> tuple[Inputs, Pass]:
        """Return the inputs and the captured function of a shape; the first call captures."""
        if key not in self._passes:
            padding = {"slots_B": self._storage.entries.num_sessions - 1}
            inputs = Inputs(shapes, padding, self._engine.device)
            # A capture runs the function: of padding only, so that no session changes.
            inputs.write()
            self._passes[key] = inputs, self.capture(key, lambda: function(inputs.device))
        return self._passes[key]

    def _prefill(self, inputs: Tensors) -> Tensor:
        """Return whether each hidden state is finite, bool [P]."""
        # A sum is finite if its terms are.
        return self._stored(inputs).sum(dim=1, dtype=torch.float32).isfinite()

    def _stored(self, inputs: Tensors) -> Tensor:
        """Run a causal pass over pages; returns hidden states [R, D]."""
        tables_BJ, first_B = inputs["block_tables_BJ"], inputs["first_positions_B"]
        columns = inputs["tokens_BP"].shape[1]
        column_P = torch.arange(columns, device=tables_BJ.device)
        positions_BP = first_B[:, None] + column_P
        entries_BP = self._storage.entries.at(tables_BJ, positions_BP)
        entries_BP = torch.where(column_P < inputs["num_columns_B"][:, None], entries_BP, 0)
        attend = self._attend_pages(tables_BJ, first_B + columns, columns, is_causal=True)
        return self._hidden(
            inputs["tokens_BP"],
            positions_BP,
            entries_BP,
            lambda layer, queries_BQHE: attend(layer, queries_BQHE)[0],
        )

    def _hidden(
        self, tokens_BQ: Tensor, positions_BQ: Tensor, entries_BQ: Tensor, attend: LayerAttend
    ) -> Tensor:
        """Run all layers; returns hidden states [R, D]."""
        return self._decoder.forward(
            tokens_BQ.flatten(),
            positions_BQ.clamp(max=self._last_position).flatten(),
            PageWriter(self._storage, entries_BQ.flatten(), len(tokens_BQ), attend),
        )

    def _attend_pages(
        self, tables_BJ: Tensor, lengths_B: Tensor, num_queries: int, *, is_causal: bool
    ) -> PageAttend:
        """Prepare the attention to pages; see ``PagedAttention.prepare``."""
        attend = self._attention.prepare(
            tables_BJ.int(),
            lengths_B.int(),
            num_queries=num_queries,
            num_pages=self.num_blocks,
            is_causal=is_causal,
        )

        def attend_layer(layer: int, queries_BQHE: Tensor) -> tuple[Tensor, Tensor]:
            keys_YCGE, values_YCGE = self._pages[layer]
            return attend(queries_BQHE, keys_YCGE, values_YCGE)

        return attend_layer

    def _logits(self, hidden_RD: Tensor, count: int) -> Tensor:
        logits_RV = self._decoder.logits(hidden_RD)
        return logits_RV.view(count, -1, logits_RV.shape[1])

    def _bucket(self, num_sequences: int) -> int:
        return next(count for count in self.sequence_counts if count >= num_sequences)


class StaticTarget(StaticExecution, TargetExecution):
    """Verifies over pages. Every verify of a count of sequences has K+1 columns."""

    _timer: CudaTimer | None = None

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        """See ``TargetExecution.prepare``."""
        return batch

    @torch.inference_mode()
    def verify(self, prepared: PagedBatch) -> Tensor:
        """See ``TargetExecution.verify``."""
        num_sequences, columns = prepared.tokens_BP.shape
        if self._timer is None and self._engine.device.startswith("cuda"):
            self._timer = CudaTimer()
        tokens_BP = pad(prepared.tokens_BP, (0, self._engine.num_columns - columns))
        count = self._bucket(num_sequences)
        run = self._paged("verify", count, self._verify, tokens_BP, prepared)
        # The time of the host before the launch is overhead of the round, not time of the verify.
        if self._timer is not None:
            self._timer.begin()
        logits_BPV = run()
        if self._timer is not None:
            self._timer.end()
        return logits_BPV[:num_sequences, :columns]

    def _verify(self, inputs: Tensors) -> Tensor:
        """Return logits [B, P, V]."""
        return self._logits(self._stored(inputs), len(inputs["tokens_BP"]))

    def verify_seconds(self) -> float | None:
        """See ``TargetExecution.verify_seconds``."""
        return None if self._timer is None else self._timer.seconds()


class StaticDraft(StaticExecution, DraftExecution):
    """Proposals, and steps of branches. Padding rows use the segments of the spare session."""

    @torch.inference_mode()
    def run_proposals(self, batch: ProposalBatch) -> Tensor:
        """See ``TreePasses.run_proposals``."""
        num_sequences = len(batch.tokens_BP)
        run = self._ready(
            ("proposals", self._bucket(num_sequences)),
            self._proposals,
            slots_B=batch.slots_B,
            tokens_BP=batch.tokens_BP,
            num_columns_B=batch.num_columns_B,
            trunk_lengths_B=batch.trunk_lengths_B,
            block_tables_BJ=batch.block_tables_BJ,
        )
        return run()[:num_sequences]

    @torch.inference_mode()
    def run_branches(self, batch: BranchBatch) -> Tensor:
        """See ``TreePasses.run_branches``. The tokens may be on the device."""
        num_sequences, branches = batch.tokens_BN.shape
        count = self._bucket(num_sequences)
        key = ("branches", count, branches)
        inputs, run = self._pass_of(
            key,
            {
                "slots_B": (count,),
                "accepted_BN": (count, branches),
                "trunk_lengths_B": (count,),
                "block_tables_BJ": (count, self._num_pages_each),
                "step_1": (1,),
                "tokens_BN": (count, branches),
            },
            self._branches,
        )
        if batch.step == 0 or self._written.get(key) is not batch.slots_B:
            inputs.write(
                slots_B=batch.slots_B,
                accepted_BN=batch.accepted_BN,
                trunk_lengths_B=batch.trunk_lengths_B,
                block_tables_BJ=batch.block_tables_BJ,
            )
            self._written[key] = batch.slots_B
        inputs.device["step_1"].fill_(batch.step)
        inputs.device["tokens_BN"][:num_sequences].copy_(batch.tokens_BN, non_blocking=True)
        return run()[:num_sequences].clone()

    @torch.inference_mode()
    def append_proposal(self, batch: AppendBatch) -> None:
        """See ``TreePasses.append_proposal``."""
        self._ready(
            ("append", self._bucket(len(batch.slots_B))),
            lambda inputs: self._storage.append_proposal(AppendBatch(**inputs)),
            **batch._asdict(),
        )()

    @torch.inference_mode()
    def promote_branches(self, slots_B: Tensor, branches_B: Tensor) -> None:
        """See ``TreePasses.promote_branches``."""
        self._ready(
            ("promote", self._bucket(len(slots_B))),
            lambda inputs: self._storage.promote_branches(**inputs),
            slots_B=slots_B,
            branches_B=branches_B,
        )()

    def _proposals(self, inputs: Tensors) -> Tensor:
        """Return logits [B, P, V] of a causal pass over trunk and proposal segment."""
        count, columns = inputs["tokens_BP"].shape
        column_P = torch.arange(columns, device=inputs["tokens_BP"].device)
        proposal_BP = self._storage.entries.proposal(inputs["slots_B"])
        is_real_BP = column_P < inputs["num_columns_B"][:, None]
        visible_BPS = (column_P <= column_P[:, None]).expand(count, -1, -1)
        attend = self._attend_trunk(inputs, columns)

        def attend_layer(layer: int, queries_BQHE: Tensor) -> Tensor:
            keys_BPGE, values_BPGE = self._entries_of(layer, proposal_BP)
            trunk = attend(layer, queries_BQHE)
            return attend_beside(trunk, queries_BQHE, keys_BPGE, values_BPGE, visible_BPS)

        hidden_RD = self._hidden(
            inputs["tokens_BP"],
            inputs["trunk_lengths_B"][:, None] + column_P,
            torch.where(is_real_BP, proposal_BP, 0),
            attend_layer,
        )
        return self._logits(hidden_RD, count)

    def _branches(self, inputs: Tensors) -> Tensor:
        """Return logits [B, N, V] of one step of all branches."""
        tokens_BN, accepted_BN = inputs["tokens_BN"], inputs["accepted_BN"]
        slots_B, step_1 = inputs["slots_B"], inputs["step_1"]
        count, branches = tokens_BN.shape
        column_P = torch.arange(self._engine.num_columns, device=tokens_BN.device)
        proposal_BP = self._storage.entries.proposal(slots_B)
        own_BNP = self._storage.entries.own(slots_B, branches).transpose(1, 2)
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

        hidden_RD = self._hidden(
            tokens_BN,
            inputs["trunk_lengths_B"][:, None] + 1 + accepted_BN + step_1,
            own_BNP.gather(2, step_1.expand(count, branches, 1)).squeeze(2),
            attend_layer,
        )
        return self._logits(hidden_RD, count)

    def _attend_trunk(self, inputs: Tensors, num_queries: int) -> PageAttend:
        tables_BJ, lengths_B = inputs["block_tables_BJ"], inputs["trunk_lengths_B"]
        return self._attend_pages(tables_BJ, lengths_B, num_queries, is_causal=False)

    def _entries_of(self, layer: int, entries_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some entries, [B, S, G, E] each."""
        return self._storage.keys[layer][entries_BS], self._storage.values[layer][entries_BS]


def make_execution(
    decoder: Decoder,
    engine: EngineConfig,
    attention: PagedAttention,
    capture: Capture,
    group: Group = ALONE,
) -> StaticTarget | StaticDraft:
    """Allocate the KV storage of a model, or of a rank's part of it.

    Raises:
        MemoryBudgetError: not one sequence of maximum length fits.
    """
    storage = allocate_storage(decoder.config, engine, group)
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
        require_compiler(engine.device, "compile_layers", "set it to false")
    # A token of a target is in another column with speculation than without.
    is_exact = engine.deterministic or not engine.branches
    chosen = make_paged(
        engine.attention,
        engine.device,
        engine.dtype,
        head_size=model.head_size,
        is_deterministic=is_exact,
    )
    if chosen.attention.name == "flex":
        other = "use flash-attn, with attention auto and dtype bfloat16"
        require_compiler(engine.device, "attention flex", other)
    _log.info("attention", name=chosen.attention.name, reason=chosen.reason)
    decoder = open_decoder(folder, model, engine, on_progress, group)
    capture = capture_of(engine.device)
    return make_execution(decoder, engine, chosen.attention, capture, group)
