"""``python -m ssd_vllm``: what vLLM's server gets."""

import runpy
import sys
from typing import Any

import pytest

from ssd import demo
from ssd.errors import ModelNotFoundError
from ssd_vllm.__main__ import SERVER, main


def test_vllms_server_runs_as_the_main_module_with_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[str, list[str]]] = []

    def run_module(module: str, **_: Any) -> None:
        runs.append((module, sys.argv[1:]))

    monkeypatch.setattr(sys, "argv", ["ssd_vllm"])
    monkeypatch.setattr(runpy, "run_module", run_module)
    assert main(["--model=org/name", "--max-num-seqs", "8"]) == 0
    assert main(["--model=demo://target", "--port=8000"]) == 0
    assert runs == [
        (SERVER, ["--model=org/name", "--max-num-seqs", "8"]),
        (SERVER, [f"--model={demo.folder('target')}", "--port=8000"]),
    ]


def test_an_embedded_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="demo://other"):
        main(["--model=demo://other"])
