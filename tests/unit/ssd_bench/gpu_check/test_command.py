"""The command of the GPU check: what it needs, its exit codes and its files."""

import json
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--limit", "x"], "argument --limit: invalid float value: 'x'"),
        (["--ony", "cpu"], "unrecognized arguments: --ony cpu"),
    ],
)
def test_a_wrong_argument_is_one_line_with_a_hint(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert problem in line
    assert line.endswith("(see: make gpu-check GPU_CHECK_ARGS=--help)")


def test_help_is_shown_while_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ssd_bench.gpu_check.__main__.missing_packages", lambda: ["grpcio"])
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--scratch" in capsys.readouterr().out


@pytest.mark.parametrize("is_ctrl_c", [True, False])
def test_results_are_written_after_each_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_ctrl_c: bool,
) -> None:
    output = tmp_path / "gpu_check.json"
    documents = []

    def run(name: str, environment: Environment, limit_seconds: float) -> Outcome:
        if name == "graphs":
            documents.append(json.loads(output.read_text()))
            if is_ctrl_c:
                raise KeyboardInterrupt
        return Outcome(status="passed")

    monkeypatch.setattr(supervisor, "run_in_child", run)
    names = ["machine", "graphs", "peer vllm"]
    code = main(["--on", "cpu", "--output", str(output), "--only", *names])
    assert list(documents[0]["checks"]) == ["machine"]
    assert documents[0]["is_complete"] is False
    written = json.loads(output.read_text())
    assert list(written["checks"]) == (["machine"] if is_ctrl_c else names)
    assert written["is_complete"] is not is_ctrl_c
    assert ("interrupted after 1 of 3 checks" in capsys.readouterr().out) is is_ctrl_c
    assert code == (130 if is_ctrl_c else 0)


# Blocks the dependencies of the product that REQUIRED does not name, then imports the modules.
IMPORTS_WITH_REQUIRED_PACKAGES = """
import importlib, pkgutil, re, sys
from importlib.metadata import packages_distributions, requires
from ssd_bench.gpu_check.__main__ import REQUIRED

def normal(requirement):
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", requirement)[0]).lower()

products = re.compile("extra == .(engine|gateway|cli).")
needed = {
    normal(each)
    for each in requires("ssd-serving")
    if "extra ==" not in each or products.search(each)
}
missing = needed - {normal(each) for each in REQUIRED.values()}
blocked = {
    module
    for module, owners in packages_distributions().items()
    if {normal(owner) for owner in owners} & missing
}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not in REQUIRED", name=name)

sys.meta_path.insert(0, Finder())
for package in ("ssd_target", "ssd_draft", "ssd_bench.gpu_check"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
"""


def test_the_processes_and_checks_import_only_the_packages_that_are_named() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_WITH_REQUIRED_PACKAGES], check=True, timeout=120)
