"""The distribution: a light base, extras for the rest, and a ``ssd`` that names a missing one.

The tests with the marker ``slow`` build the wheel and install it in an environment of their own.
``make package`` runs them.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ssd_cli import extras

BASE_MODULES = ("ssd.pool.rounds", "ssd.pool.dialer", "ssd.pool.pool", "ssd.rpc.client")
"""Entry points of clients and of other targets."""
LIGHT_MODULES = (
    *BASE_MODULES,
    *(
        f"ssd.{name}"
        for name in (
            "runtime.launch",
            "runtime.process",
            "observability.log",
            "observability.metrics",
            "rpc.server",
            "rpc.link",
        )
    ),
    *(f"ssd.v1.{name}_pb2_grpc" for name in ("generate", "speculation", "admin")),
    *(
        f"ssd.speculation.{name}"
        for name in ("table", "verification", "fan_out", "backup", "noise")
    ),
    *("ssd.speculation.controller", "ssd.speculation.speed_model"),
    *("ssd_vllm.settings", "ssd_vllm.versions", "ssd_vllm.step_control"),
)
"""Modules that the base installation imports."""
MAX_BASE_MB = 150
"""Of the base with all its dependencies. Measured: 137, of which numpy has 71, the embedded pair 31
and gRPC 19."""
HEAVY = {"torch", "openvino", "tokenizers", "llguidance", "starlette", "kopf", "typer"}

# Blocks every module that the named requirements do not install, then imports the others.
IMPORT_WITH_THE_BASE = """
import importlib, re, sys
from importlib.metadata import packages_distributions

def normal(name):
    return re.sub("[-_.]+", "-", name).lower()

modules, allowed = (each.split() for each in sys.argv[1:])
blocked = {
    module
    for module, owners in packages_distributions().items()
    if not {normal(owner) for owner in owners} & set(allowed)
}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
for module in modules:
    importlib.import_module(module)
"""
TYPING = {"typing-extensions"}
"""What requirements of the base bring and import."""


def name_of(requirement: str) -> str:
    """Distribution of a requirement, normalised."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_the_base_has_what_clients_and_other_targets_import(project: dict[str, Any]) -> None:
    base = {name_of(each) for each in project["project"]["dependencies"]}
    assert not base & HEAVY
    allowed = " ".join({*base, *TYPING, "ssd-serving"})
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_THE_BASE, " ".join(LIGHT_MODULES), allowed],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_base_has_no_version_that_the_generated_code_refuses(
    root: Path, project: dict[str, Any]
) -> None:
    stubs = root / "services/ssd/v1"
    grpcs = [each.read_text() for each in stubs.glob("*_pb2_grpc.py")]
    refused_below = {
        "grpcio": {re.findall(r"GRPC_GENERATED_VERSION = '(.+)'", each)[0] for each in grpcs},
        "protobuf": {
            re.findall(r"^# Protobuf Python Version: (.+)$", each.read_text(), re.M)[0]
            for each in stubs.glob("*_pb2.py")
        },
    }
    base = {name_of(each): each for each in project["project"]["dependencies"]}
    for name, (version,) in refused_below.items():
        assert base[name].startswith(f"{name}>={version},")


def test_the_extra_vllm_limits_no_package_of_vllm(project: dict[str, Any]) -> None:
    lines = project["project"]["optional-dependencies"]["vllm"]
    assert [line for line in lines if line != name_of(line).replace("-", "_")] == []
    assert not {name_of(line) for line in lines} & {"torch", "vllm", "llguidance"}


def test_the_command_knows_the_modules_of_each_extra(project: dict[str, Any]) -> None:
    module_of = {"huggingface-hub": "huggingface_hub", "opentelemetry-api": "opentelemetry"}
    module_of |= {"prompt-toolkit": "prompt_toolkit"}
    for extra, modules in extras.MODULES.items():
        lines = project["project"]["optional-dependencies"][extra]
        names = [name_of(line) for line in lines]
        assert {module_of.get(name, name) for name in names} == set(modules), extra


def test_a_distribution_has_the_same_bounds_in_all_extras(project: dict[str, Any]) -> None:
    settings = project["project"]
    lines = [*settings["dependencies"]]
    for extra in ("engine", "gateway", "cli", "operator", "bench", "test"):
        lines += settings["optional-dependencies"][extra]
    bounds: dict[str, set[str]] = {}
    for line in lines:
        bounds.setdefault(name_of(line), set()).add(line)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_the_page_of_the_package_has_no_relative_link(root: Path, project: dict[str, Any]) -> None:
    text = (root / project["project"]["readme"]).read_text()
    assert re.findall(r"\]\((?!https?://)", text) == []
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    assert named == project["project"]["optional-dependencies"].keys() - {
        *("test", "dev", "browser", "soak")
    }


class Environment:
    """A virtual environment of its own, with pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    def python(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("python", *arguments)

    def run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin"},
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def install(self, wheel: Path, extra: str = "") -> None:
        subprocess.run(
            [
                *(str(self.folder / "bin/python"), "-m", "pip", "install", "-q"),
                f"{wheel}[{extra}]" if extra else str(wheel),
            ],
            check=True,
            timeout=600,
        )

    def packages(self) -> set[str]:
        listed = self.python("-m", "pip", "list", "--format=freeze").stdout.split()
        return {name_of(each) for each in listed}

    def megabytes(self) -> float:
        """Size of the installed packages, without pip's."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        files = (path for path in site.rglob("*") if path.is_file() and not path.is_symlink())
        own = ("pip", "setuptools")
        sizes = (
            path.stat().st_size
            for path in files
            if not path.relative_to(site).parts[0].startswith(own)
        )
        return sum(sizes) / 1e6

    def imports(self, modules: Sequence[str]) -> None:
        ended = self.python("-c", "\n".join(f"import {module}" for module in modules))
        assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=root, check=True, timeout=300)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_installs_without_torch_and_names_missing_extras(
    wheel: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "base")
    environment.install(wheel)
    assert not environment.packages() & HEAVY
    environment.imports(LIGHT_MODULES)
    assert environment.megabytes() < MAX_BASE_MB

    ended = environment.run("ssd", "--version")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(
        r"error: \w+ is not installed: .* pip install 'ssd-serving\[cli\]'\n", ended.stderr
    )

    environment.install(wheel, "vllm")
    assert not environment.packages() & {"torch", "openvino", "llguidance", "vllm"}
    environment.imports(("ssd_vllm", "ssd.text.tokenizer"))

    environment.install(wheel, "cli")
    assert environment.run("ssd", "--version").returncode == 0
    ended = environment.run("ssd", "demo")
    wanted = (
        "error: torch is not installed: run 'make setup' in a checkout, or pip install "
        "'ssd-serving[cli,engine]'\n"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", wanted)
    ended = environment.run("ssd", "generate", "x", "--endpoint", "127.0.0.1:1", "--wait", "0")
    assert ended.returncode == 1
    assert "127.0.0.1:1" in ended.stderr
