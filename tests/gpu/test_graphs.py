"""Replays of CUDA graphs against eager passes: the same model, the same inputs, two KV caches."""

from typing import Any

import pytest
import torch
from tests.gpu.checkpoints import small_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import attention_of, draft_settings, target_settings
from tests.passes import trees, verifies
from torch import Tensor

from ssd.engine.capture import Capture, CudaGraphs, Graphs
from ssd.engine.config import ModelConfig
from ssd.engine.models.decoder import open_decoder
from ssd.engine.static_execution import make_execution
from ssd.model_files.local_model import LocalModel, find_model
from ssd.testing.recorded_graphs import RecordedGraph, RecordedGraphs

MAX_SEQUENCES = 4
SESSIONS = 2
BRANCHES = 6
LARGEST_DIFFERENCE = {"bfloat16": 0.02, "float32": 1e-5}
"""Norm of the difference divided by that of the eager logits. Libraries may choose other kernels
during a capture, so equal bits are counted but not required."""


@pytest.mark.check("graphs", on=("cuda",))
def test_replays_of_cuda_graphs_equal_eager_passes(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    # First, so that the comparison also shows that nothing is left of it.
    check_refused_capture(CudaGraphs(), "cuda")
    compare_captures(environment, CudaGraphs(), figures)


def test_a_capture_that_reads_from_its_device_runs_eagerly_and_others_are_captured() -> None:
    check_refused_capture(RecordedGraphs(), "cpu")


def check_refused_capture(graphs: Graphs, device: str) -> None:
    """Capture a function that no graph can contain, and then one that a graph can."""
    capture = Capture(graphs)
    two = torch.full((1,), 2.0, device=device)
    refused = capture(("refused",), lambda: torch.full((1,), two.item(), device=device))
    doubled = capture(("doubled",), lambda: two * 2)
    assert capture.is_captured == {("refused",): False, ("doubled",): True}
    for value in (3.0, 4.0):
        two.fill_(value)
        assert refused().item() == value
        assert doubled().item() == 2 * value


def test_a_replay_of_the_wrong_inputs_fails(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGraph, "replay", lambda _graph: None)
    with pytest.raises(AssertionError, match="a replay differs from the eager pass by"):
        compare_captures(environment, RecordedGraphs(), {})


def test_shapes_that_no_graph_contains_are_named() -> None:
    capture = Capture(RecordedGraphs())
    capture(("verify", 1), lambda: torch.zeros(1))
    assert shapes_without_graph(capture) == "none"
    capture(("verify", 2), lambda: torch.full((1,), torch.ones(1).item()))
    assert shapes_without_graph(capture) == "verify 2"


def compare_captures(environment: Environment, graphs: Graphs, figures: dict[str, Figure]) -> None:
    """Compare passes that are captured with eager ones."""
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
    eager = _logits(target, draft, (Capture(), Capture()))
    captures = Capture(graphs), Capture(graphs)
    replayed = _logits(target, draft, captures)
    worst = 0.0
    for index, (expected, found) in enumerate(zip(eager, replayed, strict=True)):
        difference = float((found - expected).norm() / expected.norm())
        worst = max(worst, difference)
        assert difference <= allowed, (
            f"pass {index + 1}: a replay differs from the eager pass by {difference:.3g} "
            f"of its norm; allowed: {allowed}"
        )
    figures |= {
        "passes": len(eager),
        "passes_with_equal_bits": sum(map(torch.equal, eager, replayed)),
        "largest_relative_difference": worst,
        "captured_graphs_bytes": sum(each.num_bytes for each in captures),
        "shapes_without_graph": shapes_without_graph(*captures),
    }


def shapes_without_graph(*captures: Capture) -> str:
    """Return the names of the shapes that run without a graph."""
    keys = [key for each in captures for key, found in each.is_captured.items() if not found]
    return ", ".join(" ".join(map(str, key)) for key in keys) or "none"


def _logits(
    target: LocalModel, draft: LocalModel, captures: tuple[Capture, Capture]
) -> list[Tensor]:
    """Return the logits of all passes of a new target and a new draft."""
    return [
        *verifies(_open(target, captures[0]), target.engine),
        *trees(_open(draft, captures[1]), draft.engine),
    ]


def _open(local: LocalModel, capture: Capture) -> Any:
    engine, model = local.engine, ModelConfig.from_folder(local.folder)
    decoder = open_decoder(local.folder, model, engine, lambda _fraction: None)
    return make_execution(decoder, engine, attention_of(engine, model), capture)
