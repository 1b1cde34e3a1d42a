"""Times of the passes of a pair: verifies of 1 to 32 sequences, and the steps of a draft's table.

The draft has a check of its own: its shapes take minutes to compile.

The least time of a verify is that of reading the weights at the bandwidth of a copy.
"""

import pytest
import torch
from tests.gpu.checkpoints import llama_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import (
    block_tables,
    copy_bandwidth,
    device_seconds,
    open_draft,
    open_target,
)
from tests.gpu.test_graphs import shapes_without_graph

from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.capture import Capture
from ssd.engine.config import DTYPE_BYTES
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.sizes import pass_weights
from ssd.engine.static_execution import StaticExecution
from ssd.engine.target_runner import TargetRunner

BATCHES = {"cuda": (1, 2, 4, 8, 16, 32), "cpu": (1, 2)}
SESSIONS = {"cuda": (1, 8), "cpu": (1,)}
CONTEXT = {"cuda": 512, "cpu": 32}
BRANCHES = 24


@pytest.mark.check("passes of llama")
def test_verifies_of_llama_are_measured(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    bandwidth = copy_bandwidth(environment)
    folder = llama_pair(environment).target
    target = open_target(folder, environment, max(BATCHES[environment.device]))
    weight_bytes = pass_weights(target.model) * DTYPE_BYTES[target.engine.dtype]
    least_ms = weight_bytes / bandwidth * 1000
    figures |= {
        "rows_of_a_sequence": target.engine.num_columns,
        "weights_at_copy_bandwidth_ms": round(least_ms, 3),
    }
    for batch in BATCHES[environment.device]:
        verify_ms = verify_seconds(target, batch, environment) * 1000
        figures[f"verify_{batch}_ms"] = round(verify_ms, 3)
        figures[f"verify_{batch}_over_weights"] = round(verify_ms / least_ms, 3)
    figures["shapes_without_graph"] = shapes_without_graph(capture_of(target))


@pytest.mark.check("tables of llama")
def test_tables_of_llama_are_measured(environment: Environment, figures: dict[str, Figure]) -> None:
    folder = llama_pair(environment).draft
    draft = open_draft(folder, environment, max(SESSIONS[environment.device]), BRANCHES)
    for sessions in SESSIONS[environment.device]:
        seconds = table_seconds(draft, sessions, environment)
        figures[f"table_{sessions}_ms"] = round(seconds * 1000, 3)
    figures["shapes_without_graph"] = shapes_without_graph(capture_of(draft))


def capture_of(runner: TargetRunner | DraftRunner) -> Capture:
    """Return what has captured the passes of a runner on a GPU."""
    execution = runner.execution
    assert isinstance(execution, StaticExecution)
    return execution.capture


def verify_seconds(runner: TargetRunner, batch: int, environment: Environment) -> float:
    """Return the time of a verify of K+1 rows of each sequence."""
    context, columns = CONTEXT[environment.device], runner.engine.num_columns
    tokens_BP = torch.arange(batch * columns).view(batch, columns) % runner.model.vocab_size
    first_B = torch.full((batch,), context)
    tables_BJ = block_tables(batch, context + columns, runner.engine.block_size)
    prepared = runner.prepare(
        PagedBatch(tokens_BP, first_B, torch.full((batch,), columns), tables_BJ)
    )
    return device_seconds(
        lambda: runner.verify(prepared), environment, on_device=runner.verify_seconds
    )


def table_seconds(runner: DraftRunner, sessions: int, environment: Environment) -> float:
    """Return the time of the K steps after which a table is complete, choices not included."""
    context, columns = CONTEXT[environment.device], runner.engine.num_columns
    slots_B = torch.arange(sessions)
    lengths_B = torch.full((sessions,), context)
    tables_BJ = block_tables(sessions, context + 2 * columns, runner.engine.block_size)
    tokens_BP = torch.arange(columns).expand(sessions, -1)
    columns_B = torch.full((sessions,), columns)
    runner.run_proposals(ProposalBatch(slots_B, tokens_BP, columns_B, lengths_B, tables_BJ))
    tokens_BN = torch.arange(runner.engine.branches).expand(sessions, -1)
    accepted_BN = tokens_BN % columns

    def steps() -> None:
        for step in range(columns - 1):
            runner.run_branches(
                BranchBatch(slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ)
            )

    return device_seconds(steps, environment)
