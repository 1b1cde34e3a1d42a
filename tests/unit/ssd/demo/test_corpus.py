from pathlib import Path, PurePosixPath

from ssd.demo.corpus import (
    held_out,
    held_out_modules,
    held_out_prompts,
    read_modules,
    training_modules,
)

LIBRARY_SIZE = 120


def write_library(root: Path) -> Path:
    for number in range(LIBRARY_SIZE):
        lines = [f"def function_{line}():\n    return {number}\n" for line in range(20)]
        (root / f"module_{number}.py").write_text("".join(lines), encoding="utf-8")
    return root


def test_training_and_held_out_modules_are_disjoint_and_cover_the_library(tmp_path: Path) -> None:
    root = write_library(tmp_path)
    trained = {module.path for module in training_modules(root)}
    kept = {module.path for module in held_out_modules(root)}
    assert trained.isdisjoint(kept)
    assert trained | kept == {module.path for module in read_modules(root)}
    assert len(trained | kept) == LIBRARY_SIZE
    assert 0 < len(kept) < LIBRARY_SIZE // 5


def test_the_held_out_modules_depend_only_on_their_paths() -> None:
    assert held_out(PurePosixPath("dataclasses.py"))
    assert held_out(PurePosixPath("asyncio/futures.py"))
    assert held_out(PurePosixPath("statistics.py"))
    assert not held_out(PurePosixPath("argparse.py"))
    assert not held_out(PurePosixPath("asyncio/tasks.py"))


def test_tests_tables_and_third_party_code_are_omitted(tmp_path: Path) -> None:
    for name in ("kept", "test", "json/tests", "site-packages/torch", "encodings", "pydoc_data"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file.py").write_text("pass\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "empty.py").write_text("\n", encoding="utf-8")
    assert [module.path for module in read_modules(tmp_path)] == [PurePosixPath("kept/file.py")]


def test_prompts_are_whole_lines_of_held_out_modules_and_the_same_each_time(tmp_path: Path) -> None:
    root = write_library(tmp_path)
    prompts = held_out_prompts(8, num_chars=100, root=root)
    texts = [module.text for module in held_out_modules(root)]
    assert len(prompts) == 8
    assert prompts == held_out_prompts(8, num_chars=100, root=root)
    for prompt in prompts:
        assert len(prompt) >= 100
        assert prompt.endswith("\n")
        assert any(text.startswith(prompt) or "\n" + prompt in text for text in texts)


def test_the_first_prompts_come_from_different_modules(tmp_path: Path) -> None:
    root = write_library(tmp_path)
    number_held_out = len(held_out_modules(root))
    prompts = held_out_prompts(number_held_out, num_chars=100, root=root)
    assert len(set(prompts)) == number_held_out


def test_the_number_of_prompts_is_limited_by_the_held_out_text(tmp_path: Path) -> None:
    root = write_library(tmp_path)
    assert 0 < len(held_out_prompts(10_000, num_chars=100, root=root)) < 10_000
    assert held_out_prompts(0, root=root) == []
