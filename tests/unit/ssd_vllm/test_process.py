"""``python -m ssd_vllm``: what vLLM's server gets."""

import os
import runpy
import sys
from typing import Any

import pytest

from ssd import demo
from ssd.errors import ModelNotFoundError
from ssd_vllm import __main__ as process
from ssd_vllm.__main__ import SERVER, main

GATE = "--middleware=ssd_vllm.Gate"


def test_vllms_server_runs_as_the_main_module_with_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[str, list[str]]] = []

    def run_module(module: str, **_: Any) -> None:
        runs.append((module, sys.argv[1:]))

    monkeypatch.setattr(sys, "argv", ["ssd_vllm"])
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(process, "check", lambda _arguments, *, is_only_shown: is_only_shown)
    assert main(["--model=org/name", "--max-num-seqs", "8"]) == 0
    assert main(["--model=demo://target", "--port=8000"]) == 0
    assert runs == [
        (SERVER, ["--model=org/name", "--max-num-seqs", "8", GATE]),
        (SERVER, [f"--model={demo.folder('target')}", "--port=8000", GATE]),
    ]
    assert environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("given", "lines"), [({}, 0), ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, 1)], ids=["unset", "v2"]
)
def test_vllm_selects_its_model_runner_v1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, str],
    lines: int,
) -> None:
    monkeypatch.setattr(os, "environ", given)
    for _ in range(2):
        process.select_v1_runner()
        assert given == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert capsys.readouterr().err.count("runs with the model runner V1") == lines


@pytest.mark.parametrize("arguments", [["--port=x"], ["--port=8000", "--print-config"]])
def test_the_server_does_not_run_after_a_wrong_argument_or_for_its_settings(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(
        process, "check", lambda found, *, is_only_shown: 78 * ("--port=x" in found)
    )
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: pytest.fail("the server runs"))
    assert main(arguments) == (78 if "--port=x" in arguments else 0)


def test_an_embedded_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="demo://other"):
        main(["--model=demo://other"])
