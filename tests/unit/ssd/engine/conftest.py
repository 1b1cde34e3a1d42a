"""Runners of a tiny random model, and the reference for any text: one dense causal pass."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import openvino
import pytest
import torch
from tests.engines import PlainLogits, inside, load
from tests.unit.ssd.engine.wide import load_wide, write_wide_folder
from torch import Tensor

from ssd.engine import static_execution
from ssd.engine.capture import Capture
from ssd.engine.config import EngineConfig
from ssd.engine.target_runner import TargetRunner
from ssd.testing.recorded_graphs import RecordedGraphs
from ssd.testing.tiny_folder import write_tiny_folder

LENGTH_STEP = 128


class DenseAttention:
    """Causal attention over one pass, without a KV cache: softmax written out in fp64."""

    def attend(
        self, layer: int, queries_RHE: Tensor, keys_RGE: Tensor, values_RGE: Tensor
    ) -> Tensor:
        rows, heads, size = queries_RHE.shape
        group = heads // keys_RGE.shape[1]
        keys_HRE = keys_RGE.double().repeat_interleave(group, dim=1).transpose(0, 1)
        values_HRE = values_RGE.double().repeat_interleave(group, dim=1).transpose(0, 1)
        scores_HRR = queries_RHE.double().transpose(0, 1) @ keys_HRE.transpose(1, 2) * size**-0.5
        hidden_RR = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        weights_HRR = scores_HRR.masked_fill(hidden_RR, -torch.inf).softmax(dim=-1)
        seen_RHE: Tensor = (weights_HRR @ values_HRE).transpose(0, 1)
        return seen_RHE.reshape(rows, -1).to(queries_RHE.dtype)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A second thread waits at each tiny kernel: 3 times slower on a busy machine of two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def graphs_without_a_gpu() -> Iterator[None]:
    """The static engine replays recorded operations, as it replays CUDA graphs on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_execution, "capture_of", lambda _device: Capture(RecordedGraphs()))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("engine") / "tiny", max_len=1024)


@pytest.fixture(scope="session")
def plain_logits(folder: Path) -> PlainLogits:
    """Logits [R, V] after each token of a text of the tiny model, by torch in float32."""

    decoder = inside(load(TargetRunner, folder, EngineConfig(max_model_len=1024)))._decoder

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        # Of few lengths, since each costs the matrix kernels a compilation; the tail is not seen.
        length = -(-len(tokens) // LENGTH_STEP) * LENGTH_STEP
        tokens_R = torch.zeros(length, dtype=torch.int64)
        tokens_R[: len(tokens)] = torch.tensor(tokens)
        hidden_RD = decoder.forward(tokens_R, torch.arange(length), DenseAttention())
        logits_RV: Tensor = decoder.logits(hidden_RD)
        return logits_RV[: len(tokens)]

    return logits


@pytest.fixture(scope="session")
def compiler() -> None:
    """Import the compiler of torch, which takes seconds, outside of the time-out of a test.

    A time-out in the middle of the import would leave it incomplete for all later tests.
    """
    import_module("torch._dynamo")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass of OpenVINO."""
    found: list[int] = []
    infer = openvino.InferRequest.infer

    def recorded(request: openvino.InferRequest, **options: bool) -> object:
        found.append(request.get_tensor("tokens").size)
        return infer(request, **options)

    monkeypatch.setattr(openvino.InferRequest, "infer", recorded)
    return found


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_wide_folder(folder)
    return folder


@pytest.fixture(scope="module")
def chunked(wide_folder: Path) -> TargetRunner:
    """A runner whose prompts have several chunks; its shapes are not proved."""
    return load_wide(wide_folder, "openvino", "float32", max_num_seqs=8, prefill_chunk=16)
