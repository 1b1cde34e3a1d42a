"""What only the OpenVINO engine has: its errors, packed rows, quantised weights."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from openvino import opset15
from safetensors.torch import load_file, save_file
from tests.engines import inside, load, on, paged, store
from tests.unit.ssd.engine.wide import FUSED, load_wide, needs_bfloat16, stack, table, text

import ssd
from ssd.engine import memory, target_runner
from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.openvino_engine import decoder
from ssd.engine.openvino_engine.draft import group_by_width
from ssd.engine.openvino_engine.matrix import CopiedMatrix, Matrix
from ssd.engine.openvino_engine.packed import divided, fast_rows, inputs_of, pack, prompt_of
from ssd.engine.precision import Weights, has_bfloat16, has_matrices
from ssd.engine.same_bits import find_difference
from ssd.engine.target_runner import TargetRunner
from ssd.errors import MemoryBudgetError, SetupError

K = 3
P = K + 1
ENGINE = on("openvino", EngineConfig(max_model_len=128, max_num_seqs=4, num_columns=P))

BFLOAT16 = replace(ENGINE, dtype="bfloat16", threads=2)


def test_a_graph_that_cannot_be_compiled_is_a_setup_error_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "Exception from src/plugin.cpp:54:\nCheck failed:\nno such instruction\n\n"
        )

    monkeypatch.setattr(openvino.Core, "compile_model", refuse)
    with pytest.raises(SetupError, match="no such instruction; set engine to torch"):
        load(TargetRunner, folder, ENGINE)


@pytest.mark.timeout(120)
def test_no_import_is_reported_to_the_internet_or_writes_into_the_home_folder(
    tmp_path: Path,
) -> None:
    program = """
