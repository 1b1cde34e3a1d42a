"""Passes give the same bits eagerly and as graphs."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.engines import on
from tests.passes import trees, verifies
from tests.ranks import on_ranks
from torch import Tensor

from ssd.engine import capture as capture_module
from ssd.engine.attention.dense import PagedReference
from ssd.engine.capture import Capture, CudaGraph, CudaGraphs, Pass, is_capturing
from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.decoder import open_decoder
from ssd.engine.parallel.group import ALONE, Group, RankGroup
from ssd.engine.static_execution import Inputs, make_execution
from ssd.testing.recorded_graphs import RecordedGraph, RecordedGraphs

pytestmark = pytest.mark.usefixtures("compiler")

P, N = 4, 4
ENGINE = on(
    "static",
    EngineConfig(max_model_len=128, max_num_seqs=2, num_columns=P, block_size=16, prefill_chunk=32),
)


def execution(
    folder: Path, engine: EngineConfig, *, is_captured: bool, group: Group = ALONE
) -> tuple[Any, Capture]:
    model = ModelConfig.from_folder(folder)
    decoder = open_decoder(folder, model, engine, lambda _: None, group)
    capture = Capture(RecordedGraphs() if is_captured else None)
    return make_execution(decoder, engine, PagedReference(), capture, group), capture


Run = Callable[[Any, EngineConfig], list[Tensor]]


def compare(expected: list[Tensor], found: list[Tensor], *, is_compiled: bool) -> None:
    """Compare results: compiled layers add in another order."""
    for one, other in zip(expected, found, strict=True):
        if is_compiled:
            torch.testing.assert_close(other, one, atol=1e-4, rtol=0)
            assert torch.equal(other.argmax(-1), one.argmax(-1))
        else:
            assert torch.equal(other, one)


def test_the_time_of_a_verify_is_that_of_its_replay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **values: object) -> None:
            calls.append(name)
            function(*arguments, **values)

        return call

    monkeypatch.setattr(Inputs, "write", recorded("write", Inputs.write))
    monkeypatch.setattr(RecordedGraph, "replay", recorded("replay", RecordedGraph.replay))
    target, _ = execution(folder, ENGINE, is_captured=True)
    target._timer = SimpleNamespace(
        begin=lambda: calls.append("begin"), end=lambda: calls.append("end")
    )
    verifies(target, ENGINE)
    assert calls[-4:] == ["write", "begin", "replay", "end"]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("engine", "run", "num_shapes"),
    [(ENGINE, verifies, 3), (replace(ENGINE, branches=N), trees, 9)],
    ids=["target", "draft"],
)
def test_replays_have_the_results_of_eager_passes_for_all_inputs(
    folder: Path, engine: EngineConfig, run: Run, num_shapes: int, *, is_compiled: bool
) -> None:
    eager, _ = execution(folder, engine, is_captured=False)
    compiled = replace(engine, compile_layers=is_compiled)
    replayed, capture = execution(folder, compiled, is_captured=True)
    compare(run(eager, engine), run(replayed, engine), is_compiled=is_compiled)
    assert list(capture.is_captured.values()) == [True] * num_shapes


@pytest.mark.parametrize("is_compiled", [False, True])
def test_replays_of_ranks_contain_their_collectives(folder: Path, *, is_compiled: bool) -> None:
    def run(group: RankGroup, engine: EngineConfig, *, is_captured: bool) -> list[Tensor]:
        target, capture = execution(folder, engine, is_captured=is_captured, group=group)
        logits = verifies(target, engine)
        assert set(capture.is_captured.values()) == {is_captured}
        return logits

    compiled = replace(ENGINE, compile_layers=is_compiled)
    expected = on_ranks(2, lambda group: run(group, ENGINE, is_captured=False))
    found = on_ranks(2, lambda group: run(group, compiled, is_captured=True))
    for one, other in zip(expected, found, strict=True):
        compare(one, other, is_compiled=is_compiled)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            capture_module._log, level, lambda event, **fields: events.append((event, fields))
        )
    return events


def read_on_host() -> Tensor:
    return torch.full((1,), torch.ones(1).item())


def test_a_pass_without_a_graph_runs_eagerly(logged: list[tuple[str, dict[str, Any]]]) -> None:
    capture = Capture(RecordedGraphs())
    assert capture(("verify", 1), read_on_host) is read_on_host
    ((event, fields),) = logged
    assert event == "shape_not_captured"
    assert fields["shape"] == ["verify", 1]
    assert fields["instead"] == "no graph"
    assert fields["reason"] == "operation not permitted when stream is capturing"
    assert not is_capturing()


def test_the_log_names_each_captured_shape_once(
    folder: Path, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    target, _ = execution(folder, ENGINE, is_captured=True)
    verifies(target, ENGINE)
    verifies(target, ENGINE)
    assert [(event, fields["shape"]) for event, fields in logged] == [
        ("graph_captured", ["prefill", 1]),
        ("graph_captured", ["verify", 2]),
        ("graph_captured", ["verify", 1]),
    ]


def fail(error: Exception) -> Pass:
    def function() -> Tensor:
        if is_capturing():
            raise error
        return torch.zeros(1)

    return function


def test_missing_memory_is_not_a_reason_to_run_eagerly() -> None:
    capture = Capture(RecordedGraphs())
    with pytest.raises(torch.OutOfMemoryError):
        capture(("verify", 1), fail(torch.OutOfMemoryError("no memory")))
    assert not is_capturing()
    assert capture(("verify", 1), lambda: torch.zeros(1))().item() == 0


def test_a_graph_that_cannot_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[object] = []
    ended = RecordedGraph.end

    def end(graph: RecordedGraph) -> None:
        with contextlib.suppress(ValueError):
            ended(graph)
        raise RuntimeError("the capture is not valid")

    monkeypatch.setattr(RecordedGraphs, "give_up", lambda _graphs, graph: given_up.append(graph))
    capture = Capture(RecordedGraphs())
    with monkeypatch.context() as patch:
        patch.setattr(RecordedGraph, "end", end)
        patch.setattr(RecordedGraph, "__exit__", lambda *_: None)
        patch.setattr(RecordedGraph, "__enter__", lambda *_: None)
        run = capture(("verify", 1), lambda: torch.zeros(1))
    assert run().item() == 0
    assert capture.is_captured == {("verify", 1): False}
    assert len(given_up) == 1


@pytest.mark.parametrize("is_ended", [False, True])
def test_the_allocator_leaves_the_pool_of_a_failed_cuda_graph(
    monkeypatch: pytest.MonkeyPatch, *, is_ended: bool
) -> None:
    pools = iter([(0, 1), (0, 2)])
    ended: list[tuple[int, object]] = []

    def end(device: int, pool: object) -> None:
        ended.append((device, pool))
        if is_ended:
            raise RuntimeError("not currently recording to this pool")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    graphs = CudaGraphs()
    graphs.give_up(graphs.make())
    assert ended == [(3, (0, 1))]
    assert cast(CudaGraph, graphs.make())._pool == (0, 2)


def test_a_collective_that_is_refused_during_a_capture_is_no_lost_rank() -> None:
    def run(group: RankGroup) -> tuple[bool, list[float]]:
        tensors = group._tensors

        class Refusing:
            def all_gather_single(self, *arguments: Any) -> Any:
                if is_capturing():
                    raise RuntimeError("operation not permitted when stream is capturing")
                return tensors.all_gather_single(*arguments)

        group._tensors = Refusing()  # type: ignore[assignment]
        capture = Capture(RecordedGraphs())
        number_1 = torch.ones(1) + group.shard.rank
        replay = capture(("verify", 1), lambda: group.add(number_1))
        return capture.is_captured["verify", 1], [replay().item(), replay().item()]

    assert on_ranks(2, run) == [(False, [3.0, 3.0])] * 2
