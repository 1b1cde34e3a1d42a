"""The models of a benchmark, and what it refuses."""

import json
from pathlib import Path

import pytest

from ssd import demo, model_source
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench.__main__ import main, widened


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--widen-target", "3"], "--widen-target 3: choose one of 1, 2, 4, 8"),
        (["--widen-draft", "0"], "--widen-draft 0: choose one of 1, 2, 4, 8"),
        (["--batch", "x"], "--batch 'x': numbers with commas are wanted"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_usage_is_one_line_with_the_programs_name_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, "ssd bench") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.endswith("(see: ssd bench --help)\n")


@pytest.mark.parametrize("config", ["", "[]", '{"model_type": "gpt2"}'])
def test_a_model_that_cannot_be_widened_is_one_line_and_exit_code_2(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert main(["--target", str(tmp_path), "--widen-target", "2"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("error: ")
    assert len(said.splitlines()) == 2


def test_a_wider_demo_model_is_measured_at_its_own_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "_WIDENED", tmp_path / "cache")

    def width(folder: Path) -> int:
        return int(json.loads((folder / "config.json").read_text())["hidden_size"])

    plain = width(demo.folder("draft"))
    assert width(widened("demo://draft", 1, tmp_path)) == plain
    assert width(widened("demo://draft?widen=2", 1, tmp_path)) == 2 * plain
    assert width(widened("demo://draft?widen=2", 2, tmp_path)) == 4 * plain
