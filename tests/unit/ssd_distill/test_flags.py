"""Flags of ``ssd distill`` that are refused before anything is loaded."""

from pathlib import Path

import pytest

from ssd_distill.__main__ import main


@pytest.mark.parametrize("flag", ["--target", "--draft"])
def test_a_name_of_no_model_is_refused_with_its_flag(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"--target": "demo://target", "--draft": "demo://draft"} | {flag: "/nope"}
    words = [word for entry in pair.items() for word in entry]
    assert main([*words, "--data", "demo://corpus", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} /nope: there is no such folder")
