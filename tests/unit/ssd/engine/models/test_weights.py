"""Errors of a checkpoint name the tensor and the file."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import inside, load
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.headers import weight_files
from ssd.engine.models.weights import STORED_DTYPES, Checkpoint, open_weights
from ssd.engine.parallel.shard import Shard, ids_of
from ssd.engine.runner import load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.errors import WeightsError
from ssd.testing.tiny_folder import write_tiny_folder

NAME, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
ENGINE = EngineConfig(max_model_len=64, max_num_seqs=1, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "model")


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace or remove tensors of the one file."""
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)


def split(folder: Path) -> dict[str, str]:
    """Split the one file in two, with an index; where each tensor is."""
    whole = folder / "model.safetensors"
    weights = load_file(whole)
    files = {name: f"model-{1 + len(name) % 2}-of-2.safetensors" for name in weights}
    for file in set(files.values()):
        part = {name: tensor.clone() for name, tensor in weights.items() if files[name] == file}
        save_file(part, folder / file)
    whole.unlink()
    write_index(folder, files)
    return files


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def head_of(runner: TargetRunner) -> Tensor:
    hidden_RD = torch.linspace(-1, 1, 32)[None]
    logits_RV: Tensor = inside(runner)._decoder.logits(hidden_RD)
    return logits_RV


def test_progress_ends_at_one_and_parameters_are_counted(folder: Path) -> None:
    fractions: list[float] = []
    runner = load_runner(
        TargetRunner, folder, ENGINE, lambda stage, fraction: fractions.append(fraction)
    )
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    stored = load_file(folder / "model.safetensors")
    assert runner.num_parameters == sum(tensor.numel() for tensor in stored.values())


def test_a_split_checkpoint_is_the_same_model(folder: Path) -> None:
    expected_RV = head_of(load(TargetRunner, folder, ENGINE))
    split(folder)
    assert torch.equal(head_of(load(TargetRunner, folder, ENGINE)), expected_RV)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(head_of(load(TargetRunner, folder, ENGINE)), expected_RV)


def test_an_index_beside_the_one_file_of_a_model_is_left_over(folder: Path) -> None:
    other = write_tiny_folder(folder.parent / "other", seed=1)
    expected_RV = head_of(load(TargetRunner, other, ENGINE))
    split(folder)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    assert torch.equal(head_of(load(TargetRunner, folder, ENGINE)), expected_RV)
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_other_files_of_the_folder_are_ignored(folder: Path) -> None:
    expected = load(TargetRunner, folder, ENGINE)
    save_file({"norm.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    found = load(TargetRunner, folder, ENGINE)
    assert torch.equal(head_of(found), head_of(expected))


HEAD = "lm_head.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_that_repeats_its_tied_embedding_is_not_read(
    folder: Path, dtype: torch.dtype
) -> None:
    expected = load(TargetRunner, folder, ENGINE)
    change(folder, **{HEAD: load_file(folder / "model.safetensors")[EMBEDDING].to(dtype)})
    found = load(TargetRunner, folder, ENGINE)
    assert torch.equal(head_of(found), head_of(expected))


@pytest.mark.parametrize(
    "head", [torch.zeros(257, 32), torch.zeros(250, 32), torch.zeros(257, 32).char()]
)
def test_a_head_that_is_not_its_tied_embedding_is_refused(folder: Path, head: Tensor) -> None:
    change(folder, **{HEAD: head})
    with pytest.raises(WeightsError, match=rf"safetensors: tensor {HEAD} is not equal to .*false"):
        load(TargetRunner, folder, ENGINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_compares_its_part_of_a_tied_head(folder: Path, rank: int) -> None:
    model = ModelConfig.from_folder(folder)
    shard = Shard(rank, 2)
    ids = ids_of(model, shard)
    head = load_file(folder / "model.safetensors")[EMBEDDING].clone()

    def open_part() -> None:
        open_weights(folder, model, torch.float32, "cpu", lambda _fraction: None, shard)

    change(folder, **{HEAD: head.clone()})
    open_part()
    head[ids.start] += 1
    change(folder, **{HEAD: head})
    with pytest.raises(WeightsError, match=f"{HEAD} is not equal"):
        open_part()


def with_a(number: float, rows: int) -> Tensor:
    weight = torch.ones((rows, 32))
    weight[3, 5] = number
    return weight


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (NAME, None, rf"model: tensor {NAME} is missing"),
        ("extra", torch.ones(1), r"model\.safetensors: tensor extra belongs to no layer"),
        (NAME, torch.ones(64, 31), rf"tensor {NAME} has shape \[64, 31\], not \[64, 32\]"),
        (NAME, torch.ones(64, 32).char(), rf"tensor {NAME} is stored as I8"),
        (NAME, with_a(torch.nan, 64), rf"safetensors: tensor {NAME} contains NaN or infinity"),
        (NAME, with_a(torch.inf, 64), rf"tensor {NAME} contains NaN or infinity"),
        (NAME, with_a(-torch.inf, 64), rf"tensor {NAME} contains NaN or infinity"),
        # Every row of logits reads a tied embedding.
        (EMBEDDING, with_a(torch.nan, 257), r"embed_tokens\.weight contains NaN"),
    ],
)
def test_a_tensor_that_is_missing_surplus_or_wrong_is_named(
    folder: Path, name: str, tensor: Tensor | None, problem: str
) -> None:
    change(folder, **{name: tensor})
    with pytest.raises(WeightsError, match=problem):
        load(TargetRunner, folder, ENGINE)


