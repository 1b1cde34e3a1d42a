"""Replays of CUDA graphs against eager passes: the same model, the same inputs, two KV caches."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.gpu.checkpoints import small_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import block_tables, draft_settings, target_settings
from tests.gpu.not_capturable import NotCapturable
from torch import Tensor

from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.batch import BranchBatch, PagedBatch, ProposalBatch
from ssd.engine.capture import Capture, CudaGraphs, Graphs, Kind
from ssd.engine.config import ModelConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.models.registry import open_decoder
from ssd.engine.runner import AnyRunner
from ssd.engine.static_execution import make_execution
from ssd.engine.target_runner import TargetRunner
from ssd.model_files.local_model import LocalModel, find_model
from ssd.testing.recorded_graphs import RecordedGraph, RecordedGraphs

MAX_SEQUENCES = 4
SESSIONS = 2
BRANCHES = 6
PROMPT_TOKENS = 100
LARGEST_DIFFERENCE = {"bfloat16": 0.02, "float32": 1e-5}
"""Norm of the difference divided by that of the eager logits. Libraries may choose other kernels
during a capture, so equal bits are counted but not required."""


@pytest.mark.check("graphs", on=("cuda",))
def test_replays_of_cuda_graphs_equal_eager_passes(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    figures |= compare_captures(environment, CudaGraphs())


def test_replays_of_recorded_passes_equal_eager_passes(environment: Environment) -> None:
    """What Python computes is fixed at the first pass of a shape, as in a CUDA graph."""
    figures = compare_captures(environment, RecordedGraphs())
    assert figures["passes"] == 12 + 2 * (1 + 2 * 8)
    assert figures["passes_with_equal_bits"] == figures["passes"]
    assert figures["passes_with_equal_bits_in_pieces"] == figures["passes"]
    assert figures["shapes_in_pieces"] == figures["shapes_without_graph"] == "none"


def test_a_replay_of_the_wrong_inputs_fails(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGraph, "replay", lambda _graph: None)
    with pytest.raises(AssertionError, match="a replay differs from the eager pass by"):
        compare_captures(environment, RecordedGraphs())


def test_shapes_that_no_graph_contains_are_named() -> None:
    def read_on_host() -> tuple[Tensor, Tensor]:
        return torch.full((1,), torch.ones(1).item()), torch.zeros(1)

    capture = Capture(RecordedGraphs())
    capture(("verify", 1), lambda: torch.zeros(1))
    capture(("verify", 2), lambda: torch.full((1,), torch.ones(1).item()))
    capture(("verify", 4), lambda: capture.outside(read_on_host)[0])
    assert shapes_by_kind(capture) == {
        "shapes_in_pieces": "verify 4",
        "shapes_without_graph": "verify 2",
    }


def compare_captures(environment: Environment, graphs: Graphs) -> dict[str, Figure]:
    """Compare passes that are captured whole and in pieces with eager ones."""
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
    allowed = LARGEST_DIFFERENCE[target.engine.dtype]
    eager = list(_logits(target, draft, (Capture(), Capture()), lambda attention: attention))
    figures: dict[str, Figure] = {"passes": len(eager)}
    for way, wrap in (("", lambda attention: attention), ("_in_pieces", NotCapturable)):
        captures = Capture(graphs), Capture(graphs)
        replayed = list(_logits(target, draft, captures, wrap))
        worst = 0.0
        for index, (expected, found) in enumerate(zip(eager, replayed, strict=True)):
            difference = float((found - expected).norm() / expected.norm())
            worst = max(worst, difference)
            assert difference <= allowed, (
                f"pass {index + 1}: a replay differs from the eager pass by {difference:.3g} "
                f"of its norm; allowed: {allowed}{way and ' (captured in pieces)'}"
            )
        figures |= {
            f"passes_with_equal_bits{way}": sum(map(torch.equal, eager, replayed)),
            f"largest_relative_difference{way}": worst,
            f"captured_graphs{way}_bytes": sum(each.num_bytes for each in captures),
        }
        if not way:
            figures |= shapes_by_kind(*captures)
    return figures


def shapes_by_kind(*captures: Capture) -> dict[str, Figure]:
    """Return the names of the shapes that run in pieces or without a graph."""

    def names(kind: Kind) -> str:
        keys = [key for each in captures for key, found in each.kinds.items() if found is kind]
        return ", ".join(" ".join(map(str, key)) for key in keys) or "none"

    return {
        "shapes_in_pieces": names(Kind.PIECES),
        "shapes_without_graph": names(Kind.EAGER),
    }


def _logits(
    target: LocalModel,
    draft: LocalModel,
    captures: tuple[Capture, Capture],
    wrap: Callable[[PagedAttention], PagedAttention],
) -> Iterator[Tensor]:
    """Return the logits of all passes of a new target and a new draft."""
    yield from _of_target(_open(TargetRunner, target, captures[0], wrap))
    yield from _of_draft(_open(DraftRunner, draft, captures[1], wrap))


def _open(
    kind: type[AnyRunner],
    local: LocalModel,
    capture: Capture,
    wrap: Callable[[PagedAttention], PagedAttention],
) -> AnyRunner:
    engine, model = local.engine, ModelConfig.from_folder(local.folder)
    decoder = open_decoder(local.folder, model, engine, lambda _fraction: None)
    attention = wrap(make_paged(engine.attention, engine.device, engine.dtype).attention)
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
            yield runner.forward(batch).to("cpu", copy=True)


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
        yield runner.run_proposals(proposals).to("cpu", copy=True)
        accepted_BN = torch.arange(branches).expand(count, -1) % columns
        for tree in range(2):
            for step in range(columns):
                tokens_BN = _tokens(runner, count, branches, 100 * tree + step)
                batch = BranchBatch(
                    slots_B, tokens_BN, accepted_BN, step, lengths_B, tables_BJ[:count]
                )
                yield runner.run_branches(batch).to("cpu", copy=True)
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
    column = runner.prefill(batch)
    assert column is None, f"column {column} of a prompt is not finite"


def _tokens(runner: TargetRunner | DraftRunner, rows: int, columns: int, seed: int) -> Tensor:
    """Return different token ids for each seed."""
    ids = torch.arange(rows * columns) * 7919 + seed * 104_729
    return (ids % (runner.engine.num_token_ids or runner.model.vocab_size)).view(rows, columns)
