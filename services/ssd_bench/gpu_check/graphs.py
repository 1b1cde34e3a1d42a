"""Replays of CUDA graphs against eager passes: the same model, the same inputs, two KV caches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ssd.engine.attention.paged import make_paged
from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.capture import Capture, CaptureError, CudaGraphs, Pass, run_eagerly
from ssd.engine.config import ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.registry import open_weights
from ssd.engine.precision import DTYPES
from ssd.engine.runner import AnyRunner
from ssd.engine.static_execution import make_execution
from ssd.engine.target_runner import TargetRunner
from ssd.local_model import LocalModel, find_model
from ssd_bench.gpu_check.checkpoints import small_pair
from ssd_bench.gpu_check.models import block_tables, draft_settings, target_settings, used_bytes
from ssd_bench.gpu_check.outcome import Environment, Figure, SkipError, WrongResultError

MAX_SEQUENCES = 4
SESSIONS = 2
BRANCHES = 6
PROMPT_TOKENS = 100
LARGEST_DIFFERENCE = {"bfloat16": 0.02, "float32": 1e-5}
"""Norm of the difference divided by that of the eager logits. Libraries may choose other kernels
during a capture, so equal bits are counted but not required."""


def check_graphs(environment: Environment) -> dict[str, Figure]:
    """Compare replays with eager passes, for a target and a draft."""
    if not environment.is_cuda:
        raise SkipError("a CPU has no CUDA graphs")
    return compare_captures(environment, CudaGraphs())


def compare_captures(environment: Environment, capture: Capture) -> dict[str, Figure]:
    """Compare captured passes with eager ones.

    Raises:
        WrongResultError: the logits of a pass differ, or a pass cannot be captured.
    """
    graph_bytes = 0

    def capture_or_fail(function: Pass) -> Pass:
        nonlocal graph_bytes
        used_before = used_bytes(environment)
        try:
            captured = capture(function)
        except CaptureError as error:
            raise WrongResultError(f"a pass cannot be captured: {error}") from error
        graph_bytes += used_bytes(environment) - used_before
        return captured

    target_model, draft_model = small_pair(environment)
    target = find_model(
        target_settings(target_model, environment, MAX_SEQUENCES),
        max_num_seqs=MAX_SEQUENCES,
    )
    draft = find_model(
        draft_settings(draft_model, environment, SESSIONS, BRANCHES),
        max_num_seqs=SESSIONS,
        branches=BRANCHES,
    )
    num_passes = num_equal = 0
    worst = 0.0
    captures = (run_eagerly, capture_or_fail)
    for eager, replayed in (
        *zip(*(_of_target(_open(TargetRunner, target, each)) for each in captures), strict=True),
        *zip(*(_of_draft(_open(DraftRunner, draft, each)) for each in captures), strict=True),
    ):
        num_passes += 1
        num_equal += torch.equal(eager, replayed)
        difference = float((replayed - eager).norm() / eager.norm())
        worst = max(worst, difference)
        if not difference <= LARGEST_DIFFERENCE[target.engine.dtype]:
            raise WrongResultError(
                f"pass {num_passes}: a replay differs from the eager pass by {difference:.3g} of "
                f"its norm; allowed: {LARGEST_DIFFERENCE[target.engine.dtype]}"
            )
    return {
        "passes": num_passes,
        "passes_with_equal_bits": num_equal,
        "largest_relative_difference": worst,
        "captured_graphs_bytes": graph_bytes,
    }


def _open(kind: type[AnyRunner], local: LocalModel, capture: Capture) -> AnyRunner:
    engine, model = local.engine, ModelConfig.from_folder(local.folder)
    dtype = DTYPES[engine.dtype]
    weights, _ = open_weights(local.folder, model, dtype, engine.device, lambda _fraction: None)
    attention = make_paged(engine.attention, engine.device, engine.dtype).attention
    decoder = Decoder(model, weights)
    return kind(make_execution(decoder, model, engine, attention, capture), model, engine)


def _of_target(runner: TargetRunner) -> Iterator[Tensor]:
    """Run verifies of 1 to 4 sequences, each shape with several inputs; yield their logits."""
    columns = runner.engine.num_columns
    tables_BJ = block_tables(MAX_SEQUENCES, PROMPT_TOKENS + 4 * columns, runner.engine.block_size)
    for index in range(MAX_SEQUENCES):
        _prefill(runner, index, tables_BJ[index : index + 1])
    for count in range(1, MAX_SEQUENCES + 1):
        for repetition in range(3):
            first_B = torch.full((count,), PROMPT_TOKENS + repetition * columns)
            tokens_BP = _tokens(runner, count, columns, 10 * count + repetition)
            used_B = torch.full((count,), columns)
            batch = PagedBatch(tokens_BP, first_B, used_B, tables_BJ[:count])
            yield runner.forward(batch).cpu()


def _of_draft(runner: DraftRunner) -> Iterator[Tensor]:
    """Run trees of 1 and 2 sessions, twice with a commit between them; yield their logits."""
    columns, branches = runner.engine.num_columns, runner.engine.branches
    tables_BJ = block_tables(SESSIONS, PROMPT_TOKENS + 4 * columns, runner.engine.block_size)
    for index in range(SESSIONS):
        _prefill(runner, index, tables_BJ[index : index + 1])
    for count in range(1, SESSIONS + 1):
        slots_B = torch.arange(count)
        used_B = torch.full((count,), columns)
        lengths_B = torch.full((count,), PROMPT_TOKENS)
        tokens_BP = _tokens(runner, count, columns, count)
        proposals = ProposalBatch(slots_B, tokens_BP, used_B, lengths_B, tables_BJ[:count])
        yield runner.run_proposals(proposals).cpu()
        accepted_BN = torch.arange(branches).expand(count, -1) % columns
        for tree in range(2):
            for step in range(columns):
                tokens_BN = _tokens(runner, count, branches, 100 * tree + step)
                batch = BranchBatch(
                    slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ[:count]
                )
                yield runner.run_branches(batch).cpu()
            # The commit of branch 1, whose outcome accepts one token.
            runner.append_proposal(slots_B, used_B * 0 + 2, lengths_B, tables_BJ[:count])
            runner.promote_branches(slots_B, used_B * 0 + 1)
            lengths_B = lengths_B + 2
            slots_B = slots_B.clone()


def _prefill(runner: TargetRunner | DraftRunner, seed: int, table_1J: Tensor) -> None:
    """Store the KV of one prompt."""
    chunk = runner.engine.prefill_chunk
    tokens_1P = _tokens(runner, 1, chunk, 1000 + seed)
    zero_1 = torch.zeros(1, dtype=torch.int64)
    batch = PagedBatch(tokens_1P, zero_1, zero_1 + PROMPT_TOKENS, table_1J)
    if (column := runner.prefill(batch)) is not None:
        raise WrongResultError(f"column {column} of a prompt is not finite")


def _tokens(runner: TargetRunner | DraftRunner, rows: int, columns: int, seed: int) -> Tensor:
    """Return different token ids for each seed."""
    ids = torch.arange(rows * columns) * 7919 + seed * 104_729
    return (ids % (runner.engine.num_token_ids or runner.model.vocab_size)).view(rows, columns)
