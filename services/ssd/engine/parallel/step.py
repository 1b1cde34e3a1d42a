"""What rank 0 sends to the other ranks: one message of fixed size for each step.

A round is one step, with the keys of its choice. One more gathers the logits of sequences whose
sampling parameters need them.

A message is int64 numbers: a header, then the tensors of its operation one after another.
Letter W: numbers of a message.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig

_HEADER = 5
_KEYS = 4
"""Numbers of a row's noise keys."""


class Operation(IntEnum):
    """What a rank does in a step."""

    PREFILL = 1
    VERIFY = 2
    VERIFY_AND_CHOOSE = 3
    GATHER = 4
    USE_FEWER_SHAPES = 5
    """At start-up; see ``TargetExecution.use_fewer_shapes``."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first numbers of a message."""

    operation: Operation
    deadline_ms: int
    """Deadline of the collectives of the step."""
    num_sequences: int
    """Sequences of a pass."""
    num_columns: int
    """Columns of a pass. For a gathering of logits: rows."""
    num_blocks: int
    """Columns of the block tables of a pass. For a gathering: the most token ids of a rank."""


class StepMessage:
    """The buffer of all messages of a group. Step thread only."""

    def __init__(self, engine: EngineConfig) -> None:
        rows = max(engine.max_num_seqs * engine.num_columns, engine.prefill_chunk)
        tables = engine.max_num_seqs * (engine.blocks_per_sequence + 2)
        self.numbers_W = torch.zeros(_HEADER + rows + tables + _KEYS * rows, dtype=torch.int64)
        self._max_blocks = engine.blocks_per_sequence

    def write_pass(
        self, operation: Operation, batch: PagedBatch, deadline_ms: int, *keys_4R: Tensor
    ) -> None:
        """Write the batch of a pass, and the noise keys of a choice after it."""
        tables_BJ = batch.block_tables_BJ[:, : self._max_blocks]
        header = (operation, deadline_ms, *batch.tokens_BP.shape, tables_BJ.shape[1])
        parts = (batch.tokens_BP, batch.first_positions_B, batch.num_columns_B, tables_BJ)
        self._write(header, *parts, *keys_4R)

    def write_gather(self, rows_X: Tensor, most_ids: int, deadline_ms: int) -> None:
        """Write the rows of the newest pass whose logits rank 0 needs."""
        self._write((Operation.GATHER, deadline_ms, 0, len(rows_X), most_ids), rows_X)

    def write_fewer_shapes(self, deadline_ms: int) -> None:
        """Write that verifies have fewer shapes from now on."""
        self.numbers_W[:_HEADER] = torch.tensor((Operation.USE_FEWER_SHAPES, deadline_ms, 0, 0, 0))

    def read_header(self) -> Header:
        """Return the header of the newest message."""
        operation, *numbers = self.numbers_W[:_HEADER].tolist()
        return Header(Operation(operation), *numbers)

    def read_pass(self) -> PagedBatch:
        """Return the batch of a pass, as copies."""
        header = self.read_header()
        batch, columns = header.num_sequences, header.num_columns
        sizes = _pass_sizes(header)
        body, bounds = self._body(sum(sizes)), (0, *accumulate(sizes))
        tokens, first_B, num_columns_B, tables = (body[a:b] for a, b in pairwise(bounds))
        return PagedBatch(
            tokens.view(batch, columns), first_B, num_columns_B, tables.view(batch, -1)
        )

    def read_choice(self) -> Tensor:
        """Return the noise keys of the rows of a pass, [4, R], as a copy."""
        header = self.read_header()
        first, rows = sum(_pass_sizes(header)), header.num_sequences * header.num_columns
        return self._body(first + _KEYS * rows)[first:].view(_KEYS, -1)

    def read_gather(self) -> Tensor:
        """Return the rows of a gathering, [X], as a copy."""
        return self._body(self.read_header().num_columns)

    def _body(self, count: int) -> Tensor:
        return self.numbers_W[_HEADER : _HEADER + count].clone()

    def _write(self, header: tuple[int, ...], *parts: Tensor) -> None:
        body = torch.cat([part.flatten() for part in parts])
        self.numbers_W[:_HEADER] = torch.tensor(header)
        self.numbers_W[_HEADER : _HEADER + len(body)] = body


def _pass_sizes(header: Header) -> tuple[int, int, int, int]:
    """Return the sizes of tokens, first positions, numbers of columns and block tables."""
    batch = header.num_sequences
    return (batch * header.num_columns, batch, batch, batch * header.num_blocks)