import sys
import ssd.engine.openvino_engine.target
sys.exit("openvino_telemetry.main" in sys.modules)
"""
    variables = (f"HOME={tmp_path}", f"PYTHONPATH={Path(ssd.__file__).parents[1]}")
    subprocess.run(["env", *variables, sys.executable, "-c", program], check=True)
    assert not list(tmp_path.iterdir())


def test_a_pass_has_as_many_rows_as_its_sequences_have_columns(folder: Path) -> None:
    counts_B = torch.tensor([1, 4, 2])
    tables_BJ = torch.arange(1, 4)[:, None]
    batch = PagedBatch(torch.ones((3, P)).long(), counts_B * 0, counts_B, tables_BJ)
    packed = load(TargetRunner, folder, ENGINE).prepare(batch)
    assert packed.tokens_R.size == 7
    assert packed.positions_R.tolist() == [0, 0, 1, 2, 3, 0, 1]
    assert packed.tables_RJ[:, 0].tolist() == [1, 2, 2, 2, 2, 3, 3]


def test_sessions_share_a_pass_unless_padding_takes_longer() -> None:
    def groups(*lengths: int) -> list[list[int]]:
        return [each.tolist() for each in group_by_width(torch.tensor(lengths))]

    assert groups(100, 120) == [[0, 1]]
    assert groups(100, 3000, 90, 110) == [[0, 2, 3], [1]]
    assert groups(3000, 100) == [[1], [0]]
    assert groups(1500, 1800, 900) == [[0, 1, 2]]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("inputs", [48, 128])
def test_a_quantised_product_is_near_the_product_of_its_weight(
    weights: Weights, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_OI = torch.randn((96, inputs), generator=generator)
    input_RI = torch.randn((5, inputs), generator=generator)
    rows = opset15.parameter([-1, inputs], np.float32)
    graph = openvino.Model([Matrix(weight_OI, weights).times(rows).output(0)], [rows], "product")
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found_RO = torch.from_numpy(compiled([input_RI.numpy()])[0])
    expected_RO = input_RI @ weight_OI.mT
    error = (found_RO - expected_RO).norm() / expected_RO.norm()
    # Values have 8 or 4 bits; a row without whole groups stays int8.
    assert error < (0.02 if weights == "int8" or inputs == 48 else 0.15)


@pytest.mark.skipif(not has_bfloat16(), reason="OpenVINO uses bfloat16 on CPUs that compute in it")
def test_a_matrix_in_bfloat16_has_no_copy_in_float32() -> None:
    weight_OI = torch.randn((8192, 4096)).bfloat16()
    rows = opset15.parameter([-1, 4096], np.float32)
    graph = openvino.Model([Matrix(weight_OI, "same").times(rows).output(0)], [rows], "product")
    num_bytes = weight_OI.nbytes
    before = anonymous_bytes()
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    compiled([np.ones((7, 4096), dtype=np.float32)])
    # Its packed copy is one size, a copy in float32 would be two more.
    assert anonymous_bytes() - before < 2 * num_bytes


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_every_pass_of_quantised_weights(
    folder: Path, weights: Weights
) -> None:
    runner = load(TargetRunner, folder, replace(ENGINE, weights=weights))
    # One row has a kernel of its own on CPUs with AVX2. The warm-up then adds one of padding.
    runner.warm_up(lambda _stage, _share: None)
    counts = runner.execution.sequence_counts
    assert find_difference(runner, counts, lambda _share: None) is None
    assert runner.row_counts == (1, 2, 3, 4)


def test_inputs_of_a_pass_live_until_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infer = openvino.InferRequest.infer
    used = []

    def after_use_of_free_memory(request: openvino.InferRequest, **options: bool) -> object:
        # Blocks of memory that arrays have freed are the next ones of their size.
        used.append([np.full(count, 7, np.int32) for count in range(1, 40) for _ in range(20)])
        return infer(request, **options)

    def logits(runner: TargetRunner) -> torch.Tensor:
        blocks_J = torch.tensor([2, 1])
        store(runner, range(5, 45), blocks_J)
        return runner.forward(paged([([6, 7, 8], 40, blocks_J)], P))[:, :3]

    expected = logits(load(TargetRunner, folder, ENGINE))
    runner = load(TargetRunner, folder, ENGINE)
    monkeypatch.setattr(openvino.InferRequest, "infer", after_use_of_free_memory)
    assert torch.equal(logits(runner), expected)


def test_a_few_passes_keep_the_rows_of_a_longer_one_and_the_bits_are_the_same(
    folder: Path, rows: list[int]
) -> None:
    runner = load(TargetRunner, folder, ENGINE)
    runner.warm_up(lambda _stage, _share: None)
    blocks_J = torch.tensor([2, 1])
    store(runner, range(5, 45), blocks_J)
    whole, short = (
        paged([([6, 7, 8, 9][:num], 40, blocks_J) for num in (P, last)], P) for last in (P, P - 1)
    )
    batches = (whole, *[short] * (K + 1), whole, short)
    rows.clear()
    expected = [runner.forward(batch) for batch in batches]
    usual = rows.copy()
    rows.clear()
    for batch, logits_BPV in zip(batches, expected, strict=True):
        found_BPV = runner.forward(replace(batch, keeps_rows=True))
        for row, count in enumerate(batch.num_columns_B.tolist()):
            assert torch.equal(found_BPV[row, :count], logits_BPV[row, :count])
    # K rows of padding, one in each pass. CPUs on which all passes have one shape keep it.
    assert rows == [*[usual[0]] * (1 + K), usual[1], usual[0], usual[0]]
    assert runner.num_padding == usual[0] - usual[1]


def test_at_one_shape_all_rows_run(folder: Path) -> None:
    runner = load(TargetRunner, folder, ENGINE)
    while runner.execution.use_fewer_shapes():
        pass
    assert runner.verify_columns == (P,)
    one_B = torch.ones(1).long()
    batch = PagedBatch(one_B[:, None].expand(-1, P), one_B - 1, one_B, one_B[:, None])
    packed = runner.prepare(batch)
    assert packed.tokens_R.size == ENGINE.max_num_seqs * P
    assert runner.verify(packed).shape[:2] == (1, P)


def test_a_pass_has_its_rows_as_sequences_and_then_each_prompt_as_one() -> None:
    tables_BJ = torch.arange(1, 13).view(3, 4)
    verified = paged([([7, 8], 33, tables_BJ[0])], P)
    prompts = paged([([5] * 3, 64, tables_BJ[1]), ([6], 0, tables_BJ[2])], 16)
    packed = pack(replace(verified, prompts=prompts), 1, packs_rows=True)
    inputs = {name: each.tolist() for name, each in inputs_of(packed, packed.prompts, 127).items()}
    # The prompt of one token has a copy.
    assert inputs["tokens"] == [7, 8, 5, 5, 5, 6, 6]
    assert inputs["positions"] == [33, 34, 64, 65, 66, 0, 1]
    assert inputs["subsequence_begins"] == [0, 1, 2, 5, 7, 7]
    assert inputs["past_lens"] == [33, 34, 64, 0, 0]
    assert inputs["block_indices_begins"] == [0, 2, 4, 7, 8, 8]
    assert inputs["block_indices"] == [1, 2, 1, 2, 5, 6, 7, 9]
    assert inputs["logit_rows"] == [0, 1, 4, 5]
    assert inputs["max_context_len"] == [67]
    assert packed.is_row_BP is not None
    assert packed.is_row_BP.tolist() == [[True] * 2 + [False] * 2, *[[True] + [False] * 3] * 2]
    padded = inputs_of(packed, packed.prompts, 127, padding=2)
    inputs = {name: each.tolist() for name, each in padded.items()}
    assert inputs["tokens"] == [7, 8, 0, 0, 5, 5, 5, 6, 6]
    assert inputs["positions"] == [33, 34, 0, 0, 64, 65, 66, 0, 1]
    assert inputs["subsequence_begins"] == [0, 1, 2, 3, 4, 7, 9, 9]
    assert inputs["past_lens"] == [33, 34, 0, 0, 64, 0, 0]
    assert inputs["block_indices_begins"] == [0, 2, 4, 5, 6, 9, 10, 10]
    assert inputs["block_indices"] == [1, 2, 1, 2, 0, 0, 5, 6, 7, 9]
    assert inputs["logit_rows"] == [0, 1, 6, 7]


def test_rows_are_padded_to_numbers_whose_products_are_fast() -> None:
    sizes = (1, 17, 32, 33, 36, 49, 52, 63, 64, 65, 96, 97, 128, 129, 224, 225, 400)
    expected = [1, 17, 32, 36, 36, 52, 52, 64, 64, 65, 96, 128, 128, 129, 224, 256, 400]
    assert [fast_rows(each) for each in sizes] == expected


@needs_bfloat16
def test_two_threads_compute_what_one_does(wide_folder: Path) -> None:
    found = []
    tokens = text(47)
    for dtype in ("bfloat16", FUSED):
        runner = load_wide(wide_folder, "openvino", dtype, max_num_seqs=8)
        runner.warm_up(lambda _stage, _share: None)
        assert runner.execution.shapes == "passes of 1 rows or more"
        store(runner, tokens[:40], table(0))
        found.append(runner.forward(stack([(tokens[40:], 40, 0)])).log_softmax(-1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.1)


@pytest.mark.skipif(
    not (has_matrices() and decoder._num_threads(BFLOAT16) > 1),
    reason="this machine has no AMX or one CPU",
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("largest", [1.0, 1e5])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_an_mlp_is_one_operation_with_two_threads_and_weights_of_float16(
    *,
    wide_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    largest: float,
    has_kernel: bool,
) -> None:
    shutil.copytree(wide_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = largest
    save_file(weights, tmp_path / "model.safetensors")
    if not has_kernel:
        monkeypatch.setattr(decoder, "_has_kernel", lambda _: False)
    runner = load_wide(tmp_path, "openvino", FUSED, threads=threads)
    graph = inside(runner)._request.get_compiled_model().get_runtime_model()
    kinds = [each.get_rt_info()["layerType"].astype(str) for each in graph.get_ops()]
    assert kinds.count("LLMMLP") == (threads == 2 and largest == 1.0 and has_kernel)


def test_without_the_kernel_weights_are_not_released() -> None:
    # In float32, products read them.
    assert not decoder._has_kernel(replace(BFLOAT16, dtype="float32"))


def test_the_memory_of_a_copied_weight_is_free_after_its_release() -> None:
    matrix = CopiedMatrix(torch.ones((8192, 4096)).bfloat16())
    before = anonymous_bytes()
    matrix.release()
    assert before - anonymous_bytes() > 0.9 * matrix.num_bytes
    assert not matrix._values.data.any()


def resident_bytes(path: Path) -> int:
    """Memory of this process that has pages of a file."""
    maps = Path("/proc/self/smaps").read_text().split(f" {path.resolve()}\n")[1:]
    return sum(1024 * int(re.findall(r"^Rss: +(\d+)", each, re.MULTILINE)[0]) for each in maps)


def test_after_the_warm_up_the_checkpoint_is_not_in_memory_and_passes_are_the_same(
    folder: Path, tmp_path: Path
) -> None:
    # Other tests of this process may have the folder that they share in memory.
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    path = own / "model.safetensors"
    runner = load(TargetRunner, own, ENGINE)
    batch = paged([([5, 6, 7], 0, torch.arange(1, 3))], P)
    before = runner.forward(batch).clone()
    assert resident_bytes(path) > 0
    runner.warm_up(lambda _stage, _share: None)
    assert resident_bytes(path) == 0
    assert torch.equal(runner.forward(batch)[:, :3], before[:, :3])


def test_the_kv_cache_leaves_memory_for_the_packed_copies_of_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ENGINE
    num_unpacked = inside(load(TargetRunner, folder, engine))._weights.num_unpacked_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda _device: num_unpacked)
    with pytest.raises(MemoryBudgetError, match="can use 0 bytes"):
        load(TargetRunner, folder, engine)
    assert num_unpacked > 0.5 * (folder / "model.safetensors").stat().st_size


@pytest.mark.timeout(60)
def test_a_draft_frees_its_checkpoint_after_the_warm_up(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    runner = load(DraftRunner, own, replace(ENGINE, num_columns=2, branches=2))
    assert resident_bytes(own / "model.safetensors") > 0
    runner.warm_up(lambda _stage, _share: None)
    assert resident_bytes(own / "model.safetensors") == 0


def test_with_a_kept_proof_the_warm_up_also_copies_the_weights_before_it_frees_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_runner, "proved", lambda *_: None)
    runner = load(TargetRunner, folder, ENGINE)
    execution, calls = inside(runner), list[str]()
    verify = execution.verify

    def recorded(prepared: Any) -> Any:
        calls.append("verify")
        return verify(prepared)

    monkeypatch.setattr(execution, "verify", recorded)
    free_pages = partial(calls.append, "free_pages")
    execution._weights = replace(execution._weights, free_pages=free_pages)
    runner.warm_up(lambda _stage, _share: None)
    assert calls == ["verify", "free_pages"]


def test_a_target_whose_proof_with_prompts_fails_stores_them_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_runner, "find_joined_difference", lambda *_: "2 rows differ")
    runner = load(TargetRunner, folder, ENGINE)
    runner.folder = None
    runner.warm_up(lambda _stage, _share: None)
    assert not runner.joins_prompts
    assert [each.message for each in caplog.records if each.message == "prompts_alone"]
    assert runner.row_counts == (1, 2, 3, 4)


def test_prompts_that_do_not_fit_beside_the_rows_share_further_passes() -> None:
    def groups(num_rows: int, *sizes: int) -> list[list[int]]:
        table_J = torch.zeros(1, dtype=torch.int64).numpy()
        prompts = [prompt_of(np.zeros(size, np.int64), 0, table_J) for size in sizes]
        return [[each.count for each in group] for group in divided(prompts, num_rows, 64)]

    assert groups(7, 40, 17, 30, 34, 1) == [[40, 17], [30, 34], [1]]
    assert groups(7, 64, 16) == [[], [64], [16]]
    assert groups(70, 20) == [[], [20]]
    assert groups(7, 100, 20) == [[], [100], [20]]
