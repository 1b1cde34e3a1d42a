"""The checks that start no processes, on a CPU with small models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.engine.attention import paged_flex
from ssd.engine.batch import ProposalBatch
from ssd.engine.capture import Capture
from ssd.engine.target_runner import TargetRunner
from ssd.testing.recorded_graphs import RecordedGraph, RecordedGraphs
from ssd_bench.gpu_check.attention import check_flex_bits
from ssd_bench.gpu_check.checkpoints import llama_pair
from ssd_bench.gpu_check.checks import CHECKS
from ssd_bench.gpu_check.child import run_check
from ssd_bench.gpu_check.graphs import compare_captures, shapes_by_kind
from ssd_bench.gpu_check.models import block_tables, open_draft
from ssd_bench.gpu_check.outcome import Environment, Outcome, WrongResultError

IN_PROCESS = [name for name in CHECKS if not name.startswith(("tokens", "speed", "channel"))]
NOT_ON_CPU = {
    "graphs": "a CPU has no CUDA graphs",
    "attention flash_attn": "flash-attn needs CUDA",
    "attention flex, other shapes": "a CPU traces each shape for seconds, and one has been checked",
    "peer vllm": "the package vllm is not installed",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(device="cpu", scratch=tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_check_passes_on_a_cpu_or_names_what_it_needs(
    name: str, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager FlexAttention traces each shape by default, and warns.
    flex = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(flex, True)
    outcome = run_check(name, environment)
    if name in NOT_ON_CPU:
        assert outcome == Outcome(status="skipped", reason=NOT_ON_CPU[name])
    else:
        assert outcome.status == "passed", outcome.reason
        assert outcome.figures
        assert Outcome.from_json(outcome.to_json()) == outcome


def test_bits_that_depend_on_the_column_are_found(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_column(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out_BQHE, mass_BHQ = attend(*arguments, **options)
        return out_BQHE + torch.arange(out_BQHE.shape[1])[:, None, None], mass_BHQ

    attend = paged_flex.attend
    flex = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(flex, True)
    monkeypatch.setattr(paged_flex, "attend", by_column)
    with pytest.raises(WrongResultError, match="other bits at position 126 in column 1"):
        check_flex_bits(environment)


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
    with pytest.raises(WrongResultError, match="a replay differs from the eager pass by"):
        compare_captures(environment, RecordedGraphs())


def test_shapes_that_no_graph_contains_are_named(environment: Environment) -> None:
    capture = Capture(RecordedGraphs())
    capture(("verify", 1), lambda: torch.zeros(1))
    capture(("verify", 2), lambda: torch.full((1,), torch.ones(1).item()))
    capture(("verify", 4), lambda: capture.outside(read_on_host)[0])
    assert shapes_by_kind(capture) == {
        "shapes_in_pieces": "verify 4",
        "shapes_without_graph": "verify 2",
    }


def read_on_host() -> tuple[torch.Tensor, torch.Tensor]:
    number = torch.ones(1).item()
    return torch.full((1,), number), torch.zeros(1)


def test_wrong_logits_fail(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TargetRunner.forward
    monkeypatch.setattr(TargetRunner, "forward", lambda *batch: right(*batch) * 1.01)
    outcome = run_check("logits of qwen3", environment)
    assert outcome.status == "failed"
    assert "differ from those of transformers by 0.01" in outcome.reason


def test_an_old_torch_fails(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1+cu126")
    outcome = run_check("machine", environment)
    assert outcome.status == "failed"
    assert outcome.reason == "torch is 2.10.1+cu126, and the product needs 2.13"


def test_too_little_space_skips_a_check_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("ssd_bench.gpu_check.checkpoints.shutil.disk_usage", lambda _path: usage)
    outcome = run_check("logits of llama", Environment(device="cpu", scratch=tmp_path))
    assert outcome.status == "skipped"
    assert "name another folder with --scratch" in outcome.reason


def test_random_models_usually_continue_a_token_with_the_next_one(environment: Environment) -> None:
    runner = open_draft(llama_pair(environment).draft, environment, 1, 2)
    tokens_1P = torch.arange(20, 28)[None]
    zero_1 = torch.zeros(1, dtype=torch.int64)
    tables_1J = block_tables(1, 8, runner.engine.block_size)
    batch = ProposalBatch(zero_1, tokens_1P, zero_1 + 8, zero_1, tables_1J)
    best_1P = runner.run_proposals(batch).argmax(-1)
    assert int((best_1P == tokens_1P + 1).sum()) >= 5
