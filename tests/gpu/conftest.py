"""Checks of the kernels, models and processes on a GPU, and the same with small models on a CPU.

A check is a test with the mark ``check`` and the fixture ``environment``: its variant ``cuda`` has
the mark ``gpu``, its variant ``cpu`` is part of ``make test``. It adds what it measured to the
fixture ``figures``. ``make gpu-check`` runs the checks under ``Supervisor``; without its flag
``--output``, they are ordinary tests.
"""

import signal
from pathlib import Path

import pytest
import torch
from tests.gpu.environment import CHECKS, NO_GPU, Environment, Figure
from tests.gpu.supervisor import Recorder, Supervisor

from ssd.runtime.child import end_with_parent

RECORDER = "recorder of a check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags of ``make gpu-check``."""
    group = parser.getgroup("gpu-check", "make gpu-check")
    group.addoption("--on", choices=("cuda", "cpu"), default="cuda", help="device")
    group.addoption("--only", nargs="+", metavar="CHECK", choices=[*CHECKS], help="checks")
    group.addoption("--output", type=Path, metavar="FILE", help="file for the results (JSON)")
    group.addoption("--scratch", type=Path, help="folder for random weights (up to 40 GB)")
    group.addoption("--limit", type=float, default=1500.0, help="seconds for all checks together")
    group.addoption("--outcome", type=Path, metavar="FILE", help="write the outcome of one check")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and the plugin of ``make gpu-check`` or of one of its processes."""
    config.addinivalue_line("markers", "check(name, on, is_slow): a check of make gpu-check")
    # Without a folder on the command line, this file is read after the flags.
    output, outcome = (config.getoption(name, None) for name in ("output", "outcome"))
    if outcome is not None:
        end_with_parent(signal.SIGKILL)
        config.pluginmanager.register(Recorder(outcome), RECORDER)
    elif output is not None:
        config.pluginmanager.register(Supervisor(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run checks on both devices, unless the mark names one, and other tests on the CPU."""
    if "environment" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("check")
    on = ("cpu",) if mark is None else mark.kwargs.get("on", ("cuda", "cpu"))
    slow = [pytest.mark.slow] if mark is not None and mark.kwargs.get("is_slow") else []
    marks = {"cuda": [pytest.mark.gpu], "cpu": slow}
    variants = [pytest.param(device, marks=marks[device]) for device in on]
    metafunc.parametrize("environment", variants, indirect=True)


@pytest.fixture(scope="session")
def scratch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given: Path | None = request.config.getoption("scratch", None)
    return given or tmp_path_factory.mktemp("scratch")


@pytest.fixture
def environment(request: pytest.FixtureRequest, scratch: Path) -> Environment:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return Environment(device=request.param, scratch=scratch)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> dict[str, Figure]:
    """What the check measured."""
    recorder: Recorder | None = request.config.pluginmanager.get_plugin(RECORDER)
    return {} if recorder is None else recorder.figures
