"""Data sets of benchmarks: JSONL files, their errors, and the files that stand in for them."""

import json
from pathlib import Path

import pytest

from ssd.errors import SettingsError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.text.tokenizer import load_tokenizer
from ssd_bench.__main__ import main
from ssd_bench.peers.command import _batches
from ssd_bench.peers.measure import Case
from ssd_bench.prompts import data_sets, encoded, read_texts
from ssd_bench.stand_ins import COUNT


def test_a_file_has_the_fields_of_the_four_sets(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    names = ("text", "prompt", "question", "instruction")
    file.write_text("\n\n".join(json.dumps({name: f"of {name}", "id": 1}) for name in names))
    assert read_texts(file, 9, num_chars=1) == [f"of {name}" for name in names]
    assert read_texts(file, 2, num_chars=1) == ["of text", "of prompt"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON: maximum recursion depth exceeded", id="deep"),
        ('{"text": "\\ud800"}', "no text: 'utf-8' codec can't encode character '\\ud800'"),
        ("[]", "needs a string in one of the fields text, prompt"),
        ('{"answer": "4"}', "needs a string in one of the fields text, prompt"),
        ('{"text": " "}', "the text is empty"),
        ('{"text": ["a"]}', "needs a string in one of the fields text, prompt"),
    ],
)
def test_a_bad_line_is_one_line_with_file_and_line(
    line: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "good"}}\n\n{line}\n')
    assert main(["--data", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}, line 3: {problem}")
    assert error.count("\n") == 1


def test_a_file_that_is_missing_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file, or a folder without"):
        data_sets([str(tmp_path)])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SettingsError, match="has no lines"):
        read_texts(tmp_path / "empty.jsonl", 1, num_chars=1)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="line 1: not JSON: 'utf-8' codec"):
        read_texts(tmp_path / "bytes.jsonl", 1, num_chars=1)


def test_a_folder_is_all_its_files_beside_the_demo(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    assert list(data_sets(["demo", str(tmp_path)])) == ["demo", "a", "b"]
    with pytest.raises(SettingsError, match="two data sets have the name a"):
        data_sets([str(tmp_path), str(tmp_path / "a.jsonl")])


def test_prompts_are_cut_to_the_cap(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny_folder(tmp_path))
    text = "def f(x):\n    return x\n"
    (found,) = encoded({"a": [text]}, tokenizer, 5)["a"]
    assert found == tuple(tokenizer.encode(text)[:5])


def test_prompts_of_a_batch_of_peers_have_one_length_and_occur_once(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(
        "".join(json.dumps({"text": "x" * size}) + "\n" for size in (9, 3, 30, 5, 6, 7))
    )
    case = Case(batch=2, data="some")
    found = _batches([case], file, lambda text: range(len(text)), (2, 8, 16))[case]
    assert [[len(prompt) for prompt in batch["prompts"]] for batch in found] == [
        [3, 3],
        [5, 5],
        [6, 6],
    ]
    with pytest.raises(SettingsError, match="fewer than 8 prompts"):
        _batches([case], file, lambda text: range(len(text)), (3, 8, 16))


def test_the_stand_ins_are_four_files_that_are_the_same_every_time(tmp_path: Path) -> None:
    texts = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert main(["data", "--output", str(folder)]) == 0
        texts.append({file.stem: file.read_text() for file in folder.iterdir()})
        for name, file in data_sets([str(folder)]).items():
            found = read_texts(file, 1000, num_chars=1)
            assert len(found) == len(set(found)) == COUNT, name
    assert texts[0] == texts[1]
    assert sorted(texts[0]) == ["chat", "code", "maths", "summaries"]