@pytest.mark.parametrize("kept", [0, 4, 300, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors: truncated"):
        load(TargetRunner, folder, ENGINE)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors"):
        load(TargetRunner, folder, ENGINE)


def test_an_index_that_names_a_missing_file_is_refused(folder: Path) -> None:
    files = split(folder)
    (folder / files[NAME]).unlink()
    with pytest.raises(WeightsError, match=rf"{files[NAME]} is missing; .*index\.json names it"):
        load(TargetRunner, folder, ENGINE)


def test_an_index_that_misplaces_a_tensor_is_refused(folder: Path) -> None:
    files = split(folder)
    other = next(file for file in files.values() if file != files[NAME])
    write_index(folder, files | {NAME: other})
    with pytest.raises(WeightsError, match=rf"{other}: the index places tensor {NAME} here"):
        load(TargetRunner, folder, ENGINE)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_invalid_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="not a checkpoint index"):
        load(TargetRunner, folder, ENGINE)


@pytest.mark.parametrize("path", ["../other.safetensors", "{}/other.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, path: str) -> None:
    files = split(folder)
    (folder / files[NAME]).rename(folder.parent / "other.safetensors")
    write_index(folder, files | {NAME: path.format(folder.parent)})
    with pytest.raises(WeightsError, match=rf"the file of tensor {NAME} is '.*no name of a file"):
        weight_files(folder)


@pytest.mark.parametrize("file", ["", ".", "a/", "./a", None, ["a"]])
def test_an_index_with_a_value_that_is_no_name_is_refused(folder: Path, file: object) -> None:
    split(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NAME: file}}))
    with pytest.raises(WeightsError, match=r"index\.json: not a checkpoint index: .*no name of a"):
        weight_files(folder)


@pytest.mark.parametrize("file", ["n" * 300, "..", "folder", "pipe", "dangling", "a\0b"])
def test_an_index_that_names_no_regular_file_is_refused(folder: Path, file: str) -> None:
    files = split(folder)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to(folder / "gone")
    write_index(folder, files | {NAME: file})
    with pytest.raises(WeightsError, match=rf"{file} is missing; .*index\.json names it"):
        weight_files(folder)


@pytest.mark.parametrize("num_files", [1, 2])
def test_files_of_a_checkpoint_can_be_links(folder: Path, num_files: int) -> None:
    expected = Checkpoint(folder).read(NAME)
    files = {"model.safetensors"} if num_files == 1 else set(split(folder).values())
    (folder.parent / "blobs").mkdir()
    for number, file in enumerate(sorted(files)):
        blob = (folder / file).rename(folder.parent / "blobs" / str(number))
        (folder / file).symlink_to(blob)
    assert torch.equal(Checkpoint(folder).read(NAME), expected)
    assert {path.name for path in weight_files(folder)} == files


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling"])
def test_weights_that_are_no_file_are_refused(folder: Path, name: str, kind: str) -> None:
    (folder / "model.safetensors").unlink()
    path = folder / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder / "gone")
    with pytest.raises(WeightsError, match=f"{name} is not a file, or it is a link"):
        weight_files(folder)


def checkpoint(folder: Path, *dtypes: torch.dtype) -> tuple[Checkpoint, list[Tensor]]:
    """Tensors "0", "1" and so on, one behind the other in their file if the dtypes are the same."""
    tensors = [torch.randn(size, 64).to(dtype) for size, dtype in enumerate(dtypes, start=3)]
    folder.mkdir()
    save_file({str(name): each for name, each in enumerate(tensors)}, folder / "model.safetensors")
    return Checkpoint(folder), tensors


@pytest.mark.parametrize("dtype", STORED_DTYPES.values())
def test_tensors_that_lie_behind_one_another_are_read_without_a_copy(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    stored, tensors = checkpoint(tmp_path / "model", dtype, dtype, dtype)
    both = stored.read("0", "1")
    assert torch.equal(both, torch.cat(tensors[:2]))
    assert both.data_ptr() == stored.read("0").data_ptr()


def test_other_tensors_are_stacked_in_the_order_of_their_names(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path / "model", torch.bfloat16, torch.bfloat16, torch.float32)
    for names in ((1, 0), (0, 2), (2, 1)):
        found = stored.read(*map(str, names))
        assert torch.equal(found, torch.cat([tensors[each] for each in names])), names


def test_tensors_of_several_files_are_stacked(folder: Path) -> None:
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
    tensors = load_file(folder / "model.safetensors")
    files = split(folder)
    write_index(folder, files | {names[1]: "third.safetensors"})
    save_file({names[1]: tensors[names[1]].clone()}, folder / "third.safetensors")
    assert torch.equal(Checkpoint(folder).read(*names), torch.cat([tensors[n] for n in names]))


def test_freed_tensors_are_read_again(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path / "model", torch.float32)
    found = stored.read("0")
    assert torch.equal(found, tensors[0])
    stored.free_pages()
    assert torch.equal(found, tensors[0])
