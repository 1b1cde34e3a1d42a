"""Passes with other inputs each time, which compare the ways to run the shapes of an execution."""

from typing import Any

import torch
from torch import Tensor

from ssd.engine.batch import AppendBatch, BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.config import EngineConfig

NUM_TOKENS = 257
"""Token ids of the smallest model."""


def verifies(target: Any, engine: EngineConfig) -> list[Tensor]:
    """Logits of verifies of each number of sequences, three times with other inputs."""
    tables_BJ = _store_prompts(target, engine)
    found: list[Tensor] = []
    for columns in (engine.num_columns, 2, engine.num_columns):
        for count in range(engine.max_num_seqs, 0, -1):
            first_B = engine.prefill_chunk + len(found) - 9 * torch.arange(count)
            tokens_BP = _tokens(count, columns, len(found))
            batch = PagedBatch(tokens_BP, first_B, first_B * 0 + columns, tables_BJ[:count])
            found.append(target.verify(batch).to("cpu", copy=True))
            tables_BJ = tables_BJ.flip(0)
    return found


def trees(draft: Any, engine: EngineConfig) -> list[Tensor]:
    """Logits of trees of each number of sessions, two in a row: each ends with a commit."""
    tables_BJ = _store_prompts(draft, engine)
    columns, branches = engine.num_columns, engine.branches
    found: list[Tensor] = []
    for count in (*range(engine.max_num_seqs, 0, -1), engine.max_num_seqs):
        slots_B = torch.arange(count)
        lengths_B = engine.prefill_chunk + len(found) // 4 - 9 * slots_B
        tokens_BP = _tokens(count, columns, len(found))
        proposals = ProposalBatch(
            slots_B, tokens_BP, slots_B * 0 + columns, lengths_B, tables_BJ[:count]
        )
        found.append(draft.run_proposals(proposals).to("cpu", copy=True))
        accepted_BN = _tokens(count, branches, len(found)) % columns
        for _ in range(2):
            for step in range(columns):
                tokens_BN = _tokens(count, branches, len(found))
                batch = BranchBatch(
                    slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ[:count]
                )
                found.append(draft.run_branches(batch).to("cpu", copy=True))
            # The commit of branch 1, whose outcome accepts one token.
            appended = AppendBatch(slots_B, slots_B * 0 + 2, lengths_B, tables_BJ[:count])
            draft.append_proposal(appended)
            draft.promote_branches(slots_B, slots_B * 0 + 1)
            lengths_B = lengths_B + 2
        tables_BJ = tables_BJ.flip(0)
    return found


def _store_prompts(execution: Any, engine: EngineConfig) -> Tensor:
    """Prefill a text for each sequence, its last chunk in part; return their block tables."""
    chunk, rows = engine.prefill_chunk, engine.max_num_seqs
    pages_each = -(-2 * chunk // engine.block_size)
    pages = torch.randperm(rows * pages_each, generator=torch.Generator().manual_seed(1)) + 1
    tables_BJ = pages.view(rows, pages_each)
    zero_1 = torch.zeros(1, dtype=torch.int64)
    for row in range(rows):
        for first, count in ((0, chunk), (chunk, chunk // 2)):
            tokens_1P = _tokens(1, chunk, 10 * row + first)
            batch = PagedBatch(tokens_1P, zero_1 + first, zero_1 + count, tables_BJ[row : row + 1])
            assert execution.prefill(batch)[:count].all(), "the prompt is finite"
    return tables_BJ


def _tokens(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_TOKENS, (rows, columns), generator=generator)
