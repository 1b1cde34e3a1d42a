"""The folder of a run: where it can be, who uses it, and what is left in it."""

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from ssd.demo import widen
from ssd_distill import distillation, run_folder
from ssd_distill.__main__ import main
from ssd_distill.corpus import Corpus, read_corpus


@pytest.mark.parametrize("name", [".", "link", "killed"])
def test_a_run_can_have_any_free_folder(
    name: str,
    flags_of_pair: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    (place / "killed" / run_folder.WORK).mkdir(parents=True)
    if name == ".":
        monkeypatch.chdir(place / "killed")
        (place / "killed" / run_folder.WORK).rmdir()
    else:
        monkeypatch.chdir(place)
        (place / "link").symlink_to(place / "empty")
        (place / "empty").mkdir()
    there = sorted(place.rglob("*"))
    assert main([*flags_of_pair, "--output", name, "--data", "nowhere"]) == 2
    assert set(place.rglob("*")) <= set(there), "a wrong name of a text is no run"
    assert main([*flags_of_pair, "--output", name]) == 0
    names = {"config.json", "tokenizer.json", "model.safetensors", run_folder.RECORD}
    assert names <= {each.name for each in Path(name).iterdir()}
    assert not (Path(name) / run_folder.WORK).exists()


def test_a_second_process_does_not_use_the_same_folder(
    flags_of_pair: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [*flags_of_pair, "--output", str(tmp_path / "output")]
    codes = []

    def read_and_start_again(*arguments: Any, **more: Any) -> Corpus:
        with monkeypatch.context() as patch:
            patch.setattr(distillation, "read_corpus", read_corpus)
            codes.append(main(flags))
        return read_corpus(*arguments, **more)

    monkeypatch.setattr(distillation, "read_corpus", read_and_start_again)
    assert main(flags) == 0
    assert codes == [2]
    error = next(line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert "output: another run writes to" in error
    assert main(flags) == 0, "the folder of a complete run is free"


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    flags_of_pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: set[int] = set()
    replaced: list[str] = []
    replace = Path.replace

    def replace_written(new: Path, file: Path) -> Path:
        assert new.stat().st_ino in on_disk
        replaced.append(file.name)
        return replace(new, file)

    monkeypatch.setattr(os, "fsync", lambda number: on_disk.add(os.fstat(number).st_ino))
    monkeypatch.setattr(Path, "replace", replace_written)
    assert main([*flags_of_pair, "--output", str(tmp_path / "output")]) == 0
    names = {"model.safetensors", "state.safetensors", "config.json", "tokenizer.json"}
    assert names | {run_folder.RECORD} <= set(replaced)


def test_a_run_that_ends_between_its_first_files_is_begun_again(
    flags_of_pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, whole = tmp_path / "output", tmp_path / "whole"
    replace, replaced = Path.replace, count(1)

    def replace_some(new: Path, file: Path) -> Path:
        if file.parent == output and next(replaced) == 2:
            raise KeyboardInterrupt
        return replace(new, file)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_some)
        assert main([*flags_of_pair, "--output", str(output)]) == 130
    assert not (output / "model.safetensors").exists()
    for folder in (output, whole):
        assert main([*flags_of_pair, "--output", str(folder)]) == 0
    for file in whole.iterdir():
        if file.name != run_folder.RECORD:
            assert (output / file.name).read_bytes() == file.read_bytes()


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_checkpoint(
    flags: list[str],
    draft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save_file(_tensors: object, file: Path, **_options: object) -> None:
        file.write_text("a part")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(widen, "save_file", save_file)
    output = tmp_path / "output"
    assert main([*flags, "--draft", str(draft), "--output", str(output)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("written.new: I/O error: No space left on device")
    assert not (output / run_folder.WORK).exists()


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_record_is_refused_by_name(
    content: str, flags: list[str], draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / run_folder.RECORD).write_text(content)
    assert main([*flags, "--draft", str(draft), "--output", str(tmp_path / "output")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "distill.json is" in error
