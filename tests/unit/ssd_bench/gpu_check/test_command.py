"""The command of the GPU check: what it needs, its exit codes and its files."""

import json
from pathlib import Path

import pytest

from ssd_bench.gpu_check import supervisor
from ssd_bench.gpu_check.__main__ import main, missing_packages
from ssd_bench.gpu_check.outcome import Environment, Outcome


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """Outcomes by name, in place of processes."""
    found: dict[str, Outcome] = {}

    def run(name: str, environment: Environment, limit_seconds: float) -> Outcome:
        return found.get(name, Outcome(status="passed", figures={"speed_ms": 1.5}))

    monkeypatch.setattr(supervisor, "run_in_child", run)
    return found


def test_a_missing_package_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing_packages({"json": "json", "no_such_module": "no-such-package"}) == [
        "no-such-package"
    ]
    monkeypatch.setattr("ssd_bench.gpu_check.__main__.missing_packages", lambda: ["grpcio"])
    assert main([]) == 2
    assert "missing packages: grpcio; on a machine with a network" in capsys.readouterr().err
    assert main(["--missing"]) == 0
    assert capsys.readouterr().out == "grpcio\n"


def test_without_a_gpu_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: torch finds no GPU: gpu-check needs an NVIDIA GPU")
    assert "--on cpu" in error


def test_results_are_printed_and_written(
    outcomes: dict[str, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu_check.json"
    arguments = ["--on", "cpu", "--output", str(output), "--only", "machine", "peer vllm"]
    outcomes["peer vllm"] = Outcome(status="skipped", reason="the package vllm is not installed")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "machine: passed" in shown
    assert "speed_ms" in shown
    document = json.loads(output.read_text())
    assert document["device"] == "cpu"
    assert document["checks"]["machine"]["figures"] == {"speed_ms": 1.5}
    assert document["checks"]["peer vllm"]["reason"] == "the package vllm is not installed"


def test_a_wrong_result_ends_the_command_with_1(
    outcomes: dict[str, Outcome], tmp_path: Path
) -> None:
    outcomes["machine"] = Outcome(status="failed", reason="wrong")
    output = str(tmp_path / "gpu_check.json")
    assert main(["--on", "cpu", "--output", output, "--only", "machine"]) == 1


@pytest.mark.parametrize(
    ("flag", "path"), [("--scratch", "/nonexistent"), ("--output", "/nonexistent/result.json")]
)
def test_a_folder_that_does_not_exist_is_refused_before_the_first_check(
    flag: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--on", "cpu", "--only", "machine", flag, path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {flag} {path}: ")
