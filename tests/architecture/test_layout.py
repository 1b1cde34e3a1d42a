import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import ssd

ROOT_NAMES = {
    ".ci",
    ".dockerignore",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "charts",
    "constraints.txt",
    "operator",
    "protos",
    "pyproject.toml",
    "services",
    "tests",
    "tools",
}
VERBS = [
    "help",
    "setup",
    "run",
    "test",
    "check",
    "format",
    "protos",
    "exactness",
    "mutants",
    "bench",
    "e2e",
    "e2e-full",
    "images",
]
MAX_LINES = 500
LONGER_FILES: dict[str, str] = {}
"""Path to the reason; a file that has become short again leaves the list."""
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_fit_on_a_few_screens(root: Path, handwritten: list[Path]) -> None:
    long = {path.as_posix() for path in handwritten if num_lines(root / path) > MAX_LINES}
    assert long == set(LONGER_FILES)


def test_the_usual_file_is_short(root: Path, handwritten: list[Path]) -> None:
    sizes = [num_lines(root / path) for path in handwritten if path.parts[0] == "services"]
    assert statistics.median(sizes) <= 160


def test_a_module_is_named_after_what_it_holds(handwritten: list[Path]) -> None:
    assert [path for path in handwritten if NAMELESS & set(path.with_suffix("").parts)] == []


def test_the_root_holds_the_agreed_names_and_no_other(root_names: set[str]) -> None:
    assert root_names == ROOT_NAMES


def test_the_makefile_has_the_agreed_verbs_and_explains_each(root: Path) -> None:
    text = (root / "Makefile").read_text()
    assert re.findall(r"^([a-z0-9-]+):.*## \S", text, re.MULTILINE) == VERBS
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony.split() == VERBS


def test_every_package_is_in_the_wheel_and_in_the_contracts(
    project: dict[str, Any], packages: set[str]
) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(wheel) == packages
    names = {path.rpartition("/")[2] for path in packages}
    contracts = project["tool"]["importlinter"]
    assert set(contracts["root_packages"]) == names
    (processes,) = [
        contract for contract in contracts["contracts"] if contract["name"].startswith("processes")
    ]
    assert set(re.findall(r"\w+", " ".join(processes["layers"]))) == names


def test_every_package_explains_itself(root: Path, handwritten: list[Path]) -> None:
    for path in handwritten:
        if path.name == "__init__.py":
            assert (root / path).read_text().startswith('"""'), path


def test_operator_is_an_import_root_and_hides_nothing(root: Path) -> None:
    assert not (root / "operator" / "__init__.py").exists()
    assert not [path for path in (root / "tests").rglob("operator") if path.is_dir()]
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.add(2, 3))"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "5\n"


def test_tests_are_no_packages(root: Path) -> None:
    assert list((root / "tests").rglob("__init__.py")) == []


def test_unit_tests_mirror_the_packages(root: Path) -> None:
    unit = root / "tests" / "unit"
    for folder in unit.glob("*"):
        if folder.name != "__pycache__":
            bases = ("services", "operator", "tools")
            assert any((root / base / folder.name).is_dir() for base in bases), folder
    for folder in (unit / "ssd").glob("*"):
        place = root / "services" / "ssd" / folder.name
        if folder.is_dir() and folder.name != "__pycache__":
            assert place.is_dir() or place.with_suffix(".py").is_file(), folder


def test_every_path_that_a_readme_names_exists(root: Path) -> None:
    for readme in (root / "README.md", root / "services" / "README.md"):
        rows = [line for line in readme.read_text().splitlines() if line.startswith("|")]
        named = re.findall(r"`((?:[\w.-]+/)[\w./-]*|[\w-]+\.(?:md|toml|txt))`", "\n".join(rows))
        assert [path for path in named if not (root / path).exists()] == []


def test_ci_begins_with_the_quick_start_of_the_readme(root: Path) -> None:
    quick_start = (root / "README.md").read_text().partition("\n## Quick start\n")[2]
    block = quick_start.partition("```sh\n")[2].partition("```")[0]
    commands = [line.partition(" #")[0].rstrip() for line in block.splitlines()]
    assert commands[0] == "make run"
    script = (root / ".ci" / "run").read_text().splitlines()
    first = script.index(commands[0])
    wanted = [*commands, "make check test"]
    assert script[first : first + len(wanted)] == wanted


def test_every_process_and_tool_has_its_row(root: Path, packages: set[str]) -> None:
    rows = re.findall(r"^\|.*\| `(\w+)` \|", (root / "services/README.md").read_text(), re.M)
    named = {path.rpartition("/")[2] for path in packages if path.startswith("services/")}
    assert set(rows) == named - {"ssd"}


def test_the_changelogs_newest_version_is_the_products(root: Path) -> None:
    titles = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert titles[1] == ssd.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", ssd.__version__)
