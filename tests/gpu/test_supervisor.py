"""``make gpu-check``: processes of checks, exit codes, the file of results."""

import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.gpu import supervisor
from tests.gpu.__main__ import FOLDER, main
from tests.gpu.environment import CHECKS, Outcome
from tests.gpu.packages import ADDED, REQUIRED, missing_requirements, requirements
from tests.gpu.supervisor import Recorder, Supervisor, outcomes, run_apart
from tests.gpu.test_attention import FLEX_CASES

ROOT = FOLDER.parents[1]
PYTHON = ("env", "PYTHONPATH=services", "CUDA_VISIBLE_DEVICES=", sys.executable)


def options(tmp_path: Path, **changed: object) -> Any:
    """Return the configuration of a run on the CPU, as far as the supervisor reads it."""
    own = {"output": tmp_path / "gpu_check.json", "scratch": tmp_path, "on": "cpu"}
    own |= {"limit": 60.0, "only": None}
    return SimpleNamespace(option=SimpleNamespace(**own | changed), inipath="gpu_check.ini")


def run_check(
    configuration: Any, name: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Run one check, which has this outcome; return the number of checks that failed."""
    monkeypatch.setattr(supervisor, "run_apart", lambda *_arguments: outcome)
    monkeypatch.setattr(supervisor, "command_of", lambda *_arguments: [])
    mark = SimpleNamespace(args=(name,))
    session: Any = SimpleNamespace(
        testsfailed=0, items=[SimpleNamespace(get_closest_marker=lambda _name: mark)]
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert Supervisor(configuration).pytest_runtestloop(session)
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(session.testsfailed)


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_results_are_printed_and_written(
    status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(status=status, figures={"copy_gb_per_second": 9.5})
    num_failed = run_check(options(tmp_path), "machine", outcome, monkeypatch)
    assert num_failed == (status == "failed")
    shown = capsys.readouterr().out
    assert shown.startswith(f"machine: {status}")
    assert "not measured" in shown
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert (document["device"], document["is_complete"]) == ("cpu", True)
    assert document["checks"]["machine"]["figures"] == {"copy_gb_per_second": 9.5}
    assert len(document["targets"]) > 0


def test_a_run_of_some_checks_keeps_the_results_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(on: str, only: list[str] | None, status: Any = "passed") -> dict[str, str]:
        configuration = options(tmp_path, on=on, only=only)
        (name,) = only or ["machine"]
        run_check(configuration, name, Outcome(status=status), monkeypatch)
        document = json.loads(configuration.option.output.read_text())
        return {name: each["status"] for name, each in document["checks"].items()}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert checks("cuda", ["logits of llama"]) == {"logits of llama": "passed"}
    both = {"machine": "failed", "logits of llama": "passed"}
    assert checks("cuda", ["machine"], "failed") == both
    assert checks("cuda", ["machine"]) == both | {"machine": "passed"}
    assert checks("cpu", ["machine"]) == {"machine": "passed"}
    assert checks("cpu", ["logits of llama"]).keys() == both.keys()
    assert checks("cpu", None) == {"machine": "passed"}


@pytest.mark.parametrize("contents", ["", "[]", '{"device": "cpu", "checks": {"machine": 1}}'])
def test_a_file_with_other_contents_is_not_replaced_by_some_checks(
    contents: str, tmp_path: Path
) -> None:
    (tmp_path / "gpu_check.json").write_text(contents)
    with pytest.raises(pytest.UsageError, match="has no results of this command; remove it"):
        Supervisor(options(tmp_path, only=["machine"]))


def test_without_a_gpu_nothing_runs_and_one_line_gives_the_reason(tmp_path: Path) -> None:
    output = tmp_path / "gpu_check.json"
    command = [*PYTHON, "-m", "tests.gpu", "--output", str(output)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    shown = ended.stdout + ended.stderr
    assert ended.returncode == 4
    assert shown.startswith("ERROR: torch finds no GPU: gpu-check needs an NVIDIA GPU")
    assert len(shown.strip().splitlines()) == 1
    assert not output.exists()


@pytest.mark.parametrize("flag", ["output", "scratch"])
def test_a_folder_that_cannot_be_written_is_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=f"--{flag}: the folder /nowhere.* cannot be"):
        Supervisor(options(tmp_path, **{flag: Path("/nowhere/file")}))


def test_a_missing_package_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = requirements()
    assert missing_requirements({"rich": "rich", "no_such_module": "grpcio"}) == [bounds["grpcio"]]
    monkeypatch.setattr("tests.gpu.__main__.missing_requirements", lambda: ["grpcio>=1.85.1,<2"])
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert "missing packages: grpcio>=1.85.1,<2\n" in shown
    assert "pip download --only-binary :all: -d wheels 'grpcio>=1.85.1,<2'\n" in shown
    assert main(["--missing"]) == 0
    assert capsys.readouterr().out == "grpcio>=1.85.1,<2\n"


def test_each_required_package_has_the_bounds_of_the_product() -> None:
    bounds = requirements()
    assert [each for each in REQUIRED.values() if ">=" not in bounds[each]] == []


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ("1.85.0", ["grpcio>=1.85.1,<2"]),
        ("1.9.1", ["grpcio>=1.85.1,<2"]),
        ("1.85.1", []),
        ("1.86.0rc1", []),
    ],
)
def test_a_package_below_its_bound_is_missing(
    installed: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {"grpcio": "grpcio>=1.85.1,<2"}
    monkeypatch.setattr("tests.gpu.packages.requirements", lambda: bounds)
    monkeypatch.setattr("tests.gpu.packages.version", lambda _distribution: installed)
    assert missing_requirements({"grpc": "grpcio"}) == missing


def test_a_module_of_unknown_version_is_missing_and_torch_has_any_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = requirements() | {"no-such-package": "no-such-package>=1"}
    monkeypatch.setattr("tests.gpu.packages.requirements", lambda: bounds)
    assert missing_requirements({"json": "no-such-package"}) == ["no-such-package>=1"]
    monkeypatch.setattr("tests.gpu.packages.version", lambda _distribution: "2.1.0")
    assert missing_requirements({"torch": "torch"}) == []


def test_the_packages_that_a_machine_may_lack_are_printed_with_their_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--added"]) == 0
    bounds = requirements()
    assert capsys.readouterr().out.splitlines() == [bounds[each] for each in ADDED.values()]


WRITES = "import sys; open(sys.argv[1], 'w').write('{\"status\": \"passed\"}')"
MEASURED = Outcome(status="timed out", figures={"verify_1_ms": 4.2})
MEASURES = f"printf '{json.dumps(asdict(MEASURED))}' > $0; "


@pytest.mark.parametrize(
    ("code", "seconds", "found"),
    [
        (WRITES, 60.0, Outcome(status="passed")),
        ("{}['x']", 60.0, Outcome(status="failed", reason="ended with 1: KeyError: 'x'")),
        (
            "import threading; threading.Event().wait(100)",
            0.2,
            Outcome(status="timed out", reason="no result within 0 s; --limit gives all more time"),
        ),
    ],
)
def test_a_crash_or_a_hang_ends_one_check(code: str, seconds: float, found: Outcome) -> None:
    assert run_apart([sys.executable, "-c", code], seconds) == found


@pytest.mark.parametrize(
    ("code", "seconds", "status", "reason"),
    [
        ("sleep 100", 2.0, "timed out", "no result within 2 s; --limit gives all more time"),
        ("echo no memory; exit 3", 60.0, "failed", "ended with 3: no memory"),
    ],
)
def test_a_check_that_is_ended_keeps_the_figures_that_it_measured(
    code: str, seconds: float, status: Any, reason: str
) -> None:
    found = run_apart(["sh", "-c", MEASURES + code], seconds)
    assert found == replace(MEASURED, status=status, reason=reason)


def test_each_figure_is_written_at_once_and_the_result_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "outcome.json")

    def written() -> tuple[str, object]:
        document = json.loads((tmp_path / "outcome.json").read_text())
        return document["status"], document["figures"]

    def report(when: str, outcome: str = "passed") -> None:
        recorder.pytest_runtest_logreport(
            cast("Any", SimpleNamespace(when=when, outcome=outcome, longrepr="wrong logits"))
        )

    report("setup")
    recorder.figures["verify_1_ms"] = 4.2
    assert written() == ("timed out", {"verify_1_ms": 4.2})
    recorder.figures |= {"verify_2_ms": 4.3}
    both = {"verify_1_ms": 4.2, "verify_2_ms": 4.3}
    assert written() == ("timed out", both)
    report("call")
    report("teardown")
    assert written() == ("passed", both)
    report("call", "failed")
    report("teardown")
    assert written() == ("failed", both)


def of_each(
    monkeypatch: pytest.MonkeyPatch, limit_seconds: float, found: Outcome
) -> list[tuple[str, str, float]]:
    """Run one check of the product and one of a peer; return status, reason and seconds of both."""
    limits = []

    def run(_command: object, seconds: float) -> Outcome:
        limits.append(seconds)
        return found

    monkeypatch.setattr(supervisor, "CHECKS", {"own": 10.0, "peer x": 10.0})
    monkeypatch.setattr(supervisor, "command_of", lambda *_arguments: [])
    monkeypatch.setattr(supervisor, "run_apart", run)
    monkeypatch.setattr(supervisor, "monotonic", lambda: 100.0)
    items: dict[str, Any] = {"own": None, "peer x": None}
    seen = [each for _, each in outcomes(items, limit_seconds, Path())]
    limits += [0.0] * (len(seen) - len(limits))
    return [(each.status, each.reason, limit) for each, limit in zip(seen, limits, strict=True)]


@pytest.mark.parametrize("status", ["failed", "timed out"])
def test_a_peer_that_fails_is_skipped_and_has_the_time_that_others_left(
    status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first check ended at once here: its time is that of the second one too.
    assert of_each(monkeypatch, 60.0, Outcome(status=status, reason="broken")) == [
        (status, "broken", 30.0),
        ("skipped", f"it {status}: broken", 60.0),
    ]


NUM_KERNELS = {
    "attention flex": len(FLEX_CASES),
    "bits of flex": 2,
    "graphs": 9,
    "tokens of the embedded pair": 11,
    "passes of llama": 7,
    "logits of llama": 2,
    "tokens of llama": 11,
}
"""Shapes of attention that a check compiles."""
WEIGHTS_SECONDS = {"passes of llama": 30, "logits of llama": 15, "tokens of llama": 15}
"""The first one writes 19 GB of random weights for all checks of a command; each reads them."""
KERNEL_SECONDS, START_SECONDS = 7, 15


def test_the_two_commands_of_a_short_loan_leave_each_check_the_time_to_compile() -> None:
    text = (ROOT / "docs/gpus.md").read_text()
    commands = re.findall(r"GPU_CHECK_ARGS='--limit (\d+) --only (.+)'$", text, re.M)
    assert sum(int(limit) for limit, _ in commands) <= 700
    chosen = [shlex.split(names) for _, names in commands]
    first = [name for name in CHECKS if name != "attention flash_attn"]
    assert [name for names in chosen for name in names] == first[: len(NUM_KERNELS) + 1]
    for (limit, _), names in zip(commands, chosen, strict=True):
        share = int(limit) / sum(CHECKS[name] for name in names)
        short = {
            name: share * CHECKS[name]
            for name in names
            if share * CHECKS[name]
            < START_SECONDS
            + KERNEL_SECONDS * NUM_KERNELS.get(name, 0)
            + WEIGHTS_SECONDS.get(name, 0)
        }
        assert short == {}


def test_checks_without_time_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its part of the 1 s of all checks is under a second"
    own, _ = of_each(monkeypatch, 1.0, Outcome(status="passed"))
    assert own[:2] == ("skipped", reason)


def test_results_are_written_after_each_check_and_before_ctrl_c_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu_check.json"
    command = [*PYTHON, "-m", "tests.gpu", "--on", "cpu", "--output", str(output)]
    command += ["--only", "tokens of the embedded pair", "machine"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "copy_gb_per_second" in line:
                break
        # Of the next check, whose processes take seconds to start.
        process.send_signal(signal.SIGTERM)
        shown = process.stdout.read()
    document = json.loads(output.read_text())
    assert (list(document["checks"]), document["is_complete"]) == (["machine"], False)
    assert document["checks"]["machine"]["status"] == "passed"
    assert document["checks"]["machine"]["figures"]["copy_gb_per_second"] > 0
    assert "interrupted after 1 of 2 checks" in shown
    assert process.returncode == 130


# Blocks the dependencies of the product that REQUIRED does not name, then imports the modules.
IMPORTS_WITH_REQUIRED_PACKAGES = """
import importlib, pkgutil, re, sys
from importlib.metadata import packages_distributions, requires
from tests.gpu.__main__ import FOLDER
from tests.gpu.packages import REQUIRED

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
for package in ("ssd_target", "ssd_draft"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
for file in FOLDER.glob("*.py"):
    if file.stem not in ("test_supervisor", "__main__"):
        importlib.import_module(f"tests.gpu.{file.stem}")
"""


def test_the_processes_and_checks_import_only_the_packages_that_are_named() -> None:
    command = [*PYTHON, "-c", IMPORTS_WITH_REQUIRED_PACKAGES]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
