"""Replays of CUDA graphs against eager passes: the same model, the same inputs, two KV caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.checkpoints import small_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import draft_settings, target_settings
from tests.gpu.not_capturable import NotCapturable
from tests.passes import trees, verifies
from torch import Tensor

from ssd.engine.attention.paged import PagedAttention, make_paged
from ssd.engine.capture import Capture, CudaGraphs, Graphs, Kind
from ssd.engine.config import ModelConfig
from ssd.engine.models.registry import open_decoder
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
    compare_captures(environment, CudaGraphs(), figures)


def test_a_replay_of_the_wrong_inputs_fails(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGraph, "replay", lambda _graph: None)
    with pytest.raises(AssertionError, match="a replay differs from the eager pass by"):
        compare_captures(environment, RecordedGraphs(), {})


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


def compare_captures(environment: Environment, graphs: Graphs, figures: dict[str, Figure]) -> None:
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
    eager = _logits(target, draft, (Capture(), Capture()), lambda attention: attention)
    figures["passes"] = len(eager)
    for way, wrap in (("", lambda attention: attention), ("_in_pieces", NotCapturable)):
        captures = Capture(graphs), Capture(graphs)
        replayed = _logits(target, draft, captures, wrap)
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
) -> list[Tensor]:
    """Return the logits of all passes of a new target and a new draft."""
    return [
        *verifies(_open(target, captures[0], wrap), target.engine),
        *trees(_open(draft, captures[1], wrap), draft.engine),
    ]


def _open(
    local: LocalModel, capture: Capture, wrap: Callable[[PagedAttention], PagedAttention]
) -> Any:
    engine, model = local.engine, ModelConfig.from_folder(local.folder)
    decoder = open_decoder(local.folder, model, engine, lambda _fraction: None)
    chosen = make_paged(
        engine.attention,
        engine.device,
        engine.dtype,
        head_size=model.head_size,
        is_deterministic=not engine.branches,
    )
    return make_execution(decoder, engine, wrap(chosen.attention), capture)
